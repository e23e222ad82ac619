"""From a live state to a step that can be read: plan, reserve memory, copy, hash, show.

The caller waits until its state is copied, to host memory or to memory of its GPU. The rest happens
on a thread, in the server's process. All ranks publish a step, or none does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import msgspec

from torchrelay.coordination.call import Call
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.coordination.messages import COORDINATOR, decoded
from torchrelay.deadlines import Deadline, Timeout
from torchrelay.endpoint.encoding import Encoding
from torchrelay.endpoint.publish.device_path import DevicePath
from torchrelay.endpoint.publish.device_slots import DeviceSlot
from torchrelay.endpoint.publish.host_slots import HostSlots
from torchrelay.endpoint.publish.known_plan import KnownPlan
from torchrelay.endpoint.publish.server_process import ServerProcess
from torchrelay.endpoint.publish.show_rounds import ShowRounds, StagedStep
from torchrelay.endpoint.server import messages as m
from torchrelay.errors import EndpointError, ResourceError, UsageError
from torchrelay.memory import threads
from torchrelay.memory.arena import Arena
from torchrelay.memory.gpu.side import settle
from torchrelay.owner import Owner
from torchrelay.pending import Pending
from torchrelay.results import Report
from torchrelay.shares.planner import PlannedShare, SharePlanner
from torchrelay.shares.share import Share
from torchrelay.steps import check_step

_FINISH_SECONDS = 5.0  # for the last message of a publish


class _Offer(msgspec.Struct, array_like=True):
    """A rank at the beginning of a publish: its server, and the bytes of its part."""

    url: str
    report: bytes
    nbytes: int


class _Begin(msgspec.Struct, array_like=True):
    """The coordinator's answer: the server of each rank, or why the step is skipped."""

    urls: list[str]
    decision: bytes
    skipped: str


_offer = msgspec.msgpack.Decoder(_Offer)
_begin = msgspec.msgpack.Decoder(_Begin)
# Why a rank has no memory, or none of them has; and whether there is some of a GPU.
_room = msgspec.msgpack.Decoder(tuple[str, bool])
_encode = msgspec.msgpack.encode


