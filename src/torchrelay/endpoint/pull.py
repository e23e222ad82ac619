"""`pull`: a state from an endpoint, or from any other source.

It is a load from a source: the same planning, the same landing, the same rounds where several ranks
pull together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

from torchrelay.coordination.coordinator import Coordinator
from torchrelay.deadlines import Deadline, Timeout
from torchrelay.endpoint.gpu_destination import wants_gpu
from torchrelay.endpoint.reshare.swarm import SeedingSource
from torchrelay.errors import RelayError, StorageTimeoutError, TransferTimeoutError, UsageError
from torchrelay.loading.loader import Loader, LoadRequest
from torchrelay.memory.pool import Pool, Pooled
from torchrelay.options import PullOptions, checked_options, checked_verify
from torchrelay.results import Loaded
from torchrelay.sources.access import Access
from torchrelay.sources.device_source import DeviceSource
from torchrelay.sources.endpoint import EndpointSource
from torchrelay.sources.places import Place, as_source
from torchrelay.sources.source import Source
from torchrelay.steps import check_step
from torchrelay.system import needs_linux

LOOK_SECONDS = 1.0  # between two looks for a newer step
POOL_SECONDS = 60.0  # that memory of earlier pulls is kept for another


class NewerSteps:
    """A source's steps above a number; the first look waits for one. See `Source`."""

    def __init__(self, source: Source, newer_than: int) -> None:
        self._source, self._newer_than = source, newer_than
        self.name, self.cost = source.name, source.cost
        self.open, self.end = source.open, source.end
        self.waits = True  # for a step that does not exist yet

    def steps(self, deadline: Deadline) -> list[int]:
        while True:
            if isinstance(self._source, (EndpointSource, DeviceSource, SeedingSource)):
                found = self._source.wait(self._newer_than, deadline)
            else:
                found = list(self._source.steps(deadline))
            newer = [step for step in found if step > self._newer_than]
            self.waits = not newer
            if newer:
                return newer
            if deadline.early() < LOOK_SECONDS:
                raise self.in_vain(deadline)
            time.sleep(LOOK_SECONDS)

    def in_vain(self, deadline: Deadline) -> TransferTimeoutError:
        return TransferTimeoutError(
            f"no step above {self._newer_than} at {self.name} in {deadline.seconds:g} s: wait "
            "longer, or see whether the publisher is alive",
            phase="wait",
        )


def pull(
    source: Place,
    into: object = None,
    *,
    step: int | None = None,
    key: str | None = None,
    include: str | Iterable[str] = (),
    timeout: Timeout = 300.0,
    access: Access | None = None,
    group: Any = None,
    no_dist: bool = False,
    options: PullOptions | None = None,
) -> Loaded:
    """All ranks call it together: read a state from an endpoint, or from another source.

    - `source`: a URL, or several that have the same step; also whatever `recover` takes.
    - `into`: a state of tensors and objects that takes the values, of any layout or mesh; `None`
      makes new tensors.
    - `step`: this one, or `StepNotFoundError`.
    - `key`, `include`: the state below a key, and patterns of dotted paths, as for `load`.
    - `timeout` bounds the call.
    - `access`: the token of the endpoints, and the certificates that theirs are signed by.
    - `group`: ranks that pull one step together, each its part of `into`: all of them land it, or
      none. By default all ranks, where torch.distributed is initialized. `no_dist`: this process
      alone.
    - `options`: the rare ones, as `tr.options.PullOptions`.
    """
    settings: PullOptions = checked_options(options, PullOptions)
    newer_than, same_host, progress = settings.newer_than, settings.same_host, settings.progress
    verify = checked_verify(settings.verify) == "all"  # also what is mapped on this host
    step, newer_than = (None if one is None else check_step(one) for one in (step, newer_than))
    if step is not None and newer_than is not None:
        raise UsageError("give step= or options.newer_than, not both")
    mapped = same_host and not settings.reshare
    origin = as_source(source, access, same_host=mapped, verify=verify)
    deadline = Deadline(timeout)
    ranks = Coordinator.of(group, "pull", "function", no_dist=no_dist)
    chosen: Source = origin
    seeding = newer = on_device = None
    on_gpu = same_host and wants_gpu(into, settings.device)
    if settings.reshare:
        needs_linux("pull(reshare=True)")
        if not isinstance(origin, EndpointSource):
            raise UsageError(f"reshare=True is for endpoints and live ranks, not {origin.name}")
        # The progress is that of what is fetched, not of what is landed from there.
        chosen = seeding = SeedingSource(origin, progress)
        progress = None
    elif on_gpu and isinstance(origin, EndpointSource) and origin.lends_gpus:
        chosen = on_device = DeviceSource(origin, step=step, verify=verify)
    if newer_than is not None:
        chosen = newer = NewerSteps(chosen, newer_than)
    request = LoadRequest(
        into,
        step,
        strict=settings.strict,
        key=key,
        include=include,
        verify=bool(settings.verify),
        atomic=settings.atomic,
        device=settings.device,
        progress=progress,
    )
    loader = Loader(chosen, ranks, Pooled(_pool(os.getpid())))
    reason, nbytes = "it was interrupted", 0
    with ranks.measured("pull", step) as measured:
        try:
            loaded = loader.load(ranks.call("pull"), request, deadline)
            reason, nbytes = "", loaded.report.bytes
            if seeding is not None and seeding.swarm is not None:
                loaded = replace(loaded, seed=seeding.swarm.seed)
            server = on_device or origin
            if isinstance(server, (DeviceSource, EndpointSource)):  # it knows what it has sent
                loaded = server.reported(loaded, "http", verify=verify)
            measured.end(loaded.report)
            return loaded
        except StorageTimeoutError as fault:
            reason = "it took too long"
            if newer is not None and newer.waits:
                raise newer.in_vain(deadline) from fault
            received = sum(origin.supplied.values()) if isinstance(origin, EndpointSource) else 0
            raise TransferTimeoutError(
                f"{origin.name} did not give the state in {deadline.seconds:g} s; it gave "
                f"{received} bytes. Give a longer timeout",
                step=step,
                phase="data",
            ) from fault
        except RelayError as fault:
            reason = fault.message
            raise
        finally:
            (on_device or origin).end(reason, nbytes)
            if reason and seeding is not None:
                seeding.close()


@cache
def _pool(process: int) -> Pool:
    """Memory that a pull of this process leaves for the next one. A child of a fork has its own."""
    return Pool(seconds=POOL_SECONDS)
