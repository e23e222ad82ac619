"""The receiver of a live transfer as a state machine: what to do next, and with which holders.

A holder is a rank that has the state, or a part of it: `recv(0)` has one, `recv([0, 1, 2])` has
three. The machine has no thread, clock or socket. The driver (`receiver.py`) asks for the next
action, carries it out with all of the holders that it names at once, and reports what came of it;
tests do the same without one.

| stage of holder | event                                                 | next      |
|-----------------|-------------------------------------------------------|-----------|
| JOINED          | its `Offer` is here                                   | OFFERED   |
| OFFERED         | planned: it is asked once, also for no reads at all   | FITTED    |
| FETCHED         | planned: it has reads of a holder that was lost       | FITTED    |
| CONFIRMED       | planned: it has reads of a holder that was lost       | FITTED    |
| FITTED          | `Accept` is sent                                      | ACCEPTED  |
| ACCEPTED        | its bytes are here and have their digests             | FETCHED   |
| FETCHED         | `Confirmed`: its state is unchanged                   | CONFIRMED |
| CONFIRMED       | the state is committed, `Done` is sent                | DONE      |
| any but DONE    | lost: closed, silent, late, changed, or damaged bytes | LOST      |

| holders                                               | next action                |
|-------------------------------------------------------|----------------------------|
| some are JOINED                                       | MEET these                 |
| all are LOST                                          | none: raise the first loss |
| some are ACCEPTED                                     | FETCH from these           |
| some are FITTED                                       | ACCEPT these               |
| some have offered or were lost since the last plan    | PLAN                       |
| some are FETCHED                                      | CONFIRM these              |
| all are CONFIRMED                                     | COMMIT                     |
| all are DONE                                          | none                       |

LOST holders do not count in the second table. Their bytes are read again from others that
offer the same boxes: their states may have changed. Before PLAN all holders must agree on the step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from torchrelay.errors import RelayError, StepMismatchError


class HolderStage(Enum):
    """How far a holder has come, as its receiver knows it."""

    JOINED = auto()  # it has been asked for its offer
    OFFERED = auto()
    FITTED = auto()  # the plan has reads of it
    ACCEPTED = auto()
    FETCHED = auto()
    CONFIRMED = auto()
    DONE = auto()
    LOST = auto()


class Action(Enum):
    """The next task of the driver."""

    MEET = auto()
    PLAN = auto()
    ACCEPT = auto()
    FETCH = auto()
    CONFIRM = auto()
    COMMIT = auto()


class Next(NamedTuple):
    """An action, and the holders to do it with at once."""

    action: Action
    ranks: tuple[int, ...]


@dataclass
class HolderState:
    """One holder: its stage, the step that it offers, and whether it sends other states too."""

    rank: int
    stage: HolderStage = HolderStage.JOINED
    step: int | None = None
    several: bool = False


_S = HolderStage


class ReceiverMachine:
    """The holders of one receive, in the order that the caller gave. `wanted`: the step that was
    asked for. A method that is called out of turn raises `ValueError`: the driver is wrong."""

    def __init__(self, ranks: Sequence[int], wanted: int | None = None) -> None:
        self._holders = {rank: HolderState(rank) for rank in ranks}
        self._wanted = wanted
        self._planned = False  # since the last offer or loss
        self.lost: dict[int, RelayError] = {}

    def among(self, *stages: HolderStage) -> tuple[int, ...]:
        """The ranks of holders in these stages."""
        return tuple([one.rank for one in self._holders.values() if one.stage in stages])

    @property
    def here(self) -> tuple[int, ...]:
        """The holders that have offered, and are not lost."""
        gone = {*self.among(_S.JOINED), *self.lost}
        return tuple([rank for rank in self._holders if rank not in gone])

    def next(self) -> Next | None:
        """What to do. Raises the first loss where no holder is left, and `StepMismatchError` where
        they do not offer one step."""
        if len(self.lost) == len(self._holders):
            raise next(iter(self.lost.values()))
        for stage, action in (
            (_S.JOINED, Action.MEET),
            (_S.ACCEPTED, Action.FETCH),
            (_S.FITTED, Action.ACCEPT),
        ):
            if ranks := self.among(stage):
                return Next(action, ranks)
        if not self._planned:
            self._check_steps()
            return Next(Action.PLAN, self.here)
        if ranks := self.among(_S.FETCHED):
            return Next(Action.CONFIRM, ranks)
        ranks = self.among(_S.CONFIRMED)
        return Next(Action.COMMIT, ranks) if ranks else None

    def _check_steps(self) -> None:
        holders = [self._holders[rank] for rank in self.here]
        if len({one.step for one in holders}) > 1:
            listed = ", ".join(f"rank {one.rank} has {one.step}" for one in holders)
            raise StepMismatchError(f"the ranks do not send one step: {listed}; send the same")
        for one in holders:
            if self._wanted is None and one.several:
                raise StepMismatchError(
                    f"rank {one.rank} sends several states to this rank: say which by step=",
                    rank=one.rank,
                )

    @property
    def step(self) -> int | None:
        """The step that the holders offer, once that is agreed on."""
        return self._holders[self.here[0]].step

    # Events

    def offered(self, rank: int, step: int | None, *, several: bool = False) -> None:
        """A holder has made its offer, of a step. `several`: it sends this rank other states, too,
        and might give a part of each."""
        holder = self._move(rank, _S.OFFERED, _S.JOINED)
        holder.step, holder.several, self._planned = step, several, False

    def planned(self, reads: Collection[int]) -> None:
        """The plan has new reads of these holders."""
        for rank in self.here:
            if rank in reads or self._holders[rank].stage is _S.OFFERED:
                self._move(rank, _S.FITTED, _S.OFFERED, _S.FETCHED, _S.CONFIRMED)
        self._planned = True

    def accepted(self, rank: int) -> None:
        """A holder has been sent an `Accept`."""
        self._move(rank, _S.ACCEPTED, _S.FITTED)

    def fetched(self, rank: int) -> None:
        """All bytes of a holder are here, and verified."""
        self._move(rank, _S.FETCHED, _S.ACCEPTED)

    def confirmed(self, rank: int) -> None:
        """A holder's state is unchanged."""
        self._move(rank, _S.CONFIRMED, _S.FETCHED)

    def committed(self) -> None:
        """The state is the caller's."""
        for rank in self.here:
            self._move(rank, _S.DONE, _S.CONFIRMED)

    def lose(self, rank: int, fault: RelayError) -> None:
        """A holder is lost, and what came from it does not count."""
        if rank not in self.lost:
            self._move(rank, _S.LOST, *set(_S) - {_S.DONE})
            self.lost[rank], self._planned = fault, False

    def _move(self, rank: int, to: HolderStage, *begin: HolderStage) -> HolderState:
        holder = self._holders[rank]
        if holder.stage not in begin:
            raise ValueError(f"rank {rank} is {holder.stage.name}, and cannot be {to.name}")
        holder.stage = to
        return holder
