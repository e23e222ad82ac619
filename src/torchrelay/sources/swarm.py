"""A step fetched together with others who fetch it too: what nobody else has comes from the
endpoint, the rest from those who have it.

The endpoint names who else is at it. Each of them tells which chunks it has. Everybody begins at
pieces of their own choice, so that the endpoint sends about one copy, however many there are.
"""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol
from urllib.parse import quote

import msgspec

from torchrelay.deadlines import Deadline
from torchrelay.errors import EndpointError, TransferTimeoutError
from torchrelay.memory.crew import share_out
from torchrelay.sources.connection import Answered, Host
from torchrelay.sources.remote_step import ArrivingChunks, RemoteStep
from torchrelay.stores.records import DataFile

PIECE_BYTES = 1 << 20
LOOK_SECONDS = 0.1  # between two looks at who has what
ASKERS = 2  # threads that turn to the endpoint first
WORKERS = 6
MAX_SEEDS = 64

_list = msgspec.json.Decoder(list[str])


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
    """Another who fetches the same step, and which chunks it has, as far as it told."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.marks = b""
        self.active = 0
        self.bytes = 0
        self.dropped = ""

    def has(self, piece: Piece) -> bool:
        told = self.marks[piece.mark : piece.mark + piece.last - piece.first]
        return len(told) == piece.last - piece.first and all(told)


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
    ) -> None:
        self._origin, self._remote, self._snapshot = origin, remote, snapshot
        self._room, self._own, self._connect, self._deadline = room, own, connect, deadline
        self._left = {piece.mark: piece for piece in pieces_of(files)}
        self._taken: set[int] = set()
        self._lock = threading.Lock()
        self._neighbours: dict[str, Neighbour] = {}
        self._over = threading.Event()
        self._random = random.Random(own)

    def run(self) -> None:
        watching = threading.Thread(target=self._watch, name="torchrelay-swarm", daemon=True)
        self._look()
        watching.start()
        try:
            share_out(range(WORKERS), lambda: self._work, WORKERS)
        finally:
            self._over.set()
            watching.join(5)
            for one in self._neighbours.values():
                one.host.close()

    @property
    def supplied(self) -> dict[str, int]:
        return {url: one.bytes for url, one in self._neighbours.items() if one.bytes}

    @property
    def faulty(self) -> dict[str, str]:
        return {url: one.dropped for url, one in self._neighbours.items() if one.dropped}

    # Who has what.

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        try:
            word = msgspec.json.encode({"url": self._own, "snapshot": self._snapshot})
            answer = self._origin.post("/seeds", word, seconds=5.0)
            for url in _list.decode(answer.body)[:MAX_SEEDS] if answer.status == 200 else ():
                if url != self._own and url not in self._neighbours:
                    self._neighbours[url] = Neighbour(self._connect(url))
        except (OSError, http.client.HTTPException, EndpointError, msgspec.MsgspecError):
            pass  # those that are known will do
        for one in list(self._neighbours.values()):
            if one.dropped:
                continue
            try:
                found = one.host.get(f"/marks?snapshot={self._snapshot}", seconds=2.0)
                one.marks = found.body if found.status == 200 else b""
            except (OSError, http.client.HTTPException, EndpointError) as fault:
                one.dropped = f"does not answer: {fault}"

    # What is fetched from whom.

    def _work(self, number: int) -> None:
        while not self._over.is_set():
            if self._deadline.passed:
                raise TransferTimeoutError("no time is left to fetch the step", phase="data")
            piece, giver = self._next(asks=number < ASKERS)
            if piece is None:
                if not self._left:
                    return
                time.sleep(LOOK_SECONDS / 4)
                continue
            try:
                if giver is None:
                    self._from_origin(piece)
                    done = True
                else:
                    done = self._from_neighbour(piece, giver)
            finally:
                with self._lock:
                    self._taken.discard(piece.mark)
            if done:
                self._room.mark(piece.mark, piece.last - piece.first)
                with self._lock:
                    self._left.pop(piece.mark, None)

    def _next(self, *, asks: bool) -> tuple[Piece | None, Neighbour | None]:
        """A piece that a neighbour has, or, for those who ask the endpoint, one that nobody has."""
        with self._lock:
            open_ones = [p for mark, p in self._left.items() if mark not in self._taken]
            if not open_ones:
                return None, None
            alive = [one for one in self._neighbours.values() if not one.dropped]
            self._random.shuffle(open_ones)
            if asks:
                rare = next((p for p in open_ones if not any(n.has(p) for n in alive)), None)
                if rare is not None:
                    self._taken.add(rare.mark)
                    return rare, None
            for one in sorted(alive, key=lambda n: n.active):
                piece = next((p for p in open_ones if one.has(p)), None)
                if piece is not None:
                    self._taken.add(piece.mark)
                    one.active += 1
                    return piece, one
            return None, None

    def _from_origin(self, piece: Piece) -> None:
        start, stop = piece.span
        view = self._room.view(piece.file.name, start, stop)
        self._remote.reader(piece.file.name).read_into(start, [view])

    def _from_neighbour(self, piece: Piece, giver: Neighbour) -> bool:
        start, stop = piece.span
        view = self._room.view(piece.file.name, start, stop)
        chunks = ArrivingChunks(piece.file, start, [view])
        path = f"/volumes/{self._snapshot}/{quote(piece.file.name)}"
        try:
            seconds = max(self._deadline.left(), 0.01)
            for nbytes in giver.host.read(path, start, [view], seconds=seconds):
                if not chunks.add(nbytes):
                    giver.dropped = f"wrong digest of {piece.file.name} at byte {chunks.at}"
                    return False
            giver.bytes += stop - start
        except (OSError, http.client.HTTPException, EndpointError, Answered) as fault:
            giver.dropped = giver.dropped or str(fault) or type(fault).__name__
            return False
        finally:
            with self._lock:
                giver.active -= 1
        return True
