"""How long it would take to get a step from each of several sources: a little of it is read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

from torchrelay.deadlines import Deadline
from torchrelay.errors import RelayError
from torchrelay.memory.bounded import bounded
from torchrelay.memory.crew import Crew
from torchrelay.sources.seam import Source

PROBE_BYTES = 1 << 20
COLD_RATE = 300e6  # bytes a second that a medium is taken to give where the cache has little


def estimates(sources: Sequence[Source], step: int, seconds: float) -> list[float | None]:
    """Seconds that each source would take for all of a step; None where that cannot be told."""

    def look(source: Source) -> float | None:
        try:
            return bounded(lambda: _estimate(source, step, Deadline(seconds)), seconds, "probe")
        except (RelayError, OSError, EOFError):
            return None

    return Crew(max(1, len(sources))).each(look, sources)


def _estimate(source: Source, step: int, deadline: Deadline) -> float:
    begun = time.monotonic()
    with closing(source.open(step, deadline)) as held:
        opened = time.monotonic() - begun
        record = held.record
        if not record.nbytes:
            return opened
        file = max(record.files, key=lambda one: one.nbytes)
        some = min(PROBE_BYTES // file.chunk_bytes * file.chunk_bytes or PROBE_BYTES, file.nbytes)
        begun = time.monotonic()
        with closing(held.files.reader(file.name)) as reader:
            reader.read_into(0, [memoryview(bytearray(some))])
            rate = some / max(time.monotonic() - begun, 1e-6)
            if reader.cold:
                rate = min(rate, COLD_RATE)
        return opened + record.nbytes / rate
