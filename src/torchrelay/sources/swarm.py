"""A step fetched together with others who fetch it too: what nobody else has comes from the
endpoint, the rest from those who have it.

The endpoint names who else is at it. Everybody who is known has a share of the pieces, which is
theirs to ask the endpoint for, so that it sends about one copy, however many there are. The others
ask them for it in the same order, and wait there for what is still arriving: nobody has to ask
again and again who has what. Where somebody is behind, each tells which chunks it has, and what is
rare is taken first.
"""

from __future__ import annotations

import functools
import http.client
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import msgspec
import numpy as np

from torchrelay.deadlines import Deadline
from torchrelay.errors import EndpointError, TransferTimeoutError
from torchrelay.memory import threads
from torchrelay.memory.crew import Crew, share_out
from torchrelay.record.checkpoint.schema import DataFile
from torchrelay.sources.connection import Answered, Host
from torchrelay.sources.remote_step import ArrivingChunks, RemoteStep

PIECE_BYTES = 2 << 20
ASK_SECONDS = 0.2  # between two questions who there is, in the first seconds, and
LATER_SECONDS = 1.0  # afterwards
FIRST_SECONDS = 2.0
GREET_SECONDS = 0.2  # for those who are new to answer, before anything is fetched
WAIT_SECONDS = 1.5  # that another is asked to wait for a piece which is on its way to it
REST_SECONDS = 0.1  # that one is left alone who does not have what it was to have
GRACE_SECONDS = 1.0  # without a piece, after which the endpoint is asked for the share of others
WORKERS = 9
LINES = 9  # shared by the endpoint and all others who are there
FAILURES = 2  # in a row, after which a neighbour is left alone
MAX_SEEDS = 64
_LOOKS_AT_ONCE = 8

_FAULTS = (OSError, http.client.HTTPException, EndpointError, msgspec.MsgspecError)
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


class Arrivals(Protocol):
    """What brings a step, as those see it who serve what is here."""

    def awaits(self, mark: int) -> bool:
        """Whether a chunk is on its way here, or will be soon."""

    def meet(self, url: str) -> list[str]:
        """Another one asks here, and so is there; who else is known."""


