"""Receives from one rank at the same time, each for a step of its own, exchange what they got.

First messages carry no step, so a call may be answered with the transfer that another call of this
process waits for. The two swap.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torchrelay.deadlines import TICK, Deadline


@dataclass(eq=False)
class HeldOffer:
    """What a call has got, and the step it wants."""

    want: int
    step: int | None  # that is offered
    catch: Any

    @property
    def fits(self) -> bool:
        return self.want == self.step


class OfferExchange:
    """The receives of one group in this process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: Counter[int] = Counter()
        self._waiting: defaultdict[int, list[HeldOffer]] = defaultdict(list)

    @contextmanager
    def call(self, sender: int) -> Iterator[None]:
        """Count a receive from `sender` as under way."""
        with self._changed:
            self._calls[sender] += 1
        try:
            yield
        finally:
            with self._changed:
                self._calls[sender] -= 1
                self._changed.notify_all()

    def settle(self, sender: int, held: HeldOffer, deadline: Deadline) -> None:
        """Exchange a misfit for the offer that is wanted, if another call has or gets it.

        Returns with the misfit in hand once there is nobody left to swap with.
        """
        with self._changed:
            waiting = self._waiting[sender]
            waiting.append(held)
            self._changed.notify_all()
            try:
                while not held.fits and not deadline.passed:
                    other = next((h for h in waiting if h.step == held.want and not h.fits), None)
                    if other is not None:
                        mine = held.step, held.catch
                        held.step, held.catch = other.step, other.catch
                        other.step, other.catch = mine
                        self._changed.notify_all()
                    elif self._calls[sender] > len(waiting):
                        self._changed.wait(min(deadline.left(), TICK))
                    else:
                        return
            finally:
                waiting.remove(held)
                self._changed.notify_all()
