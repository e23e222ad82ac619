"""Random states through every API: equal to a plain oracle, or refused by path, and no crash.

A failure names its seed; `FUZZ_SEED` runs that one alone.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fuzz_cases import Tally, pairs, solos, together
from tests.support.ranks import RankFailed, RankPool, RanksTimedOut
from tests.support.rounds import rounds
from tests.support.s3 import S3

BATCH = 50
KINDS: dict[str, tuple[Callable[..., Tally], int, int]] = {  # with how many cases and ranks
    "between ranks": (pairs, 900, 2),
    "alone": (solos, 900, 2),
    "together": (together, 200, 4),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_or_refused_by_path(kind: str, tmp_path: Path, s3: S3) -> None:
    run, full, ranks = KINDS[kind]
    count = rounds(full, 30)
    first = int(os.environ.get("FUZZ_SEED", "0"))
    seeds = [first] if first else list(range(1, 1 + count))
    ended: Counter[tuple[str, str]] = Counter()
    failures: list[str] = []
    begun = time.monotonic()
    with RankPool(ranks, forks=True) as pool:
        for at in range(0, len(seeds), BATCH):
            some = seeds[at : at + BATCH]
            try:
                for tally in pool.run(run, some, str(tmp_path), s3.url(f"fuzz-{at}"), timeout=240):
                    ended += tally.ended
                    failures += tally.failures
            except (RankFailed, RanksTimedOut) as fault:
                failures.append(f"{_where(tmp_path)}: {fault}")
    shown = ", ".join(f"{api} {how}: {n}" for (api, how), n in sorted(ended.items()))
    print(f"{len(seeds)} cases in {time.monotonic() - begun:.1f} s: {shown}")
    assert not failures, f"{len(failures)} of {len(seeds)}:\n" + "\n".join(failures[:20])


def _where(at: Path) -> dict[str, Any]:
    return {path.name: path.read_text() for path in at.glob("rank-*")}
