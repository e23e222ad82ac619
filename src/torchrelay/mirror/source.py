"""Steps of a root and of its mirror, as one source: all that either has, from the root first."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial

from torchrelay.deadlines import Deadline
from torchrelay.errors import DamagedError, RelayError, StepNotFoundError
from torchrelay.pending import logger
from torchrelay.sources.mended_step import MendedStep, OtherSource
from torchrelay.sources.source import Opened, Source

LIST_SECONDS = 30.0  # that the mirror may take to list its steps, where the root has some


class MirroredSource:
    """A `Source` of both. A step is known by its contents, so that ranks may have it from either.

    Chunks that the root does not give right come from the mirror, if it has the same step. A mirror
    that cannot be asked is an error only where the root has no step: else the root's are used, with
    a warning. `note_damage` is called when bytes are found damaged.
    """

    def __init__(
        self, root: Source, mirror: Source, note_damage: Callable[[], None] = lambda: None
    ) -> None:
        self.sources = (root, mirror)
        self._note_damage = note_damage
        self.name, self.cost = root.name, root.cost

    def steps(self, deadline: Deadline) -> Iterable[int]:
        root, mirror = self.sources
        found = set(root.steps(deadline))
        if not found:
            return mirror.steps(deadline)
        seconds = max(0.01, min(LIST_SECONDS, deadline.left() / 4))
        try:
            return found | set(mirror.steps(Deadline(seconds)))
        except (RelayError, OSError) as fault:
            logger.warning("the steps of %s are used alone: %s", self.name, fault)
            return found

    def open(self, step: int, deadline: Deadline) -> Opened:
        root, mirror = self.sources
        try:
            other = OtherSource(mirror.name, partial(mirror.open, step, deadline))
            return _mended(root.open(step, deadline), [other], self._note_damage)
        except (StepNotFoundError, DamagedError) as fault:
            try:
                found = _mended(mirror.open(step, deadline), [], self._note_damage)
            except StepNotFoundError:
                raise fault from None
            logger.warning("step %d is taken from %s: %s", step, mirror.name, fault)
            return found

    def end(self, reason: str = "", nbytes: int = 0) -> None:
        for source in self.sources:
            source.end(reason, nbytes)


def sources_of(source: Source) -> tuple[Source, ...]:
    """The sources that a source consists of, for a caller that asks each of them."""
    return source.sources if isinstance(source, MirroredSource) else (source,)


def _mended(
    first: Opened, others: list[OtherSource], note_damage: Callable[[], None]
) -> _MirroredStep:
    try:
        return _MirroredStep(first, others, note_damage)
    except BaseException:  # its record is damaged
        first.close()
        raise


class _MirroredStep(MendedStep):
    """Warns where bytes of the root are replaced: a later load may find the mirror gone."""

    def __init__(
        self, first: Opened, others: list[OtherSource], note_damage: Callable[[], None]
    ) -> None:
        super().__init__(first, others)
        self._note_damage = note_damage

    def mend(self, name: str, start: int, stop: int, why: str) -> bool:
        known = bool(self.lost)
        self._note_damage()
        mended = super().mend(name, start, stop, why)
        names = [one.name for one in self.others if one.bytes]
        if mended and names and not known:
            text = f"{why}; its bytes are taken from {names[0]}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return mended
