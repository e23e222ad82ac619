"""Which leaves of an offered state are wanted, and what the absence of one means."""

from __future__ import annotations

from torchrelay.arguments import matches
from torchrelay.errors import MismatchError
from torchrelay.state.paths import Path, dotted

_MAX_NAMED, _MAX_NAMED_EACH = 1 << 24, 1 << 8


class Texts:
    """Paths of a record as text. A short record may have paths of gigabytes: a limited number
    of characters and steps is looked through."""

    def __init__(self, leaves: int) -> None:
        self._left = _MAX_NAMED + _MAX_NAMED_EACH * leaves

    def of(self, path: Path) -> str:
        name = dotted(path)
        self._left -= len(name) + 8 * len(path)
        if self._left < 0:
            raise MismatchError("the paths of the step are too long to be looked through")
        return name


class Selection:
    """The leaves whose dotted paths match one of the `patterns`; all of them if there are none.

    `exact`: the offer was one state, so a destination that lacks a part of it differs from it.
    `guessed`: its containers are what a planner of torch took them for.
    """

    def __init__(
        self,
        patterns: tuple[str, ...] = (),
        leaves: int = 0,
        *,
        exact: bool = True,
        guessed: bool = False,
    ) -> None:
        self.patterns = patterns
        self.exact = exact
        self.guessed = guessed
        self._texts = Texts(leaves)

    @property
    def plain(self) -> bool:
        """Whether everything is wanted, and nothing of it is a guess."""
        return self.exact and not self.guessed and not self.patterns

    def takes(self, path: Path) -> bool:
        if not self.patterns:
            return True
        return matches(self._texts.of(path), self.patterns)
