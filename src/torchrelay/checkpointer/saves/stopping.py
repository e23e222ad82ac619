"""How ranks agree on the tick at which all of them stop, without waiting for each other.

Ranks call `tick` equally often, but not at the same time: one may be iterations ahead of another.
So none may stop at a tick that another has passed, or needs it to pass.

    asked     a rank that has a signal leaves a word in the group's store
    joined    every rank looks for that word at a tick, but not more often than each second. From
              the tick at which it finds it, it passes a tick only after it has told the store so:
              `passed` is the highest tick that any rank may have passed
    closed    when all ranks have joined, the last of them closes `passed`: it grows no more

The first tick above it is the one at which all ranks stop. No rank has passed it, and each gets
there without the others going any further.
"""

from __future__ import annotations

import time

from torchrelay.transports.group.assembly import Board

LOOK_SECONDS = 1.0
_CLOSED = b" closed"


class Stopping:
    """One rank's part; `world` of them share a board."""

    def __init__(self, board: Board, world: int) -> None:
        self._board = board
        self._world = world
        self._ticks = 0
        self._next_look = 0.0
        self._joined = False
        self._passed = b""  # as it was in the store when this rank last saw it

    def tick(self, asks: bool) -> bool:
        """Whether this tick is the one at which all ranks stop. `asks`: this rank wants to."""
        self._ticks += 1
        if self._joined:
            return not self._may_pass()
        now = time.monotonic()
        if asks:
            self._board.set("asked", b"1")
        elif now < self._next_look:
            return False
        else:
            self._next_look = now + LOOK_SECONDS
            if not self._board.check(["asked"]):
                return False
        self._may_pass()
        self._joined = True
        if self._board.add("joined", 1) == self._world:
            self._close()
        return False

    def _may_pass(self) -> bool:
        """Have `passed` be no lower than this tick, unless it is closed below."""
        while True:
            passed, closed = _parsed(self._passed)
            if self._ticks <= passed or closed:
                return self._ticks <= passed
            self._passed = self._swap(str(self._ticks).encode())

    def _close(self) -> None:
        while not _parsed(self._passed)[1]:
            self._passed = self._swap(self._passed + _CLOSED)

    def _swap(self, new: bytes) -> bytes:
        """Put a value in place of the one that was seen last; returns what is there then."""
        found: bytes = self._board.compare_set("passed", self._passed.decode(), new.decode())
        return found


def _parsed(passed: bytes) -> tuple[int, bool]:
    number = passed.removesuffix(_CLOSED)
    return int(number or b"0"), number != passed
