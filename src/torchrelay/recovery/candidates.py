"""What the sources of one rank have, and which of it was tried. Nothing here lands anything."""

from __future__ import annotations

import calendar
import time
from collections.abc import Sequence

from torchrelay.deadlines import Deadline
from torchrelay.errors import CheckpointError, RelayError
from torchrelay.memory.bounded import bounded
from torchrelay.memory.crew import Crew
from torchrelay.recovery.report import SourceAccount
from torchrelay.sources.seam import Opened, Source
from torchrelay.stores.records import Checkpoint, content_digest
from torchrelay.stores.retry import ONCE, Retry
from torchrelay.stores.seam import OpenStep

ASK_SECONDS = 10.0  # that a source may take to say what it has


class Candidates:
    """The steps that each source has, less those that were found wanting."""

    def __init__(
        self, sources: Sequence[Source], min_step: int | None, max_age: float | None
    ) -> None:
        self._sources = sources
        self._min_step, self._max_age = min_step, max_age
        self._steps: list[list[int]] = [[] for _ in sources]
        self._newest: list[int | None] = [None] * len(sources)
        self._reasons: list[list[str]] = [[] for _ in sources]

    def ask(self, deadline: Deadline) -> None:
        """Ask all sources at once what they have. One that does not answer has nothing."""
        seconds = min(ASK_SECONDS, deadline.left() / 4)

        def look(place: int) -> None:
            source = self._sources[place]
            try:
                found = bounded(
                    lambda: sorted(source.steps(Deadline(seconds))), seconds, "list the steps"
                )
            except (RelayError, OSError) as fault:
                self._reasons[place].append(getattr(fault, "message", str(fault)))
                return
            self._newest[place] = found[-1] if found else None
            self._steps[place] = [s for s in found if self._min_step is None or s >= self._min_step]
            if found and not self._steps[place]:
                self._reasons[place].append(f"that is below min_step, {self._min_step}")
            elif not found:
                self._reasons[place].append("there is nothing in it")

        Crew(len(self._sources)).each(look, range(len(self._sources)))

    def steps(self) -> list[int]:
        """What this rank can get from any source, the newest first."""
        return sorted({step for steps in self._steps for step in steps}, reverse=True)

    def place_of(self, step: int) -> int:
        """The nearest source that has a step; of several, the one that was given first."""
        places = [place for place, steps in enumerate(self._steps) if step in steps]
        return min(places, key=lambda place: (self._sources[place].cost, place))

    def others(self, step: int) -> int:
        """How many sources have a step, but for one."""
        return sum(step in steps for steps in self._steps) - 1

    def shelf(self, step: int, deadline: Deadline) -> SourceShelf:
        place = self.place_of(step)
        return SourceShelf(self._sources[place], step, deadline, self._max_age)

    def pass_over(self, step: int, fault: RelayError) -> None:
        """This rank could not take a step from where it tried to."""
        place = self.place_of(step)
        if isinstance(fault, TooOldError):  # and what is older in it is older still
            self._steps[place] = []
        else:
            self._steps[place].remove(step)
        self._reasons[place].append(f"step {step} was passed over: {fault.message}")

    def accounts(self, taken: int | None = None) -> tuple[SourceAccount, ...]:
        """What is to be said of each source, where a step was taken or none was."""
        chosen = None if taken is None else self.place_of(taken)
        found = []
        for place, source in enumerate(self._sources):
            reasons = list(self._reasons[place])
            if place == chosen:
                reasons.append(f"step {taken} was taken")
            elif taken is not None and self._steps[place]:
                newest = self._steps[place][-1]
                reasons.append(
                    f"it is behind step {taken}"
                    if newest < taken
                    else "another source is nearer"
                    if taken in self._steps[place]
                    else f"not every rank could get step {newest}"
                )
            elif self._steps[place]:
                reasons.append("not every rank could get one of its steps")
            found.append(SourceAccount(source.name, self._newest[place], "; ".join(reasons)))
        return tuple(found)


class TooOldError(CheckpointError):
    """A step of a source is older than the caller allows."""


class SourceShelf:
    """One step of one source, as what a loader finds steps on."""

    def __init__(
        self, source: Source, step: int, deadline: Deadline, max_age: float | None
    ) -> None:
        self._source, self._step = source, step
        self._deadline, self._max_age = deadline, max_age

    @property
    def url(self) -> str:
        return self._source.name

    def steps(self, patience: Retry = ONCE) -> list[int]:
        return [step for step in self._source.steps(self._deadline) if step == self._step]

    def open(self, step: int, patience: Retry = ONCE) -> Opened:
        opened = self._source.open(step, self._deadline)
        try:
            age = time.time() - _seconds(opened.record.time)
            if self._max_age is not None and age > self._max_age:
                raise TooOldError(
                    f"it is {age:.0f} s old, and max_age is {self._max_age:g} s", step=step
                )
            return _ByContent(opened)
        except BaseException:
            opened.close()
            raise

    def note_damaged(self, step: int) -> None:
        pass


class _ByContent:
    """An open step that is known by what it holds, so that ranks may have it of several sources."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self.digest = bytes.fromhex(content_digest(opened.record))

    @property
    def record(self) -> Checkpoint:
        return self._opened.record

    @property
    def files(self) -> OpenStep:
        return self._opened.files

    def close(self) -> None:
        self._opened.close()


def _seconds(text: str) -> float:
    """The time of a record as seconds since 1970. What no one can read is as old as can be."""
    try:
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return 0.0