class Publisher:
    """Publishes the states of one rank, one at a time, until `close`. `front`: the class that users
    call, and `again` what they do instead when it is closed. Without an `encoding` no changes are
    found."""

    def __init__(
        self,
        ranks: Coordinator,
        server: ServerProcess,
        timeout: float,
        front: str,
        again: str,
        encoding: Encoding | None = None,
    ) -> None:
        self._encoding = encoding or Encoding(history=0)
        self._all, self._server, self._timeout = ranks, server, timeout
        self.owner, self._again = Owner(front), f"this {front.lower()} is closed: {again}"
        self._calls = threading.RLock()
        self.closed = False
        self._planner = SharePlanner(
            ranks.rank, ranks.world, None, ranks.members, self._encoding.dtype
        )
        known = KnownPlan()
        self._host = HostSlots()
        changes = bool(self._encoding.history)
        self._device = DevicePath(self._host, known, changes=changes)
        self._show = ShowRounds(ranks, server, known, self._host, self._device, changes=changes)
        self._last: Pending | None = None
        self.urls: list[str] = []  # of the ranks' servers, each once; the first lists all parts

    def _check_open(self) -> None:
        self.owner.check()
        if self.closed:
            raise UsageError(self._again)

    @contextmanager
    def open(self, timeout: Timeout | None) -> Iterator[Deadline]:
        """Within: no other thread publishes. `UsageError` in a fork, and after `close`."""
        self.owner.check()  # a fork may have the lock as another thread held it
        with self._calls:
            self._check_open()
            yield Deadline(self._timeout if timeout is None else timeout)

    def publish(
        self, state: object, step: int, timeout: Timeout | None, stage_on: str = "host"
    ) -> Pending:
        """Publish a state: returns when it is copied."""
        step = check_step(step)
        with self.open(timeout) as deadline:
            return self.publish_planned(
                lambda call: self._planner.plan(state, call, deadline), step, deadline, stage_on
            )[0]

    def publish_planned(
        self,
        plan: Callable[[Call], PlannedShare],
        step: int,
        deadline: Deadline,
        stage_on: str = "host",
    ) -> tuple[Pending, StagedStep | None]:
        """The same for what `plan` returns, within `open`; no staged step where it is skipped."""
        with self._all.measured(self._server.operation, step, background=True) as measured:
            call = self._all.call("publish", step)
            with call.reporting("plan", deadline):
                if self._last is not None and not self._last.ends_within(deadline.left()):
                    raise TimeoutError(f"step {self._last.step} is still being published")
                begun = time.monotonic()
                self._have_server(deadline)
            planned = plan(call)
            begin = self._agree(call, step, planned.share, deadline)
            slot, why, on_device = -1, begin.skipped, None
            if not why:
                slot, why, on_device = self._reserve(
                    call, step, planned.share, begin.decision, stage_on, deadline
                )
            if why:
                seconds = time.monotonic() - begun
                ended = m.FinishPublish(step, 0, seconds, skipped=why, unused=True)
                self._server.ask(ended, m.Obeyed, _FINISH_SECONDS)
                return Pending(step, "publishing", why, measured), None
            self._last = pending = Pending(step, "publishing", measured=measured)
            try:
                settle()
                if on_device is not None:
                    volumes = self._device.copy(planned.share, on_device)
                else:
                    volumes = self._host.copy(planned.share, slot)
            except BaseException as fault:
                self._give_up(step)  # at once: readers wait for it
                self._in_background(call, fault, pending, deadline)
                raise
            seconds = time.monotonic() - begun
            staged = StagedStep(step, slot, planned, volumes, begin.urls, seconds, on_device)
            self._in_background(call, staged, pending, deadline)
            return pending, staged

    def _have_server(self, deadline: Deadline) -> None:
        if self._server.start(deadline.left()):
            # Processes that the one before lent memory to may still read it: it stays unchanged.
            self._free()
            self.urls = []

    def _give_up(self, step: int, *, unused: bool = False) -> None:
        """The step will not come. Never raises: what went wrong is raised."""
        with suppress(EndpointError):
            ended = m.FinishPublish(step, failed=True, unused=unused)
            self._server.ask(ended, m.Obeyed, _FINISH_SECONDS)

    def _in_background(
        self, call: Call, staged: StagedStep | BaseException, pending: Pending, deadline: Deadline
    ) -> None:
        """Finish a publish on another thread; on this one where none can be started, so that the
        ranks agree and the next publish does not wait for this one."""
        finish = partial(self._finish, call, staged, pending, deadline)
        try:
            threads.start(finish, "publish")
        except ResourceError:
            finish()

    # Agree, reserve and copy, while the caller waits.

    def _agree(self, call: Call, step: int, share: Share, deadline: Deadline) -> _Begin:
        """All ranks know each other's servers. A rank that names another step has failed before:
        calls are matched by their steps."""

        def mine() -> bytes:
            try:
                report = self._server.report(deadline)
            except EndpointError:  # the server was lost just now
                self._have_server(deadline)
                report = self._server.report(deadline)
            return _encode(_Offer(self._server.url, report, m.laid_out(share.files)[1]))

        def decide(sent: list[bytes]) -> list[bytes]:
            offers = [decoded(_offer, data, rank) for rank, data in enumerate(sent)]
            urls, parts = [one.url for one in offers], [one.nbytes for one in offers]
            decision, why = self._server.choose([one.report for one in offers], parts, urls, step)
            return [_encode(_Begin(urls, decision, why))] * len(sent)

        call.at("agreeing on a publish")
        found = decoded(_begin, call.round("begin", mine, decide, deadline), COORDINATOR)
        urls = list(dict.fromkeys(found.urls))
        if urls != self.urls:
            with call.reporting("plan", deadline):
                self._server.meet(urls, deadline)
            self.urls = urls
        return found

    def _reserve(
        self,
        call: Call,
        step: int,
        share: Share,
        decision: bytes,
        stage_on: str,
        deadline: Deadline,
    ) -> tuple[int, str, DeviceSlot | None]:
        """A slot for this rank's part, or why there is none, and memory of a GPU. All ranks have
        one, or none does."""
        nbytes = m.laid_out(share.files)[1]
        where = stage_on if self._server.on_devices else "host"
        found: list[tuple[int, DeviceSlot | None]] = []

        def mine() -> bytes:
            unfit = self._device.unfit(share, where)
            wanted = m.Reserve(step, nbytes, decision, on_device=not unfit)
            room = self._server.ask(wanted, m.Reserved, deadline.left())
            for slot in room.dropped:
                self._host.drop(slot)
            chosen = None
            if not room.why:
                chosen = self._device.choose(share, where, room.device, unfit)
            found.append((room.slot, chosen))
            return _encode((room.why, chosen is not None))

        def decide(sent: list[bytes]) -> list[bytes]:
            rooms = [decoded(_room, data, rank) for rank, data in enumerate(sent)]
            why = next((why for why, _ in rooms if why), "")
            return [_encode((why, all(on_device for _, on_device in rooms)))] * len(sent)

        call.at("reserving memory")
        try:
            why, on_device = decoded(
                _room, call.round("reserve", mine, decide, deadline), COORDINATOR
            )
        except BaseException:
            self._give_up(step, unused=True)
            raise
        slot, chosen = found[0]
        return slot, why, chosen if on_device else None

    # Show it, on a thread.

    def _finish(
        self, call: Call, staged: StagedStep | BaseException, pending: Pending, deadline: Deadline
    ) -> None:
        """`staged` is a failure where this rank could not copy its part, which its caller knows.
        The other ranks read it when they have copied their own."""
        begun = time.monotonic()
        report: Report | None = None
        fault: BaseException | None = None
        try:
            if isinstance(staged, BaseException):
                call.round("write", staged, lambda sent: sent, deadline)
            else:
                self._show.run(call, staged, deadline)
                ended = m.FinishPublish(staged.step, staged.planned.share.nbytes, staged.seconds)
                ended.hash_seconds = time.monotonic() - begun
                ended.on_device = staged.on_device is not None
                self._server.ask(ended, m.Obeyed, _FINISH_SECONDS)
                seconds = {"stage": staged.seconds, "hash": ended.hash_seconds}
                report = Report(staged.step, staged.planned.share.nbytes, seconds)
        except BaseException as found:
            if isinstance(staged, StagedStep):
                fault = found
                self._give_up(staged.step)
        call.drain()
        pending.end(report, fault)

    # The end.

    def settle(self, seconds: float) -> None:
        """Wait for what is being published."""
        if self._last is not None:
            self._last.ends_within(seconds)

    def memory_of(self, staged: StagedStep) -> Arena:
        """The host memory of a step that is staged there."""
        return self._host[staged.slot]

    def status(self) -> dict[str, Any]:
        """The server's status, as `/status.json` has it."""
        self._check_open()
        answer = self._server.ask(m.Tell(), m.StatusText, self._timeout)
        found: dict[str, Any] = msgspec.json.decode(answer.text)
        return found

    def detach_after_fork(self) -> None:
        """In a child of a fork: the server and the memory are the parent's."""
        self._server.process.detach_after_fork()
        self._host.detach_after_fork()
        self._device.detach_after_fork()

    def close(self) -> None:
        """Wait for what is being published, then let go of the server and the memory.

        A call of another thread ends first: it writes to that memory.
        """
        if self.closed or not self.owner.here:
            return
        self.closed = True  # calls that wait for their turn are refused
        over = self._calls.acquire(timeout=self._timeout)
        try:
            self.settle(self._timeout)
            self._server.process.close()
            if over:  # else the memory is in use until the process ends
                self._free()
        finally:
            if over:
                self._calls.release()

    def _free(self) -> None:
        self._host.free()
        self._device.free()