class Room(Protocol):
    """Where a step is put together: memory by volume, and a mark for each chunk that is here."""

    def space(self, name: str, start: int, stop: int) -> memoryview: ...
    def mark(self, first: int, count: int) -> None: ...
    def follow(self, swarm: Arrivals) -> None:
        """Tell it of others who ask here, and ask it what is to come."""


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
        self.answered = False  # whether it is known to be there
        self.late = 0  # pieces in a row that it was to have and did not
        self.rests_until = 0.0

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
        self._fed = time.monotonic()  # when a piece last came
        self._changed = threading.Condition()
        self._neighbours: dict[str, Neighbour] = {}
        self._over = threading.Event()
        # Ties are broken otherwise by everybody: they are to have different pieces.
        draw = random.Random(own)
        self._tie = np.array([draw.random() for _ in self._pieces])
        self._numbers = np.arange(len(self._pieces))
        room.follow(self)

    def run(self) -> None:
        watching = threading.Thread(target=self._watch, name="torchrelay-swarm", daemon=True)
        self._ask_around()
        watching.start()
        try:
            share_out(range(WORKERS), lambda: self._work, WORKERS)
        finally:
            self.stop()
            watching.join(5)
            for one in self._neighbours.values():
                one.host.close()
        if self._left:
            raise TransferTimeoutError("the step was given up", phase="data")

    def stop(self) -> None:
        """Fetch no more: `run` raises, unless it is done."""
        self._over.set()
        with self._changed:
            self._changed.notify_all()

    def awaits(self, mark: int) -> bool:
        """Whether a chunk is on its way here, or will be soon."""
        with self._changed:
            index = int(np.searchsorted(self._marks, mark, side="right")) - 1
            if self._over.is_set() or index < 0:
                return False
            return not self._open[index] or bool(self._mine()[index])

    @property
    def supplied(self) -> dict[str, int]:
        return {url: one.bytes for url, one in self._neighbours.items() if one.bytes}

    @property
    def faulty(self) -> dict[str, str]:
        return {url: one.dropped for url, one in self._neighbours.items() if one.dropped}

    @property
    def _alive(self) -> list[Neighbour]:
        every = list(self._neighbours.values())
        return [one for one in every if one.answered and not one.dropped]

    # Who there is, and has what.

    def meet(self, url: str) -> list[str]:
        """Another one asks here, and so is there; who else is known."""
        with self._changed:
            known = [one.host.url for one in self._alive]
            one = self._learn(url)
            if one is not None:
                one.answered = True
                self._changed.notify_all()
        return [other for other in known if other != url]

    def _learn(self, url: str) -> Neighbour | None:
        """Whoever is at a URL, if it is another, and there may be more."""
        with self._changed:
            if url not in self._neighbours:
                if url == self._own or len(self._neighbours) >= MAX_SEEDS or self._over.is_set():
                    return None
                self._neighbours[url] = Neighbour(self._connect(url), len(self._pieces))
            return self._neighbours[url]

    def _watch(self) -> None:
        begun = asked = time.monotonic()
        while not self._over.wait(ASK_SECONDS):
            now = time.monotonic()
            if now - asked > LATER_SECONDS or now - begun < FIRST_SECONDS:
                self._ask_around()
                asked = now
            if now - self._fed > GRACE_SECONDS / 2:
                self._look(self._alive)

    def _ask_around(self) -> None:
        """Have the endpoint name this one to others, and others to this one. Those who are new tell
        at once what they have; one who does not is left to the next time."""
        known = set(self._neighbours)
        with suppress(*_FAULTS):
            for url in self._name_to(self._origin):
                self._learn(url)
        new = [one for url, one in list(self._neighbours.items()) if url not in known]
        greeted = [threads.run(functools.partial(self._greet, one), "swarm") for one in new]
        end = time.monotonic() + GREET_SECONDS
        for greeting in greeted:
            greeting.wait(max(0.0, end - time.monotonic()))

    def _greet(self, one: Neighbour) -> None:
        try:
            self._name_to(one.host)
        except _FAULTS as fault:
            one.dropped = one.dropped or f"does not answer: {fault}"
            return
        self._look_at(one)
        with self._changed:
            one.answered = True
            self._changed.notify_all()

    def _name_to(self, host: Host) -> list[str]:
        """Tell somebody of this one; the others that they know."""
        word = msgspec.json.encode({"url": self._own, "snapshot": self._snapshot})
        answer = host.post("/seeds", word, seconds=5.0)
        return _list.decode(answer.body)[:MAX_SEEDS] if answer.status == 200 else []

    def _look(self, some: list[Neighbour]) -> None:
        Crew(_LOOKS_AT_ONCE).each(self._look_at, [n for n in some if not n.has.all()])
        with self._changed:
            self._changed.notify_all()

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
            with self._changed:
                index, giver = self._next()
                if index is None:
                    if not self._left:
                        return
                    self._changed.wait(REST_SECONDS)
                    continue
            done = False
            try:
                done = self._fetch(self._pieces[index], giver)
            finally:
                with self._changed:
                    if giver is None:
                        self._asking -= 1
                    else:
                        giver.active -= 1
                    self._open[index] = not done
                    self._left -= done
                    self._fed = time.monotonic() if done else self._fed
                    self._changed.notify_all()

    def _next(self) -> tuple[int | None, Neighbour | None]:
        """A piece to fetch, and from whom: None is the endpoint."""
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
        self._open[index] = False
        if giver is None:
            self._asking += 1
        else:
            giver.active += 1
        return index, giver

    def _everybody(self, alive: list[Neighbour]) -> list[str]:
        """Those who have a share: not one that was late again and again."""
        others = (one.host.url for one in alive if one.late < FAILURES)
        return sorted([self._own, *others])

    def _share(self, url: str, everybody: list[str]) -> Flags:
        """The pieces that one is to ask the endpoint for."""
        if url not in everybody:
            return np.zeros(len(self._pieces), bool)
        mine: Flags = self._numbers % len(everybody) == everybody.index(url)
        return mine

    def _mine(self) -> Flags:
        return self._share(self._own, self._everybody(self._alive))

    def _for_endpoint(self, alive: list[Neighbour], holders: Any) -> int | None:
        """A piece that nobody has and that is this one's to ask for; of any share where nothing
        has come for a while, since whoever has that share may be slow or gone."""
        everybody = self._everybody(alive)
        if self._asking >= max(1, LINES // len(everybody)):
            return None
        wanted = self._open & (holders == 0)
        mine = wanted & self._share(self._own, everybody)
        if mine.any():
            return int(np.flatnonzero(mine)[0])
        late = time.monotonic() - self._fed > GRACE_SECONDS
        return self._rarest(wanted, holders) if late and wanted.any() else None

    def _for_neighbours(
        self, alive: list[Neighbour], holders: Any
    ) -> tuple[int | None, Neighbour | None]:
        """Something that another has, or else the next piece of its share, which will be there."""
        everybody, now = self._everybody(alive), time.monotonic()
        most = max(1, LINES // len(everybody))
        for one in sorted(alive, key=lambda n: (n.active, n.failures, n.bytes)):
            if one.active >= most or one.rests_until > now:
                continue
            wanted = self._open & one.has
            if wanted.any():
                return self._rarest(wanted, holders), one
            coming = self._open & self._share(one.host.url, everybody)
            if coming.any():
                return int(np.flatnonzero(coming)[0]), one
        return None, None

    def _rarest(self, wanted: Flags, holders: Any) -> int:
        among = np.flatnonzero(wanted)
        return int(among[np.argmin(holders[among] + self._tie[among])])

    def _fetch(self, piece: Piece, giver: Neighbour | None) -> bool:
        """Whether a piece is here; it is told to others then."""
        start, stop = piece.span
        view = self._room.space(piece.file.name, start, stop)
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
        path = f"/volumes/{self._snapshot}/{quote(piece.file.name)}?wait={WAIT_SECONDS}"
        begun = time.monotonic()
        try:
            seconds = max(self._deadline.left(), 0.01)
            for nbytes in giver.host.read(path, start, [view], seconds=seconds):
                if not chunks.add(nbytes):
                    giver.dropped = f"wrong digest of {piece.file.name} at byte {chunks.at}"
                    return False
        except Answered as answer:
            if answer.reply.status != 404:
                giver.failed(str(answer))
            now = time.monotonic()
            giver.late += now - begun > WAIT_SECONDS / 2  # else it knows of others than this one
            giver.rests_until = now + REST_SECONDS
            return False
        except (OSError, http.client.HTTPException, EndpointError) as fault:
            giver.failed(str(fault) or type(fault).__name__)
            return False
        giver.bytes += stop - start
        giver.failures = giver.late = 0
        return True
