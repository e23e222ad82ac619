"""A step fetched together with others who fetch it too: what nobody else has comes from the
endpoint, the rest from those who have it.

The endpoint names who else is at it. Each of them tells which chunks it has. Everybody who is known
has a share of the pieces, which is theirs to ask the endpoint for, so that it sends about one copy,
however many there are. What is rare is taken first.
"""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import msgspec
import numpy as np

from torchrelay.deadlines import Deadline
from torchrelay.errors import EndpointError, TransferTimeoutError
from torchrelay.memory.crew import Crew, share_out
from torchrelay.sources.connection import Answered, Host
from torchrelay.sources.remote_step import ArrivingChunks, RemoteStep
from torchrelay.stores.records import DataFile

PIECE_BYTES = 2 << 20
LOOK_SECONDS = 0.2  # between two looks at who has what, where too little is known to be had
LISTEN_SECONDS = 1.0  # between two looks in any case, and two questions who there is
GRACE_SECONDS = 0.5  # without a piece, after which the endpoint is asked for the share of others
WORKERS = 6
FAILURES = 2  # in a row, after which a neighbour is left alone
MAX_SEEDS = 64
_LOOKS_AT_ONCE = 8

_list = msgspec.json.Decoder(list[str])
Flags = np.ndarray[Any, np.dtype[np.bool_]]


class Piece(NamedTuple):
    """Chunks [first, last) of a volume; `mark`: the number of the first among all chunks."""

    file: DataFile
    first: int
    last: int
    mark: int

    @property
    def span(self) -> tuple[int, int]:
        size = self.file.chunk_bytes
        return self.first * size, min(self.last * size, self.file.nbytes)


class Room(Protocol):
    """Where a step is put together: memory by volume, and a mark for each chunk that is here."""

    def view(self, name: str, start: int, stop: int) -> memoryview: ...
    def mark(self, first: int, count: int) -> None: ...


