"""How every landing ends, whoever brought its bytes: one rank, several of them, or a store.

Objects take their new state, the caller's tensors are written, and the rest is handed over. Up to
the first write there is a way back; after it the state is new, or said to be torn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torchrelay.errors import RelayError, TornStateError
from torchrelay.landing.held import HeldImages
from torchrelay.landing.places import Landed, Landing
from torchrelay.record.schema import Record
from torchrelay.state.paths import Path
from torchrelay.state.tree import show

TORN = "the destination is part old, part new; load again, or receive into it again"

Act = Callable[[], None]
Together = Callable[[str, Act], None]  # has an act done on every rank, by the name of its phase
Watch = Callable[[str], AbstractContextManager[Any]]


def alone(phase: str, act: Act) -> None:
    """For one rank."""
    act()


class StateLanding(Landing, ABC):
    """A landing of a whole state. It ends by `make`, then `end`; `commit` does both.

    A source that has boxes of tensors and no stream asks for images by number. It fills the memory
    that is held before `make`, and the caller's own tensors in the `bring` of `end`, which sets
    `torn` when it begins.
    """

    record: Record
    held: HeldImages  # memory of the landing's own
    all_new = False  # nothing in it is the caller's
    _finishing = False

    def are_equal(self, one: int, other: int) -> bool:
        """Whether two images that are held have the same bytes."""
        return torch.equal(self.held.bytes(one).cpu(), self.held.bytes(other).cpu())

    def own(self) -> HeldImages:
        """The caller's tensors and local parts that take images as they are; none where all images
        are held."""
        return HeldImages(self.chunks)

    @abstractmethod
    def make(self) -> None:
        """Work everything out that can fail. Nothing of the caller's has changed by then."""

    def give(self) -> None:
        """Give objects their new state. `MismatchError` where one refuses; then all have their
        old one."""

    def take_back(self) -> list[Path]:
        """Undo `give`; returns the objects for which that failed."""
        return []

    @abstractmethod
    def finish(self) -> Landed:
        """Make the state new, all of it."""

    @property
    def touched(self) -> bool:
        """Whether anything of the caller's has been written to, but for objects."""
        return not self.all_new and (self._finishing or self.torn)

    def commit(self) -> Landed:
        """All chunks have arrived and hold: make them the state."""
        self.make()
        return self.end()

    def end(
        self, bring: Act = lambda: None, together: Together = alone, watch: Watch = nullcontext
    ) -> Landed:
        """After `make`: the state. `bring` fills the caller's own tensors, where they take bytes as
        they are. `together` raises on all ranks what one of them raises. Where it fails before a
        tensor was written, all objects have their old state again; after that, an error that is not
        the library's own becomes a `TornStateError`.
        """
        landed: list[Landed] = []

        def write() -> None:
            try:
                with watch("land"):
                    bring()
                with watch("commit"):
                    self._finishing = True
                    landed.append(self.finish())
            except RelayError:
                raise
            except Exception as fault:  # of a planner of the user's, or of a device
                if not self.touched:
                    raise
                raise TornStateError(f"{TORN}: {fault!r}", phase="land") from fault

        try:
            together("give", self.give)
            together("land", write)
        except BaseException as fault:
            lost = [] if self.touched else self.take_back()
            if lost:
                raise TornStateError(
                    f"not every object took its old state back: {', '.join(map(show, lost))} may "
                    "be part new, the rest is old; land a state in it again, or make a new one",
                    phase="give",
                ) from fault
            raise
        return landed[0]
