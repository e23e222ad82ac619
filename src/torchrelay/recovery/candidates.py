"""What the sources of one rank have, and which of it was tried. Nothing here lands anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from torchrelay.deadlines import Deadline
from torchrelay.errors import CheckpointError, RelayError
from torchrelay.memory.bounded import bounded
from torchrelay.memory.crew import Crew
from torchrelay.record.checkpoint.schema import Checkpoint, epoch_seconds
from torchrelay.recovery.estimate import estimates
from torchrelay.recovery.report import SourceAccount
from torchrelay.recovery.resharing import Resharing
from torchrelay.sources.mended_step import MendedStep, Successor
from torchrelay.sources.seam import Opened, Source
from torchrelay.stores.retry import ONCE, Retry

ASK_SECONDS = 10.0  # that a source may take to say what it has
GAIN_SECONDS = 1.0  # and half the time: what makes a farther source worth while
FIRST_SHARE = 0.6  # of the time of an attempt, which its first source may take


class Candidates:
    """The steps that each source has, less those that were found wanting."""

    def __init__(
        self,
        sources: Sequence[Source],
        min_step: int | None,
        max_age: float | None,
        resharing: Resharing | None = None,
    ) -> None:
        self._sources = sources
        self._resharing = resharing
        self._min_step, self._max_age = min_step, max_age
        self._steps: list[list[int]] = [[] for _ in sources]
        self._newest: list[int | None] = [None] * len(sources)
        self._reasons: list[list[str]] = [[] for _ in sources]
        self._estimated: dict[int, dict[int, float]] = {}  # seconds, by step and by source
        self._given: MendedStep | None = None  # what was opened last

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

    def _places(self, step: int) -> list[int]:
        """The sources that have a step: the nearest first, of several the one that was given first,
        unless another would be much faster."""
        spent = self._estimated.get(step, {})
        places = [place for place, steps in enumerate(self._steps) if step in steps]
        places.sort(key=lambda place: (self._sources[place].cost, place))
        if spent.keys() >= set(places) and places:
            fastest = min(places, key=lambda place: spent[place])
            gain = spent[places[0]] - spent[fastest]
            if gain > max(GAIN_SECONDS, spent[places[0]] / 2):
                places.remove(fastest)
                places.insert(0, fastest)
        return places

    def several(self, step: int) -> bool:
        """Whether there is something to fall back to, should a step not come from where it is
        tried first."""
        return len(self.steps()) > 1 or len(self._places(step)) > 1

    def choose(self, step: int, deadline: Deadline) -> None:
        """Find out which source is the fastest for a step, where several have it."""
        places = self._places(step)
        if len(places) < 2 or step in self._estimated:
            return
        seconds = min(ASK_SECONDS, deadline.left() / 8)
        found = estimates([self._sources[place] for place in places], step, seconds)
        self._estimated[step] = {
            place: spent for place, spent in zip(places, found, strict=True) if spent is not None
        }

    def shelf(self, step: int, deadline: Deadline) -> SourceShelf:
        """A step of its fastest source, with the others to complete it."""
        first, *others = self._places(step)
        # The first one leaves the others some of the time, if it does not answer.
        share = Deadline(max(deadline.left() * FIRST_SHARE, 0.01)) if others else deadline

        def opened(source: Source, until: Deadline) -> Opened:
            if self._resharing is not None and source is self._sources[first]:
                found = self._resharing.open(source, step, until)
            else:
                found = source.open(step, until)
            try:
                self._check_age(found.record, step)
            except BaseException:
                found.close()
                raise
            return found

        def open_all() -> MendedStep:
            successors = [
                Successor(source.name, lambda source=source: opened(source, deadline))  # type: ignore[misc]
                for source in (self._sources[place] for place in others)
            ]
            self._given = MendedStep(opened(self._sources[first], share), successors)
            return self._given

        return SourceShelf(self._sources[first], step, deadline, open_all)

    def _check_age(self, record: Checkpoint, step: int) -> None:
        age = time.time() - (epoch_seconds(record.time) or 0.0)  # no time: as old as can be
        if self._max_age is not None and age > self._max_age:
            raise TooOldError(
                f"it is {age:.0f} s old, and max_age is {self._max_age:g} s", step=step
            )

    def pass_over(self, step: int, fault: RelayError) -> None:
        """This rank could not take a step from where it tried to."""
        place = self._places(step)[0]
        if isinstance(fault, TooOldError):  # and what is older in it is older still
            self._steps[place] = []
        else:
            self._steps[place].remove(step)
        self._reasons[place].append(f"step {step} was passed over: {fault.message}")

    def source_of(self, step: int) -> str:
        return self._sources[self._places(step)[0]].name

    def supplied(self, step: int, nbytes: int) -> dict[str, int]:
        """Bytes of the step that was taken, by the source that they came from."""
        mended = {} if self._given is None else self._given.mended
        first = {self.source_of(step): max(0, nbytes - sum(mended.values()))}
        return {name: some for name, some in {**first, **mended}.items() if some}

    def accounts(self, taken: int | None = None) -> tuple[SourceAccount, ...]:
        """What is to be said of each source, where a step was taken or none was."""
        chosen = None if taken is None else self._places(taken)[0]
        found = []
        for place, source in enumerate(self._sources):
            reasons = list(self._reasons[place])
            spent = None if taken is None else self._estimated.get(taken, {}).get(place)
            if taken is not None:
                reasons.extend(self._outcome(place, taken, chosen == place))
            elif self._steps[place]:
                reasons.append("not every rank could get one of its steps")
            found.append(SourceAccount(source.name, self._newest[place], "; ".join(reasons), spent))
        return tuple(found)

    def _outcome(self, place: int, taken: int, chosen: bool) -> Iterator[str]:
        """What came of a source where a step was taken, from it or from another."""
        given, steps, name = self._given, self._steps[place], self._sources[place].name
        mended = {} if given is None else given.mended
        if chosen:
            yield f"step {taken} was taken"
            if mended and given is not None:
                yield f"but for {sum(mended.values())} bytes: {given.lost}"
        elif name in mended:
            yield f"{mended[name]} bytes that the one taken did not give are from here"
        elif given is not None and name in given.failed:
            yield f"it could not complete the one taken: {given.failed[name]}"
        elif steps and steps[-1] < taken:
            rest = "its other steps are" if self._reasons[place] else "it is"
            yield f"{rest} behind step {taken}"
        elif taken in steps:
            yield "another source is nearer or faster"
        elif steps:
            yield f"not every rank could get step {steps[-1]}"


class TooOldError(CheckpointError):
    """A step of a source is older than the caller allows."""


class SourceShelf:
    """One step of one source, as what a loader finds steps on. It is known by what it holds, so
    that ranks may have it of several sources."""

    def __init__(
        self, source: Source, step: int, deadline: Deadline, open_step: Callable[[], Opened]
    ) -> None:
        self._source, self._step = source, step
        self._deadline, self._open = deadline, open_step

    @property
    def url(self) -> str:
        return self._source.name

    def steps(self, patience: Retry = ONCE) -> list[int]:
        return [step for step in self._source.steps(self._deadline) if step == self._step]

    def open(self, step: int, patience: Retry = ONCE) -> Opened:
        return self._open()

    def note_damaged(self, step: int) -> None:
        pass