def pieces_of(files: Sequence[DataFile]) -> list[Piece]:
    found, mark = [], 0
    for file in files:
        chunks = -(-file.nbytes // file.chunk_bytes)
        several = max(1, PIECE_BYTES // file.chunk_bytes)
        for first in range(0, chunks, several):
            last = min(first + several, chunks)
            found.append(Piece(file, first, last, mark + first))
        mark += chunks
    return found


class Neighbour:
    """Another who fetches the same step. `has`: which pieces, as far as it told."""

    def __init__(self, host: Host, pieces: int) -> None:
        self.host = host
        self.has: Flags = np.zeros(pieces, bool)
        self.active = 0
        self.bytes = 0
        self.failures = 0  # in a row
        self.dropped = ""

    def failed(self, why: str) -> None:
        self.failures += 1
        if self.failures >= FAILURES:
            self.dropped = self.dropped or why


class Swarm:
    """One step on its way into a room. `run` returns when all of it is there and verified."""

    def __init__(
        self,
        origin: Host,
        remote: RemoteStep,
        snapshot: str,
        files: Sequence[DataFile],
        room: Room,
        *,
        own: str,
        connect: Callable[[str], Host],
        deadline: Deadline,
        progress: Callable[[int], None],
    ) -> None:
        self._origin, self._remote, self._snapshot = origin, remote, snapshot
        self._room, self._own, self._connect, self._deadline = room, own, connect, deadline
        self._progress = progress
        self._pieces = pieces_of(files)
        self._marks = [piece.mark for piece in self._pieces]
        self._chunks = sum(piece.last - piece.first for piece in self._pieces)
        self._open: Flags = np.ones(len(self._pieces), bool)  # neither here nor on their way
        self._left = len(self._pieces)
        self._asking = 0  # requests to the endpoint that are under way
        self._fed = time.monotonic()  # when a piece was last found to fetch
        self._lock = threading.Lock()
        self._neighbours: dict[str, Neighbour] = {}
        self._over = threading.Event()
        # Ties are broken otherwise by everybody: they are to have different pieces.
        draw = random.Random(own)
        self._tie = np.array([draw.random() for _ in self._pieces])

    def run(self) -> None:
        watching = threading.Thread(target=self._watch, name="torchrelay-swarm", daemon=True)
        self._ask_around()
        self._look()
        watching.start()
        try:
            share_out(range(WORKERS), lambda: self._work, WORKERS)
        finally:
            self._over.set()
            watching.join(5)
            for one in self._neighbours.values():
                one.host.close()
        if self._left:
            raise TransferTimeoutError("the step was given up", phase="data")

    def stop(self) -> None:
        """Fetch no more: `run` raises, unless it is done."""
        self._over.set()

    @property
    def supplied(self) -> dict[str, int]:
        return {url: one.bytes for url, one in self._neighbours.items() if one.bytes}

    @property
    def faulty(self) -> dict[str, str]:
        return {url: one.dropped for url, one in self._neighbours.items() if one.dropped}

    @property
    def _alive(self) -> list[Neighbour]:
        return [one for one in list(self._neighbours.values()) if not one.dropped]

    # Who has what.

    def _watch(self) -> None:
        begun = looked = asked = time.monotonic()
        while not self._over.wait(LOOK_SECONDS):
            now = time.monotonic()
            if now - asked > LISTEN_SECONDS or now - begun < 2 * LISTEN_SECONDS:
                self._ask_around()
                asked = now
            if now - looked > LISTEN_SECONDS or self._is_short():
                self._look()
                looked = now

    def _is_short(self) -> bool:
        """Whether little is known to be had from others."""
        with self._lock:
            known = np.zeros(len(self._pieces), bool)
            for one in self._alive:
                known |= one.has
            return int((known & self._open).sum()) < 2 * WORKERS

    def _ask_around(self) -> None:
        """Have the endpoint name this one to others, and others to this one."""
        try:
            word = msgspec.json.encode({"url": self._own, "snapshot": self._snapshot})
            answer = self._origin.post("/seeds", word, seconds=5.0)
            for url in _list.decode(answer.body)[:MAX_SEEDS] if answer.status == 200 else ():
                if url != self._own and url not in self._neighbours:
                    self._neighbours[url] = Neighbour(self._connect(url), len(self._pieces))
        except (OSError, http.client.HTTPException, EndpointError, msgspec.MsgspecError):
            pass  # those that are known will do

    def _look(self) -> None:
        Crew(_LOOKS_AT_ONCE).each(self._look_at, [n for n in self._alive if not n.has.all()])

    def _look_at(self, one: Neighbour) -> None:
        try:
            found = one.host.get(f"/marks?snapshot={self._snapshot}", seconds=2.0)
        except (OSError, http.client.HTTPException, EndpointError) as fault:
            one.failed(f"does not answer: {fault}")
            return
        if found.status == 200 and len(found.body) == self._chunks:
            told = np.frombuffer(found.body, np.uint8) != 0
            one.has = np.logical_and.reduceat(told, self._marks) if len(told) else one.has
            one.failures = 0

    # What is fetched from whom.

    def _work(self, number: int) -> None:
        while not self._over.is_set():
            if self._deadline.passed:
                raise TransferTimeoutError("no time is left to fetch the step", phase="data")
            index, giver = self._next()
            if index is None:
                if not self._left:
                    return
                self._over.wait(LOOK_SECONDS / 4)
                continue
            done = False
            try:
                done = self._fetch(self._pieces[index], giver)
            finally:
                with self._lock:
                    if giver is None:
                        self._asking -= 1
                    else:
                        giver.active -= 1
                    self._open[index] = not done
                    self._left -= done

    def _next(self) -> tuple[int | None, Neighbour | None]:
        """A piece to fetch, and from whom: None is the endpoint."""
        with self._lock:
            if not self._open.any():
                return None, None
            alive = self._alive
            holders = np.zeros(len(self._pieces), np.int64)
            for one in alive:
                holders += one.has
            index, giver = self._for_endpoint(alive, holders), None
            if index is None:
                index, giver = self._for_neighbours(alive, holders)
            if index is None:
                return None, None
            self._fed = time.monotonic()
            self._open[index] = False
            if giver is None:
                self._asking += 1
            else:
                giver.active += 1
            return index, giver

    def _for_endpoint(self, alive: list[Neighbour], holders: Any) -> int | None:
        """A piece that nobody has and that is this one's to ask for; of any share where nothing
        has come for a while, since whoever has that share may be slow or gone."""
        everybody = sorted([self._own, *(one.host.url for one in alive)])
        if self._asking >= max(1, WORKERS // len(everybody)):
            return None
        wanted = self._open & (holders == 0)
        place = everybody.index(self._own)
        mine = wanted.copy()
        mine[np.arange(len(mine)) % len(everybody) != place] = False
        if mine.any():
            return int(np.flatnonzero(mine)[0])
        late = time.monotonic() - self._fed > GRACE_SECONDS
        return self._rarest(wanted, holders) if late and wanted.any() else None

    def _for_neighbours(
        self, alive: list[Neighbour], holders: Any
    ) -> tuple[int | None, Neighbour | None]:
        for one in sorted(alive, key=lambda n: (n.active, n.failures, n.bytes)):
            wanted = self._open & one.has
            if wanted.any():
                return self._rarest(wanted, holders), one
        return None, None

    def _rarest(self, wanted: Flags, holders: Any) -> int:
        among = np.flatnonzero(wanted)
        return int(among[np.argmin(holders[among] + self._tie[among])])

    def _fetch(self, piece: Piece, giver: Neighbour | None) -> bool:
        """Whether a piece is here; it is told to others then."""
        start, stop = piece.span
        view = self._room.view(piece.file.name, start, stop)
        if giver is None:
            self._remote.reader(piece.file.name).read_into(start, [view])
        elif not self._from_neighbour(piece, giver, view):
            return False
        self._room.mark(piece.mark, piece.last - piece.first)
        self._progress(stop - start)
        return True

    def _from_neighbour(self, piece: Piece, giver: Neighbour, view: memoryview) -> bool:
        start, stop = piece.span
        chunks = ArrivingChunks(piece.file, start, [view])
        path = f"/volumes/{self._snapshot}/{quote(piece.file.name)}"
        try:
            seconds = max(self._deadline.left(), 0.01)
            for nbytes in giver.host.read(path, start, [view], seconds=seconds):
                if not chunks.add(nbytes):
                    giver.dropped = f"wrong digest of {piece.file.name} at byte {chunks.at}"
                    return False
        except (OSError, http.client.HTTPException, EndpointError, Answered) as fault:
            giver.failed(str(fault) or type(fault).__name__)
            return False
        giver.bytes += stop - start
        giver.failures = 0
        return True
