"""A step fetched together with others who fetch it too, so that the endpoint sends about one copy.

The endpoint names all who fetch the step. The pieces are divided among them: each asks the endpoint
for its own share, and the others for theirs, where it waits for what is still arriving. A neighbour
that has the whole step is asked for anything. The endpoint gives what a neighbour does not give in
time; neighbours that are slow, late or wrong are dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import msgspec
import numpy as np

from torchrelay.deadlines import Deadline
from torchrelay.endpoint.reshare.seed import ArrivingBytes, Seed
from torchrelay.endpoint.server.messages import SeedAnnouncement, SeedAnswer
from torchrelay.errors import EndpointError, TransferTimeoutError, UsageError
from torchrelay.memory import threads
from torchrelay.memory.thread_pool import ThreadPool, run_on_threads
from torchrelay.progress import Bar, ProgressCallback
from torchrelay.record.schema import Record, VolumeRecord
from torchrelay.sources.access import Access
from torchrelay.sources.connection import Answered, Host, Reply
from torchrelay.sources.endpoint import EndpointSource
from torchrelay.sources.lent_memory import MappedReader
from torchrelay.sources.remote_step import (
    ArrivingChunks,
    RemoteReader,
    RemoteStep,
    Supplier,
)
from torchrelay.sources.source import Opened, Source
from torchrelay.stores.reading.chunks import whole_chunks
from torchrelay.stores.step_files import StepFiles

PIECE_BYTES = 2 << 20
WORKERS = 9  # and connections, shared by the endpoint and all neighbours
TURN = 1.0  # seconds in which a neighbour that is well answers, and the unit of all waits below

MAX_SEEDS = 64

_SHORT = TURN / 10  # before a neighbour that does not have a piece is asked again
_ANNOUNCE = 3 * TURN  # between two announcements, once all of the step is here
_SLOW = 4 * TURN  # that a piece may take, unless pieces take long on average: then
_SLOWER = 8  # times their average
_MISSES = round(TURN / _SHORT)  # in a row, for which a neighbour is kept; a late piece counts half

_FAULTS = (OSError, EndpointError, msgspec.MsgspecError)
Flags = np.ndarray[Any, np.dtype[np.bool_]]


_answer = msgspec.json.Decoder(SeedAnswer)


class Piece(NamedTuple):
    """Whole chunks of a volume: bytes [start, stop). `number`: of the first chunk among all."""

    file: VolumeRecord
    start: int
    stop: int
    number: int


def pieces_of(files: Sequence[VolumeRecord]) -> list[Piece]:
    found, number = [], 0
    for file in files:
        for start, stop in whole_chunks(file, [(0, file.nbytes)], PIECE_BYTES):
            found.append(Piece(file, start, stop, number + start // file.chunk_bytes))
        number += file.chunks
    return found


class Neighbour(Supplier):
    """Another puller of the same step, or the endpoint."""

    answered = False  # whether it is known to be there
    complete = False  # whether it says that it has the whole step


class Swarm:
    """One step on its way into the memory of a seed, which serves it from the beginning. `run`
    returns when all of it has arrived and is verified."""

    def __init__(
        self,
        endpoint: EndpointSource,
        remote: RemoteStep,
        deadline: Deadline,
        progress: Callable[[int], None],
    ) -> None:
        self._origin = origin = next(h for h in endpoint.hosts if h.url not in endpoint.failed)
        self._connect = partial(endpoint.host, like=origin)
        self._remote, self._deadline, self._progress = remote, deadline, progress
        self._pieces = pieces_of(remote.record.volumes)
        self._numbers = np.arange(len(self._pieces))
        self._first_chunks = [piece.number for piece in self._pieces]
        self._open: Flags = np.ones(len(self._pieces), bool)  # neither here nor on their way
        self._endpoint = Neighbour(origin, remote.snapshot)
        self._typical = 0.0  # seconds that a piece takes
        self._lock = threading.RLock()
        self._neighbours: dict[str, Neighbour] = {}
        endpoint.helpers = self._neighbours.values()
        self._over = threading.Event()
        access = endpoint.access if origin.tls else Access(token=endpoint.access.secret())
        files = remote.record.volumes
        self.seed = Seed(origin.address, access, files, self.expects, self.meet)

    def run(self, step: int) -> None:
        """Fetch the step, and serve what is here of it."""
        self.seed.show(step, self._remote.snapshot, self._remote.manifest())
        self._look_around()
        threads.start(self._watch, "swarm")
        try:
            run_on_threads(range(WORKERS), lambda: self._work, WORKERS)
        finally:
            self.stop()
        if self._open.any():
            raise TransferTimeoutError("the step was given up", phase="data")

    def stop(self) -> None:
        """Fetch no more: `run` raises, unless it has finished."""
        self._over.set()

    def expects(self, chunk: int) -> bool:
        """Whether a chunk is on its way here, or will be soon."""
        with self._lock:
            index = int(np.searchsorted(self._first_chunks, chunk, side="right")) - 1
            if self._over.is_set() or index < 0:
                return False
            return not self._open[index] or bool(self._share(self.seed.url)[index])

    # Other pullers of the step.

    def meet(self, url: str) -> None:
        """Another puller has announced itself here."""
        if (one := self._learn(url)) is not None:
            one.answered = True

    def _learn(self, url: str) -> Neighbour | None:
        """The neighbour at a URL; None for this process itself, one too many, or a bad URL."""
        with self._lock:
            is_new = url not in self._neighbours and url != self.seed.url
            if is_new and len(self._neighbours) < MAX_SEEDS and not self._over.is_set():
                with suppress(UsageError):
                    made = Neighbour(self._connect(url), self._remote.snapshot, TURN)
                    self._neighbours[url] = made
            return self._neighbours.get(url)

    def _watch(self) -> None:
        """Look for others while the step is fetched; have the endpoint name this puller to others
        until its seed is closed."""
        pause = 2 * _SHORT  # at the beginning others come, too
        while not self._over.wait(pause):
            self._look_around()
            pause = min(1.2 * pause, TURN)
        for one in self._neighbours.values():
            one.close()
        while not self.seed.closed.wait(_ANNOUNCE):
            with suppress(*_FAULTS):
                if self._post(self._origin, _ANNOUNCE).status == 410:
                    break
        self._origin.close()

    def _look_around(self) -> None:
        """Have the endpoint name this puller to others, and others to this one. Greet those that
        are new."""
        with suppress(*_FAULTS):
            for url in self._announce_to(self._origin).seeds[:MAX_SEEDS]:
                self._learn(url)
        every = list(self._neighbours.values())
        some = [one for one in every if not one.answered and not one.dropped]
        ThreadPool(WORKERS).each(self._greet, some)

    def _greet(self, one: Neighbour) -> None:
        try:
            one.complete = self._announce_to(one.host).complete
            one.answered = True
        except _FAULTS as fault:
            one.dropped = one.dropped or f"does not answer: {fault}"

    def _announce_to(self, host: Host) -> SeedAnswer:
        answer = self._post(host, TURN)
        return _answer.decode(answer.body) if answer.status == 200 else SeedAnswer([], False)

    def _post(self, host: Host, seconds: float) -> Reply:
        message = msgspec.json.encode(SeedAnnouncement(self.seed.url, self._remote.snapshot))
        return host.post("/seeds", message, seconds=seconds)

    def _alive(self) -> list[Neighbour]:
        every = list(self._neighbours.values())
        return [one for one in every if one.answered and not one.dropped]

    def _share(self, url: str) -> Flags:
        """The pieces that one puller asks the endpoint for."""
        everybody = sorted([self.seed.url, *(one.name for one in self._alive())])
        if url not in everybody:
            return np.zeros(len(self._pieces), bool)
        mine: Flags = self._numbers % len(everybody) == everybody.index(url)
        return mine

    # Pieces, and where they come from.

    def _work(self, number: int) -> None:
        while not self._over.is_set():
            with self._lock:
                index, giver = self._choose()
                if index is None:
                    return  # other workers fetch what is left
                self._open[index] = False
                giver.active += 1
            done = False
            try:
                done = self._fetch(self._pieces[index], giver)
            finally:
                with self._lock:
                    giver.active -= 1
                    self._open[index] = not done
            if not done:
                self._over.wait(_SHORT)

    def _choose(self) -> tuple[int | None, Neighbour]:
        """A piece to fetch, and from whom. Pieces of all pullers are on their way at any time: what
        one of them has, the others get while it asks the endpoint for more."""
        alive = sorted(self._alive(), key=lambda one: (one.active, one.bytes))
        mine = _first(self._open & self._share(self.seed.url))
        whole = next((one for one in alive if one.complete), None)
        is_free = self._endpoint.active < max(1, WORKERS // (1 + len(alive)))
        if mine is not None and (whole is not None or is_free):
            return mine, whole or self._endpoint
        for one in alive:
            index = _first(self._open if one.complete else self._open & self._share(one.name))
            if index is not None:
                return index, one
        return mine, self._endpoint

    def _fetch(self, piece: Piece, giver: Neighbour) -> bool:
        """Whether a piece has arrived; others may have it then."""
        file, start, stop, number = piece
        space = self.seed.space(file.name, start, stop)
        begun = time.monotonic()
        try:
            received = giver is not self._endpoint and self._from_neighbour(piece, giver, space)
        except Answered:
            return False
        if not received:
            reader = RemoteReader(file, self._remote.suppliers, space.reach)
            reader.read_into(start, space.view)
        spent = time.monotonic() - begun
        self._typical = spent if not self._typical else 0.9 * self._typical + 0.1 * spent
        self.seed.add(number, -(-(stop - start) // file.chunk_bytes))
        self._progress(stop - start)
        return True

    def _from_neighbour(self, piece: Piece, giver: Neighbour, space: ArrivingBytes) -> bool:
        """Whether a neighbour gave a piece. `Answered` where it does not have it yet: it may be
        late, or its list of neighbours differs for a moment."""
        file, start, stop, _ = piece
        chunks = ArrivingChunks(file, start)
        seconds = max(_SLOW, TURN + _SLOWER * self._typical)
        seconds = max(min(seconds, self._deadline.left()), 0.01)
        begun = time.monotonic()
        try:
            space.reach(done := 0)
            for part in giver.read(file.name, start, [space.view], seconds=seconds):
                space.reach(done := done + len(part))
                if not chunks.add(part):
                    giver.dropped = f"wrong digest of {file.name} at byte {chunks.at}"
                    return False
        except (Answered, OSError, EndpointError) as fault:
            lacks = isinstance(fault, Answered)
            at_once = lacks and time.monotonic() - begun < TURN / 2
            giver.failures += 1 if at_once else _MISSES // 2
            giver.complete = False
            if giver.failures >= _MISSES:
                giver.dropped = giver.dropped or str(fault) or type(fault).__name__
            if lacks:
                raise
            return False
        giver.bytes += stop - start
        giver.failures = 0
        return True


def _first(wanted: Flags) -> int | None:
    return int(np.argmax(wanted)) if wanted.any() else None


def can_be_seeded(source: Source) -> TypeGuard[EndpointSource]:
    """Whether pullers of a source can pass its steps on. Seeds of https endpoints need their own
    certificate."""
    if not isinstance(source, EndpointSource) or not source.kind.whole:
        return False
    return source.access.tls or not any(host.tls for host in source.hosts)


class SeedingSource:
    """Opens a step by fetching it into memory of its own, which it serves until `close`.

    A step that is in memory of this host is opened as it is. See `Source`.
    """

    def __init__(self, source: EndpointSource, progress: ProgressCallback | None = None) -> None:
        if not can_be_seeded(source):
            raise UsageError(
                "reshare=True from https needs Access(certfile=): others verify this seed by it"
            )
        self._source, self._progress = source, progress
        self.name, self.cost = source.name, source.cost
        self.steps, self.wait, self.end = source.steps, source.wait, source.end
        self.swarm: Swarm | None = None

    def open(self, step: int, deadline: Deadline) -> Opened:
        remote = self._source.open(step, deadline)
        if remote.mapped:
            return remote
        self.close()
        progress = Bar(self._progress, remote.record.volume_bytes).add
        self.swarm = swarm = Swarm(self._source, remote, deadline, progress)
        swarm.run(step)
        return SeededStep(swarm.seed, remote)

    def close(self) -> None:
        """Serve no more."""
        if self.swarm is not None:
            self.swarm.stop()
            self.swarm.seed.close()


class SeededStep(StepFiles):
    """A step that a seed has whole. New tensors keep its memory; the first write to one copies the
    page. See `Opened`."""

    costly_reads = False
    trusted = True
    lends = True

    def __init__(self, seed: Seed, remote: RemoteStep) -> None:
        self.record: Record = remote.record
        self.url, self.digest = remote.url, remote.digest
        self._seed, self._remote = seed, remote

    @property
    def files(self) -> SeededStep:
        return self

    def reader(self, name: str, *, once: bool = True) -> MappedReader:
        return self._seed.reader(name)

    def lend(self, name: str, start: int, nbytes: int) -> memoryview:
        return self._seed.lend(name, start, nbytes)

    def close(self) -> None:
        self._remote.close()
