"""`subscribe`: a destination that follows the steps that a trainer publishes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from typing import Any

import msgspec

from torchrelay.coordination.call import Call
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.coordination.messages import COORDINATOR, decoded
from torchrelay.deadlines import Deadline, Stopwatch, Timeout
from torchrelay.endpoint.gpu_destination import wants_gpu
from torchrelay.errors import (
    RelayError,
    StepNotFoundError,
    StorageTimeoutError,
    TransferTimeoutError,
    UsageError,
)
from torchrelay.loading.loader import Loader, LoadRequest
from torchrelay.owner import Owner
from torchrelay.results import Attempt, Loaded, Outcome, Peer, Report
from torchrelay.sources.access import Access
from torchrelay.sources.device_source import NAME as CUDA_IPC
from torchrelay.sources.device_source import DeviceLentStep
from torchrelay.sources.endpoint import EndpointSource
from torchrelay.steps import check_step
from torchrelay.system import needs_linux
from torchrelay.weights.device_updates import DeviceUpdates
from torchrelay.weights.following import NewestStep, Publisher, StepIdentity, publisher
from torchrelay.weights.packed_volumes import PackedVolumes

_WENT_BACK = "the destination had it; the publisher went back to a lower step"
AGAIN_SECONDS = 0.1  # before another look, where a step was replaced while it was read


class _Newest(msgspec.Struct, array_like=True):
    """The findings of rank 0: the newest step, and whether all ranks have its state."""

    found: StepIdentity
    all_have: bool


_newest = msgspec.msgpack.Decoder(_Newest)
_identity = msgspec.msgpack.Decoder(StepIdentity)
_encode = msgspec.msgpack.encode


class Subscription:
    """A destination that follows a publisher. Made by `subscribe`, and usable from one thread at a
    time; a context manager."""

    def __init__(
        self,
        source: Publisher,
        request: LoadRequest,
        access: Access | None,
        ranks: Coordinator,
        same_host: bool,
        timeout: Timeout,
    ) -> None:
        deadline = Deadline(timeout)
        self._ranks = ranks
        with self._ranks.joining():
            if request.into is None:
                raise UsageError("a subscription fills tensors that exist: give into=")
            publisher(source, access, same_host)  # `UsageError` for what cannot be one
        self._source, self._access, self._same_host = source, access, same_host
        self._request, self._timeout = request, timeout
        self._packed = PackedVolumes()
        self._on_gpu = DeviceUpdates(request.into)
        self._current: StepIdentity | None = None  # the step that `into` has
        self._latest: int | None = None  # the step of the last update that succeeded
        self._state: Any = None  # `into`, as loads return it
        self._owner = Owner("Subscription")
        self._calls = threading.Lock()
        self._closed = False
        self._connected: EndpointSource | None = None  # to servers that answered the last update
        newest = self._newest(0)
        try:
            Loader(newest, self._ranks).check(self._ranks.call("subscribe"), request, deadline)
            self._connected = newest.for_another()
        finally:
            newest.end()

    @property
    def step(self) -> int | None:
        """The step that `into` has; None before the first update, and after one that failed."""
        return None if self._current is None else self._current.step

    def update(self, at_least: int | None = None, timeout: Timeout | None = None) -> Loaded:
        """All ranks call it together: bring `into` to the newest step, at least `at_least`.

        Waits for such a step. `into` is of one step, before and after: a failure leaves it as it
        was. A landing that has begun ends, and an interrupt is raised when it is over. Where `into`
        has the newest step already, or one with the same state, nothing is read. All ranks have the
        same step afterwards. A trainer that came back at a lower step is followed: `back_from` of
        the result is the step that `into` had before.
        """
        self._owner.check()
        floor = 0 if at_least is None else check_step(at_least)
        deadline = Deadline(self._timeout if timeout is None else timeout)
        with self._calls:
            if self._closed:
                raise UsageError("this subscription is closed: subscribe again")
            with self._ranks.measured("update", at_least) as measured:
                loaded = self._compared(self._update(floor, deadline))
                measured.end(loaded.report)
                return loaded

    def _compared(self, loaded: Loaded) -> Loaded:
        """The result of an update, which says if the step is lower than the one before."""
        before, self._latest = self._latest, loaded.step
        if before is None or loaded.step is None or loaded.step >= before:
            return loaded
        gone = Attempt(", ".join(map(str, loaded.report.peers)) or "publisher", before, _WENT_BACK)
        report = replace(loaded.report, attempts=(*loaded.report.attempts, gone))
        return replace(loaded, report=report, back_from=before)

    def _update(self, floor: int, deadline: Deadline) -> Loaded:
        while True:
            newest = self._newest(floor)
            reason, nbytes = "it was interrupted", 0
            try:
                loaded = self._take(newest, deadline)
                reason, nbytes = "", loaded.report.bytes
                self._connected = newest.for_another()
                return loaded
            except StorageTimeoutError as fault:
                reason = "it took too long"
                raise TransferTimeoutError(
                    f"{newest.name} did not give its newest step in {deadline.seconds:g} s: give "
                    "a longer timeout",
                    phase="data",
                ) from fault
            except StepNotFoundError as fault:
                reason = fault.message
                if deadline.early() < 2 * AGAIN_SECONDS:
                    raise
            except RelayError as fault:
                reason = fault.message
                raise
            finally:
                newest.end(reason, nbytes)
            time.sleep(AGAIN_SECONDS)

    def _take(self, newest: NewestStep, deadline: Deadline) -> Loaded:
        call = self._ranks.call("update")
        found = self._look(call, newest, deadline)
        current, self._current = self._current, None  # until it is known what `into` has
        if found.all_have and current is not None:
            self._packed.rename(current.snapshot, found.found.snapshot)
            self._current = found.found
            return Loaded(self._state, found.found.step, Report(found.found.step, 0))
        if current is not None and (copied := self._copied(newest)) is not None:
            return copied
        loaded = Loader(newest, self._ranks, in_memory=True).load(call, self._request, deadline)
        if isinstance(newest.opened, DeviceLentStep):
            self._on_gpu.learn(newest.opened)
        self._current, self._state = newest.taken, loaded.state
        return newest.reported(loaded)

    def _copied(self, newest: NewestStep) -> Loaded | None:
        """The result of an update by the copies of the one before, on the GPU; None where it has to
        be planned. Ranks of a group land together, so each of their updates is."""
        lent = None if newest.device is None else newest.device.lent
        if lent is None or self._ranks.world > 1 or not self._on_gpu.fits(lent):
            return None
        assert newest.device is not None
        newest.device.take()
        watch = Stopwatch()
        with closing(lent), watch("land"):
            nbytes = self._on_gpu.copy(lent)
        step = lent.lease.step
        self._current = StepIdentity.of(lent.lease)
        peers: dict[Peer, Outcome] = {newest.name: Outcome(route=CUDA_IPC, bytes=nbytes)}
        return Loaded(self._state, step, Report(step, nbytes, dict(watch.seconds), peers))

    def _look(self, call: Call, newest: NewestStep, deadline: Deadline) -> _Newest:
        """The newest step, and whether every rank has it."""
        mine = self._current or StepIdentity(-1)

        def decide(sent: list[bytes]) -> list[bytes]:
            (step,) = newest.steps(deadline)
            found = newest.identity(step)
            identities = [decoded(_identity, data, rank) for rank, data in enumerate(sent)]
            all_have = all(one.same_state(found) for one in identities)
            return [_encode(_Newest(found, all_have))] * len(sent)

        call.at("waiting for a step")
        answer = call.round("look", lambda: _encode(mine), decide, deadline)
        return decoded(_newest, answer, COORDINATOR)

    def _newest(self, floor: int) -> NewestStep:
        connected, self._connected = self._connected, None
        origin = connected or publisher(self._source, self._access, self._same_host)
        on_gpu = self._same_host and wants_gpu(self._request.into)
        return NewestStep(origin, self._packed, floor, on_gpu=on_gpu)

    def close(self) -> None:
        """Free the memory of the subscription. `into` stays as it is."""
        self._closed = True
        self._packed, self._current, self._state = PackedVolumes(), None, None
        if self._connected is not None:
            self._connected.end()
        self._on_gpu.close()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def subscribe(
    source: Publisher,
    into: object,
    *,
    key: str | None = None,
    include: str | Iterable[str] = (),
    strict: bool = True,
    timeout: Timeout = 300.0,
    access: Access | None = None,
    group: Any = None,
    no_dist: bool = False,
    same_host: bool = True,
) -> Subscription:
    """All ranks call it together: follow the steps that a trainer publishes.

    `update` of the result brings `into` to the newest.
    The newest step is planned at once, and refused here if `into` does not fit; a first step is
    waited for. Nothing is written before the first `update`. Over a network each rank receives the
    bytes that its part of `into` needs, and no others.

    - `source`: the URL of an endpoint, `Relay.peer(rank)`, or several of one kind that have the
      same steps.
    - `into`: a state of tensors and objects that takes the values, of any layout or mesh.
    - `key`, `include`: the state below a key, and patterns of dotted paths, as for `load`.
    - `strict`: refuse steps that have missing or unexpected paths.
    - `timeout` bounds each call.
    - `access`: the token of the endpoints, and the certificates that theirs are signed by.
    - `group`: ranks that follow together, each with its part of `into`. By default all ranks, where
      torch.distributed is initialized. `no_dist`: this process alone.
    - `same_host`: whether memory of an endpoint of this host and this user is mapped in place of
      reading it over TCP. Where a step is kept on a GPU of this host, tensors on GPUs are copied
      from there (CUDA IPC).
    """
    needs_linux("subscribe")
    request = LoadRequest(into, key=key, include=include, strict=strict)
    ranks = Coordinator.of(group, "subscription", no_dist=no_dist)
    return Subscription(source, request, access, ranks, same_host, timeout)
