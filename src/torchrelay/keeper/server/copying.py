"""Copies of other hosts' parts of a step, fetched from their keepers in the background. No torch.

Keepers stand in a ring, and each copies from the ones before it. All copy the same step at a time,
which the ranks choose when no keeper is at one (`CopiesTold`). Chunks that are the same in the copy
before are taken from there. Nothing counts before all of it has its digests.
"""

from __future__ import annotations

import mmap
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from torchrelay.deadlines import Deadline
from torchrelay.endpoint.server.messages import Volume
from torchrelay.endpoint.server.snapshots import ServedStep, Slot
from torchrelay.errors import RelayError
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.memory.pages import PAGE, paged
from torchrelay.sources.connection import Host
from torchrelay.sources.remote_step import RemoteReader
from torchrelay.sources.suppliers import Supplier, Suppliers

PIECE_BYTES = 1 << 20  # fetched at once, between looks at the rate
LEAST_SECONDS = 60.0  # that a copy may take, and
SLACK = 8  # times as long as it would take at its rate
TELL_SECONDS = 1.0  # to say that it is over


class KeeperRing(NamedTuple):
    """The keepers of a job in their order, and which of them this one is."""

    urls: list[str]
    own: str

    def sources(self, copies: int) -> list[str]:
        """Those that this one copies from: the ones before it."""
        if self.own not in self.urls:
            return []
        at, count = self.urls.index(self.own), len(self.urls)
        return [self.urls[(at - back) % count] for back in range(1, min(copies, count - 1) + 1)]


@dataclass
class WantedCopies:
    """What is to be copied of a step: volumes, each with who has it and where it goes."""

    step: ServedStep
    volumes: list[Volume] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    nbytes: int = PAGE

    @classmethod
    def of(cls, step: ServedStep, sources: Sequence[str]) -> WantedCopies:
        found = cls(step)
        end = 0
        for volume, place in zip(step.order, step.places, strict=True):
            url = step.ranks[place]
            if url in sources:
                found.volumes.append(
                    Volume(volume.name, end, volume.nbytes, volume.chunk_bytes, volume.digests)
                )
                found.urls.append(url)
                end += paged(volume.nbytes)
        found.nbytes = max(PAGE, end)
        return found


class Copying:
    """One copy on its way, on a thread of its own. `why` says what went wrong."""

    def __init__(
        self,
        wanted: WantedCopies,
        number: int,
        slot: Slot,
        older: ServedStep | None,
        *,
        ring: KeeperRing,
        token: str,
        trusted: ssl.SSLContext | None = None,
        rate: float,
        done: Callable[[Copying], None],
    ) -> None:
        self.wanted, self.number, self.ring, self.why = wanted, number, ring, ""
        self.fetched = 0  # bytes that came from others
        self.older = older
        self._token, self._trusted, self._rate = token, trusted, rate
        self._done = done
        self._stopped = threading.Event()
        self._map = mmap.mmap(slot.file.fileno(), slot.nbytes)
        self._view = memoryview(self._map)
        threading.Thread(target=self._run, name="torchrelay-copy", daemon=True).start()

    def stop(self) -> None:
        """Give it up; `done` is called all the same."""
        self._stopped.set()

    def _run(self) -> None:
        hosts: dict[str, Supplier] = {}
        seconds = max(LEAST_SECONDS, SLACK * self.wanted.nbytes / self._rate)
        deadline = Deadline(seconds)
        try:
            for url in dict.fromkeys(self.wanted.urls):
                reader = os.urandom(16).hex()
                host = Host(url, token=self._token, context=self._trusted, reader=reader)
                hosts[url] = Supplier(host)
            begun = time.monotonic()
            for volume, url in zip(self.wanted.volumes, self.wanted.urls, strict=True):
                self._copy(volume, hosts[url], deadline, begun)
        except (RelayError, OSError, ValueError) as fault:
            self.why = getattr(fault, "message", "") or str(fault) or type(fault).__name__
        except BaseException as fault:  # whatever it is, the keeper must hear that this is over
            self.why = f"{type(fault).__name__}: {fault}"
            raise
        finally:
            for supplier in hosts.values():
                supplier.host.tell_end(self.why, seconds=TELL_SECONDS)
                supplier.close()
            # What failed may have left views of the memory behind: it is unmapped with the last.
            del self._view, self._map
            self._done(self)

    def _copy(self, volume: Volume, supplier: Supplier, deadline: Deadline, begun: float) -> None:
        suppliers = Suppliers({volume.name: [supplier]}, deadline, f"step {self.wanted.step.step}")
        suppliers.stopped = self._stopped
        reader = RemoteReader(volume, self.wanted.step.id, suppliers, deadline)
        for start, stop in self._missing(volume):
            for at in range(start, stop, max(PIECE_BYTES, volume.chunk_bytes)):
                end = min(at + max(PIECE_BYTES, volume.chunk_bytes), stop)
                if self._stopped.wait(self._pause(begun)):
                    raise ValueError("it was given up")
                reader.read_into(at, [self._view[volume.start + at : volume.start + end]])
                self.fetched += end - at

    def _pause(self, begun: float) -> float:
        """Seconds until the next bytes may be asked for."""
        return max(0.0, begun + self.fetched / self._rate - time.monotonic())

    def _missing(self, volume: Volume) -> Iterator[tuple[int, int]]:
        """Ranges of whole chunks that have to be fetched; the others are filled from the copy
        before."""
        size = volume.chunk_bytes
        start: int | None = None
        for at in range(0, volume.nbytes, size):
            if self._unchanged(volume, at, min(at + size, volume.nbytes)):
                if start is not None:
                    yield start, at
                start = None
            elif start is None:
                start = at
        if start is not None:
            yield start, volume.nbytes

    def _unchanged(self, volume: Volume, start: int, stop: int) -> bool:
        """Whether a chunk is as it was in the copy before; then it is in its place."""
        place = None if self.older is None else self.older.place(volume.name)
        if place is None:
            return False
        slot, before = place
        digest = start // volume.chunk_bytes * DIGEST_BYTES
        wanted = volume.digests[digest : digest + DIGEST_BYTES]
        if (
            before.nbytes != volume.nbytes
            or before.chunk_bytes != volume.chunk_bytes
            or before.digests[digest : digest + DIGEST_BYTES] != wanted
        ):
            return False
        here = self._view[volume.start + start : volume.start + stop]
        here[:] = slot.view[before.start + start : before.start + stop]
        return bool(xxhash.xxh3_128_digest(here) == wanted)
