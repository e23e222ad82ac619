"""Which step a load tries next, and how it ends. Pure.

| what happens                                    | next                                          |
|-------------------------------------------------|-----------------------------------------------|
| the steps are listed                            | try the newest that was not skipped           |
| a step is marked, and the newest was wanted     | try those that are not marked first           |
| a step is landed                                | the load is over                              |
| a step is damaged, or gone when it is opened    | all ranks look at it again                    |
| - it was replaced, or a rank does not see it yet| list the steps again                          |
| - it is the same, and the newest was wanted     | skip it, and try the next one                 |
| - it is the same, and the caller named it       | fail                                          |
| an attempt fails for any other reason           | fail                                          |
| no step is left                                 | fail: `StepNotFoundError` with all reasons    |

Where an earlier attempt wrote to the caller's tensors, each failure is a `TornStateError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple, NoReturn

from torchrelay.errors import (
    CheckpointError,
    DamagedError,
    RelayError,
    ReplicaError,
    StepNotFoundError,
    TornStateError,
)
from torchrelay.landing.commit.landing import TORN
from torchrelay.record.schema import Record


class AttemptProgress(NamedTuple):
    """How far an attempt at a step came on this rank."""

    planned: bool  # whether the step was opened, and its reads were planned
    touched: bool  # whether the caller's tensors may have been written


class StepSearch:
    """The steps that one load tries, on one rank. Each rank comes to the same decisions, for every
    fault is raised on all of them."""

    def __init__(self, source: str, named: int | None) -> None:
        self._source, self._named = source, named
        self._todo: list[int] = []
        self._torn: RelayError | None = None  # the failure of an attempt that wrote to tensors
        self.skipped: dict[int, str] = {}  # with the reasons
        self.marked: dict[int, str] = {}  # passed over, since their replicas differ
        self.takes_marked = named is not None  # whether they are all that is left

    def listed(self, steps: Iterable[int]) -> None:
        """The steps of the source, the newest first."""
        known = self.skipped if self.takes_marked else {**self.skipped, **self.marked}
        self._todo = [step for step in steps if step not in known]

    def next(self) -> int:
        """The step to try. Raises where none is left."""
        if not self._todo and not self.takes_marked:
            self.takes_marked, self._todo = True, sorted(self.marked, reverse=True)
        if self._todo:
            return self._todo.pop(0)
        reasons = "".join(f"\n  step {step}: {why}" for step, why in self.skipped.items())
        self.fail(StepNotFoundError(f"no step that verifies in {self._source}{reasons}"))

    def is_doubtful(self, fault: RelayError, progress: AttemptProgress) -> bool:
        """Whether an attempt failed for a reason that may be gone at another look."""
        if progress.touched:
            self._torn = fault
        gone = isinstance(fault, StepNotFoundError) and not progress.planned
        return gone or isinstance(fault, DamagedError)

    def is_marked(self, fault: RelayError, progress: AttemptProgress) -> bool:
        """Whether an attempt ended because the step is marked."""
        return not (self.takes_marked or progress.planned) and isinstance(fault, ReplicaError)

    def pass_over(self, step: int, fault: RelayError) -> None:
        """The step is marked: it is tried when no other is left."""
        self.marked[step] = fault.message

    def skip(self, step: int, fault: RelayError) -> None:
        """The step is the same at another look. Raises where the caller named it."""
        if self._named is not None:
            self.fail(fault)
        self.skipped[step] = str(fault)

    def fail(self, fault: RelayError) -> NoReturn:
        """The load ends with a fault."""
        torn = self._torn
        if torn is None or isinstance(fault, TornStateError):
            raise fault
        raise TornStateError(f"{TORN}: {torn}", step=torn.step, phase="land") from torn


class Look(Enum):
    """What ranks find where they look at a step again that could not be loaded."""

    SAME = "it is the step that failed"
    REPLACED = "it was removed, or replaced by another save"
    UNSEEN = "a rank does not see what the coordinator sees, yet"


class StepLook(NamedTuple):
    """A rank's look at a step: the digest of its record when it was opened and now, each empty
    where it was not open or is damaged; `now` is None where it does not exist."""

    opened: bytes
    now: bytes | None


def compare(ranks: Sequence[StepLook]) -> tuple[Look, int]:
    """The looks of all ranks, the coordinator first: what they mean, and a rank that does not see
    the step where one does not."""
    now = ranks[0].now
    blind = next((rank for rank, seen in enumerate(ranks) if seen.now is None), 0)
    if now is not None and blind:
        return Look.UNSEEN, blind
    replaced = now is None or any(seen.opened != now for seen in ranks)
    return (Look.REPLACED if replaced else Look.SAME), 0


def check_unmarked(record: Record, name: str) -> None:
    """`ReplicaError` for a step whose replicas differed when it was saved."""
    if record.mark is not None:
        text = f"step {record.step} in {name} is marked: {record.mark}"
        raise ReplicaError(text, step=record.step, phase="verify")


def unseen(source: str, step: int, rank: int, theirs: str) -> CheckpointError:
    """The error where a rank does not come to see a step. `theirs`: the source, as it names it."""
    return CheckpointError(
        f"rank {rank} does not see {source}/step-{step}, as rank 0 does: is it on a shared file "
        f"system? Rank {rank} has {theirs}",
        rank=rank,
        step=step,
    )
