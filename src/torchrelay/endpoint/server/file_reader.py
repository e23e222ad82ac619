"""A whole file of a step, read from this rank's memory and from other ranks' servers.

Readers of a file compare no digests, so they get copies: memory may be written to again while it is
on its way.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchrelay.endpoint.server.rank_reader import RankReader
from torchrelay.endpoint.server.snapshots import ServedSnapshot
from torchrelay.endpoint.server.whole_file import Band, Run, WholeFile
from torchrelay.sources.access import Access

COPY_BYTES = 1 << 20
REMOTE_BYTES = 4 << 20


class FileReader:
    """Pieces of a file, in order."""

    def __init__(self, snapshot: ServedSnapshot, access: Access) -> None:
        self._snapshot = snapshot
        self._ranks = RankReader(snapshot, access)

    def pieces(self, file: WholeFile, start: int, stop: int) -> Iterator[bytes]:
        try:
            for part in file.within(start, stop):
                if isinstance(part, bytes):
                    yield part
                elif isinstance(part, Run):
                    yield from self._run(part)
                else:
                    band, low, high = part
                    yield (self._band(band))[low:high]
        finally:
            self._ranks.close()

    def _run(self, run: Run) -> Iterator[bytes]:
        here = self._snapshot.place(self._snapshot.order[run.volume].name)
        size = COPY_BYTES if here else REMOTE_BYTES
        for at in range(run.start, run.stop, size):
            yield self._read(Run(run.volume, at, min(at + size, run.stop)))

    def _band(self, band: Band) -> bytes:
        parts = [(box, self._read(run)) for run, box in band.runs()]
        return band.put_together(parts)

    def _read(self, run: Run) -> bytes:
        volume = self._snapshot.order[run.volume]
        if span := self._snapshot.span(volume.name, run.start, run.stop):
            return span.copy()
        data = bytearray(run.stop - run.start)
        view = memoryview(data)
        self._ranks.read_part(run.volume, run.start, view)
        return bytes(data)
