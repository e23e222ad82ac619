"""Steps of an endpoint or a live rank, taken together with others who take them at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeGuard

from torchrelay.deadlines import Deadline
from torchrelay.endpoint.reshare.seed import Seed
from torchrelay.endpoint.reshare.swarm import Swarm
from torchrelay.errors import UsageError
from torchrelay.progress import Bar, ProgressCallback
from torchrelay.record.schema import Record
from torchrelay.sources.access import Access
from torchrelay.sources.endpoint import EndpointSource
from torchrelay.sources.lent_memory import MappedReader
from torchrelay.sources.peer import PeerSource
from torchrelay.sources.remote_step import RemoteStep
from torchrelay.sources.seam import Opened, Source


def can_be_seeded(source: Source) -> TypeGuard[EndpointSource | PeerSource]:
    """Whether pullers of a source can pass its steps on. Seeds of https endpoints need their own
    certificate."""
    if isinstance(source, PeerSource):
        return True
    if not isinstance(source, EndpointSource) or source.job:
        return False
    return source.access.tls or not any(host.tls for host in source.hosts)


class SeedingSource:
    """Opens a step by fetching it into memory of its own, which it serves until `close`.

    A step that is in memory of this host is opened as it is. See `sources.seam.Source`.
    """

    def __init__(
        self, source: EndpointSource | PeerSource, progress: ProgressCallback | None = None
    ) -> None:
        if not can_be_seeded(source):
            raise UsageError(
                "reshare=True from https needs Access(certfile=): others verify this seed by it"
            )
        self._source, self._progress = source, progress
        self.steps, self.end = source.steps, source.end
        self.seed: Seed | None = None
        self.swarm: Swarm | None = None

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def cost(self) -> int:
        return self._source.cost

    def open(self, step: int, deadline: Deadline) -> Opened:
        remote = self._source.open(step, deadline)
        if remote.mapped:
            return remote
        endpoint = self._source
        if isinstance(endpoint, PeerSource):
            assert endpoint.endpoint is not None
            endpoint = endpoint.endpoint
        origin = next(host for host in endpoint.hosts if host.url not in endpoint.failed)
        access = endpoint.access if origin.tls else Access(token=endpoint.access.secret())
        self.close()
        progress = Bar(self._progress, remote.record.volume_bytes).add
        connect = partial(endpoint.host, like=origin)
        self.swarm = swarm = Swarm(origin, remote, connect, deadline, progress)
        files = remote.record.volumes
        self.seed = seed = Seed(origin.address, access, files, swarm.expects, swarm.meet)
        seed.show(step, remote.snapshot, remote.manifest())
        swarm.run(seed)
        return SeededStep(seed, remote)

    def close(self) -> None:
        """Serve no more."""
        if self.swarm is not None:
            self.swarm.stop()
        if self.seed is not None:
            self.seed.close()


class SeededStep:
    """A step that a seed has whole. New tensors keep its memory; the first write to one copies the
    page. See `stores.seam.LendingStep`."""

    costly_reads = False
    trusted = True

    def __init__(self, seed: Seed, remote: RemoteStep) -> None:
        self.record: Record = remote.record
        self.url, self.digest = remote.url, remote.digest
        self.lend: Callable[[str, int, int], memoryview] = seed.lend
        self._seed, self._remote = seed, remote

    @property
    def files(self) -> SeededStep:
        return self

    def reader(self, name: str, *, once: bool = True) -> MappedReader:
        return self._seed.reader(name)

    def close(self) -> None:
        self._remote.close()
