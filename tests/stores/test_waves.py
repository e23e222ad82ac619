"""Reads of the same bytes of a file come in waves; those that only touch share one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from torchrelay.stores.reading.box_reads import DirectReads, _waves_of


def direct(stretches: list[tuple[int, int, int]]) -> DirectReads:
    """Reads of a file, from a byte on, of so many bytes."""
    files, starts, nbytes = np.array(stretches, np.int64).T
    return DirectReads(files, starts, 1000 * np.arange(len(files)), nbytes)


@pytest.mark.parametrize("seed", range(40))
def test_no_wave_has_a_byte_twice_and_there_are_as_few_as_can_be(seed: int) -> None:
    chance = random.Random(seed)
    sizes = (1, 2, 8, 30)
    found = [
        (chance.randrange(3), chance.randrange(60), chance.choice(sizes))
        for _ in range(chance.randrange(1, 40))
    ]
    waves = _waves_of(direct(found))
    seen = []
    for wave in waves:
        for file, runs in wave.runs.items():
            assert (runs.stops[:-1] <= runs.starts[1:]).all() and wave.ends[file] == runs.stops[-1]
            columns = (runs.starts, runs.stops - runs.starts, runs.addresses)
            seen += [(file, *row) for row in zip(*(c.tolist() for c in columns), strict=True)]
    assert sorted(seen) == sorted((*one, 1000 * n) for n, one in enumerate(found))
    deepest = max(
        sum(f == file and start <= at < start + nbytes for f, start, nbytes in found)
        for file in range(3)
        for at in range(100)
    )
    assert len(waves) == deepest


def test_a_chain_of_reads_takes_two_waves() -> None:
    """A record may say so, though no save writes it; a wave for each would hash its chunk again."""
    waves = _waves_of(direct([(0, 8 * n, 16) for n in range(5000)]))
    assert len(waves) == 2
