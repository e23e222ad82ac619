"""A process ends by itself, in time and without a crash, whatever became of the other ranks.

Threads of this process may still wait in the backend for a rank that says nothing. One that returns
from there while the interpreter is taken down aborts the process.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import torchrelay as tr
from tests.support.faults import CHUNK, attempt
from tests.support.ranks import Exited, Ranks, reached
from tests.support.ways import taking

SECONDS = 60.0  # to end in, on a busy machine, where all of torch is taken down


class Last:
    """Tells that the interpreter is being taken down, and keeps it there for a while."""

    def __init__(self, place: str) -> None:
        self._tell = os.open, place.encode(), os.O_CREAT | os.O_WRONLY, time.sleep

    def __del__(self) -> None:
        opens, place, flags, sleep = self._tell
        opens(place, flags)
        sleep(0.5)


def leaves_a_wait_behind(rank: int, group: Any, waits_for: int, place: str) -> None:
    """Rank 0 gives up on a receive, and ends as an interpreter does."""
    with taking("tcp"):
        relay = tr.Relay(group, chunk_bytes=CHUNK)
        if rank == 0:
            out = attempt(lambda: relay.recv(waits_for, timeout=0.2))
            assert out.error == "TransferTimeoutError", out
            reached("waits", hold=True)
            sys.last_to_go = Last(place)  # type: ignore[attr-defined]
            ctypes.pythonapi.Py_Exit(ctypes.c_int(0))
        reached("there", hold=True)


@pytest.mark.parametrize(("dead", "waits_for"), [(1, 2), (2, 1), (None, 1)])
def test_a_rank_ends_though_others_end_before_and_beside_it(
    dead: int | None, waits_for: int, tmp_path: Path
) -> None:
    place = tmp_path / "ending"
    with Ranks(leaves_a_wait_behind, 3, waits_for, str(place), expect_exit={0: 0}) as ranks:
        ranks.wait_reached(0, "waits", 60)
        if dead is not None:
            ranks.kill(dead)
        ranks.release(0)
        limit = time.monotonic() + SECONDS
        while not place.exists():
            assert time.monotonic() < limit, "the interpreter is not taken down"
            time.sleep(0.005)
        ranks.kill(waits_for)
        assert ranks.results(SECONDS, ranks=[0]) == [Exited(0)]
