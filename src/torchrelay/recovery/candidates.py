"""The steps of one rank's sources, and those that were tried. Nothing here lands anything."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from torchrelay.deadlines import Deadline
from torchrelay.errors import CheckpointError, MismatchError, RelayError, ReplicaError
from torchrelay.loading.search import check_unmarked
from torchrelay.memory.bounded import bounded
from torchrelay.memory.thread_pool import ThreadPool
from torchrelay.record.schema import Record
from torchrelay.results import Attempt
from torchrelay.sources.mended_step import MendedStep, OtherSource
from torchrelay.sources.source import Opened, Source
from torchrelay.steps import epoch_seconds

ASK_SECONDS = 10.0  # that a source may take to list its steps
FIRST_SHARE = 0.6  # of the time of an attempt, which its first source may take


class TooOldError(CheckpointError):
    """A step of a source is older than the caller allows."""


class Candidates:
    """The steps that each source has, less those that could not be used."""

    def __init__(
        self, sources: Sequence[Source], min_step: int | None, max_age: float | None
    ) -> None:
        self._sources = sources
        self._min_step, self._max_age = min_step, max_age
        self._steps: list[list[int]] = [[] for _ in sources]
        self._newest: list[int | None] = [None] * len(sources)
        self._reasons: list[list[str]] = [[] for _ in sources]
        self._stale = [0] * len(sources)  # steps of each that are too old
        self._marked: list[list[int]] = [[] for _ in sources]  # passed over: their replicas differ
        self._accepted: set[int] = set()  # of these, where there is no other
        # Whether every source could be asked, and has no step. A caller that names a lowest step
        # knows of one.
        self.empty = min_step is None
        self._opened: MendedStep | None = None  # the step that was opened last

    def ask(self, deadline: Deadline) -> None:
        """Ask all sources at once which steps they have. One that does not answer has none."""
        seconds = min(ASK_SECONDS, deadline.left() / 4)

        def look(index: int) -> None:
            source = self._sources[index]
            try:
                found = bounded(
                    lambda: sorted(source.steps(Deadline(seconds))), seconds, "list the steps"
                )
            except (RelayError, OSError) as fault:
                self._reasons[index].append(str(fault))
                self.empty = False
                return
            self._newest[index] = found[-1] if found else None
            self._steps[index] = [s for s in found if self._min_step is None or s >= self._min_step]
            if found and not self._steps[index]:
                self._reasons[index].append(f"that is below min_step, {self._min_step}")
            elif not found:
                self._reasons[index].append("there is nothing in it")
            self.empty = self.empty and not found

        ThreadPool(len(self._sources)).each(look, range(len(self._sources)))

    def steps(self) -> list[int]:
        """The steps that this rank can get from any source, the newest first."""
        return sorted({step for steps in self._steps for step in steps}, reverse=True)

    def marked(self) -> list[int]:
        """Steps that were passed over because their replicas differ, the newest first."""
        return sorted({step for steps in self._marked for step in steps}, reverse=True)

    def accept(self, step: int) -> None:
        """Take a marked step: there is no other."""
        self._accepted.add(step)
        for steps, marked in zip(self._steps, self._marked, strict=True):
            if step in marked:
                marked.remove(step)
                steps.append(step)

    def _having(self, step: int) -> list[int]:
        """The sources that have a step: the nearest first, of several the one given first."""
        having = [index for index, steps in enumerate(self._steps) if step in steps]
        return sorted(having, key=lambda index: (self._sources[index].cost, index))

    def several(self, step: int) -> bool:
        """Whether there is something to fall back to, if a step cannot be read from where it is
        tried first."""
        return len(self.steps()) > 1 or len(self._having(step)) > 1

    def open(self, step: int, deadline: Deadline) -> MendedStep:
        """A step of its nearest source, with the others to complete it."""
        first, *others = (self._sources[index] for index in self._having(step))
        # The first one leaves the others some of the time, if it does not answer.
        share = Deadline(max(deadline.left() * FIRST_SHARE, 0.01)) if others else deadline

        def opened(source: Source, until: Deadline) -> Opened:
            found = source.open(step, until)
            try:
                self._check_age(found.record, step)
                if step not in self._accepted:
                    check_unmarked(found.record, source.name)
            except BaseException:
                found.close()
                raise
            return found

        more = [OtherSource(one.name, partial(opened, one, deadline)) for one in others]
        self._opened = MendedStep(opened(first, share), more)
        return self._opened

    def _check_age(self, record: Record, step: int) -> None:
        age = time.time() - (epoch_seconds(record.saved.time) or 0.0)  # no time: as old as can be
        if self._max_age is not None and age > self._max_age:
            raise TooOldError(
                f"it is {age:.0f} s old, and max_age is {self._max_age:g} s", step=step
            )

    def pass_over(self, step: int, fault: RelayError) -> None:
        """This rank could not take a step from where it tried to. Where that took too long or does
        not fit, the source is not asked for its other steps. A lower step may be the younger one:
        it was saved again."""
        index = self._having(step)[0]
        if isinstance(fault, (MismatchError, TimeoutError)):
            self._steps[index] = []
        else:
            self._steps[index].remove(step)
        if isinstance(fault, ReplicaError):
            self._marked[index].append(step)
        if isinstance(fault, TooOldError):
            self._stale[index] += 1
            if self._stale[index] > 1:  # one line is enough for many
                return
        verb = "does not fit" if isinstance(fault, MismatchError) else "was passed over"
        self._reasons[index].append(f"step {step} {verb}: {fault.message}")

    def source_of(self, step: int) -> str:
        return self._sources[self._having(step)[0]].name

    def supplied(self, step: int, nbytes: int) -> dict[str, int]:
        """Bytes of the step that was taken by source, the chosen one first."""
        others = () if self._opened is None else self._opened.others
        mended = {one.name: one.bytes for one in others if one.bytes}
        return {self.source_of(step): max(0, nbytes - sum(mended.values())), **mended}

    def attempts(self, taken: int | None = None) -> tuple[Attempt, ...]:
        """The report on each source, whether a step was taken or not."""
        chosen = None if taken is None else self._having(taken)[0]
        found = []
        for index, source in enumerate(self._sources):
            reasons = list(self._reasons[index])
            if (more := self._stale[index] - 1) > 0:
                reasons.append(f"{more} other {'step is' if more == 1 else 'steps are'} too old")
            if taken is not None:
                reasons.extend(self._outcome(index, taken, chosen == index))
            elif self._steps[index]:
                reasons.append("not every rank could get one of its steps")
            found.append(Attempt(source.name, self._newest[index], "; ".join(reasons)))
        return tuple(found)

    def _outcome(self, index: int, taken: int, chosen: bool) -> Iterator[str]:
        """The outcome of a source after a step was taken, from it or from another."""
        opened, steps, name = self._opened, self._steps[index], self._sources[index].name
        others = {one.name: one for one in opened.others} if opened is not None else {}
        mended = sum(one.bytes for one in others.values())
        if chosen:
            yield f"step {taken} was taken"
            if mended and opened is not None:
                yield f"except {mended} bytes: {opened.lost}"
        elif name in others and others[name].bytes:
            yield f"{others[name].bytes} bytes that the one taken did not give are from here"
        elif name in others and others[name].fault:
            yield f"it could not complete the one taken: {others[name].fault}"
        elif steps and steps[-1] < taken:
            rest = "its other steps are" if self._reasons[index] else "it is"
            yield f"{rest} behind step {taken}"
        elif taken in steps:
            yield "another source is nearer"
        elif steps:
            yield f"not every rank could get step {steps[-1]}"


class ChosenStep:
    """One step that was listed already, as a source. It is known by its contents, so that ranks may
    have it from several sources. See `Source`."""

    cost = 0

    def __init__(self, candidates: Candidates, step: int) -> None:
        self._candidates, self._step = candidates, step
        self.name = candidates.source_of(step)

    def steps(self, deadline: Deadline) -> list[int]:
        return [self._step]

    def open(self, step: int, deadline: Deadline) -> Opened:
        return self._candidates.open(step, deadline)

    def end(self, reason: str = "", nbytes: int = 0) -> None:
        """Nothing: the sources themselves hear of the end."""
