"""The receiver as a state machine, driven by a recorder."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.support.rounds import rounds
from torchrelay.errors import (
    DigestError,
    PeerAbortedError,
    PeerLostError,
    RelayError,
    StepMismatchError,
    TransferTimeoutError,
)
from torchrelay.transports.protocol.receiver_machine import Action, HolderStage, ReceiverMachine

S = HolderStage


class Recorder:
    """Carries actions out without a process, and notes them. `loses` has what goes wrong, by action
    and rank, each once; `replicas` the ranks that have the boxes of a rank too."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        loses: dict[tuple[Action, int], RelayError] | None = None,
        replicas: dict[int, int] | None = None,
        steps: dict[int, int | None] | None = None,
        several: tuple[int, ...] = (),
        wanted: int | None = None,
    ) -> None:
        self.machine = ReceiverMachine(ranks, wanted)
        self.loses, self.replicas = dict(loses or {}), replicas or {}
        self.steps, self.several = steps or {}, several
        self.done: list[tuple[Action, tuple[int, ...]]] = []
        self.reads = set(ranks)

    def run(self) -> list[tuple[str, tuple[int, ...]]]:
        while (todo := self.machine.next()) is not None:
            self.done.append(todo)
            self.act(todo.action, todo.ranks)
        return [(action.name, ranks) for action, ranks in self.done]

    def act(self, action: Action, ranks: tuple[int, ...]) -> None:
        machine = self.machine
        if action is Action.PLAN:
            lost = self.reads & machine.lost.keys()
            moved = {self.replicas[rank] for rank in lost}
            machine.planned(moved if lost else self.reads)
            self.reads = self.reads - lost | moved
        elif action is Action.COMMIT:
            machine.committed()
        for rank in () if action in (Action.PLAN, Action.COMMIT) else ranks:
            if fault := self.loses.pop((action, rank), None):
                machine.lose(rank, fault)
            elif action is Action.MEET:
                several = rank in self.several
                machine.offered(rank, self.steps.get(rank, 3), several=several)
            else:
                events: dict[Action, Callable[[int], None]] = {
                    Action.ACCEPT: machine.accepted,
                    Action.FETCH: machine.fetched,
                    Action.CONFIRM: machine.confirmed,
                }
                events[action](rank)


def plain(*ranks: int) -> list[tuple[str, tuple[int, ...]]]:
    return [(one, ranks) for one in ("MEET", "PLAN", "ACCEPT", "FETCH", "CONFIRM", "COMMIT")]


@pytest.mark.parametrize("ranks", [(4,), (0, 1, 2), (2, 0)])
def test_one_holder_and_several_take_the_same_steps(ranks: tuple[int, ...]) -> None:
    recorder = Recorder(ranks)
    assert recorder.run() == plain(*ranks)
    assert recorder.machine.among(S.DONE) == ranks and recorder.machine.step == 3


@pytest.mark.parametrize(
    "fault",
    [
        PeerLostError("died"),
        TransferTimeoutError("late"),
        PeerAbortedError("its state has changed"),
        DigestError("damaged"),
    ],
)
@pytest.mark.parametrize("action", [Action.MEET, Action.ACCEPT, Action.FETCH, Action.CONFIRM])
def test_the_only_holder_that_is_lost_fails_the_call(action: Action, fault: RelayError) -> None:
    recorder = Recorder((4,), {(action, 4): fault})
    with pytest.raises(type(fault)) as caught:
        recorder.run()
    assert caught.value is fault and recorder.done[-1].action is action  # type: ignore[attr-defined]


def test_a_late_holder_does_not_keep_the_others() -> None:
    recorder = Recorder((0, 1), {(Action.MEET, 1): TransferTimeoutError("late")})
    recorder.reads = {0}
    assert recorder.run() == [("MEET", (0, 1)), *plain(0)[1:]]
    assert [*recorder.machine.lost] == [1]


def test_the_reads_of_a_holder_that_dies_move_to_another() -> None:
    recorder = Recorder((0, 1, 2), {(Action.FETCH, 1): PeerLostError("died")}, {1: 2})
    assert recorder.run() == [
        *plain(0, 1, 2)[:4],
        ("PLAN", (0, 2)),
        ("ACCEPT", (2,)),
        ("FETCH", (2,)),
        ("CONFIRM", (0, 2)),
        ("COMMIT", (0, 2)),
    ]


def test_a_holder_that_has_confirmed_is_read_again_and_confirms_again() -> None:
    """Bytes that came after its first `Confirmed` may be of a state that has changed since."""
    changed = PeerAbortedError("its state has changed")
    recorder = Recorder((0, 1), {(Action.CONFIRM, 1): changed}, {1: 0})
    assert recorder.run() == [
        *plain(0, 1)[:5],
        ("PLAN", (0,)),
        ("ACCEPT", (0,)),
        ("FETCH", (0,)),
        ("CONFIRM", (0,)),
        ("COMMIT", (0,)),
    ]


def test_holders_that_are_under_way_are_fetched_before_a_loss_is_planned_for() -> None:
    recorder = Recorder((0, 1), {(Action.ACCEPT, 0): PeerLostError("died")}, {0: 1})
    assert recorder.run() == [
        *plain(0, 1)[:3],
        ("FETCH", (1,)),
        ("PLAN", (1,)),
        *plain(1)[2:],
    ]


def test_a_holder_without_reads_is_asked_once_and_confirms_its_values() -> None:
    recorder = Recorder((0, 1))
    recorder.reads = {0}
    assert recorder.run() == plain(0, 1)


def test_holders_of_different_steps_are_refused_before_anything_is_read() -> None:
    recorder = Recorder((0, 1), steps={0: 3, 1: 4})
    with pytest.raises(StepMismatchError, match="rank 0 has 3, rank 1 has 4"):
        recorder.run()
    assert [action for action, _ in recorder.done] == [Action.MEET]


def test_a_lost_holder_has_no_say_in_the_step() -> None:
    late = TransferTimeoutError("late")
    recorder = Recorder((0, 1), {(Action.MEET, 1): late}, steps={0: 3, 1: 4})
    recorder.reads = {0}
    recorder.run()
    assert recorder.machine.step == 3


def test_several_states_at_once_are_refused_unless_the_step_is_named() -> None:
    with pytest.raises(StepMismatchError, match="say which by step=") as caught:
        Recorder((0, 1), several=(1,)).run()
    assert caught.value.rank == 1
    assert Recorder((0, 1), several=(1,), wanted=3).run() == plain(0, 1)


def test_the_first_loss_is_raised_where_no_holder_is_left() -> None:
    first, second = PeerLostError("first"), TransferTimeoutError("second")
    recorder = Recorder((0, 1), {(Action.FETCH, 0): first, (Action.FETCH, 1): second})
    with pytest.raises(PeerLostError) as caught:
        recorder.run()
    assert caught.value is first


def test_events_out_of_turn_are_faults_of_the_driver() -> None:
    machine = ReceiverMachine((0,))
    for event in (machine.accepted, machine.fetched, machine.confirmed):
        with pytest.raises(ValueError, match="rank 0 is JOINED"):
            event(0)
    machine.offered(0, None)
    with pytest.raises(ValueError, match="cannot be OFFERED"):
        machine.offered(0, None)
    assert machine.among(S.OFFERED) == (0,)


def test_a_second_loss_of_a_holder_says_nothing_new() -> None:
    machine, first = ReceiverMachine((0, 1)), PeerLostError("first")
    machine.lose(0, first)
    machine.lose(0, PeerLostError("second"))
    assert machine.lost == {0: first}


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_every_order_of_losses_ends_committed_or_with_the_first_loss(first: int) -> None:
    """A state is committed only when each holder that is left has confirmed after its last read."""
    for seed in range(first, first + rounds(100)):
        chance = random.Random(seed)
        ranks = tuple(range(chance.randint(1, 5)))
        loses: dict[tuple[Action, int], RelayError] = {
            (chance.choice([*Action]), rank): PeerLostError(f"rank {rank}")
            for rank in ranks
            if chance.random() < 0.5
        }
        recorder = Recorder(ranks, loses)
        recorder.replicas = Replicas(recorder.machine)
        try:
            recorder.run()
        except PeerLostError as fault:
            assert fault is next(iter(recorder.machine.lost.values())), seed
            assert len(recorder.machine.lost) == len(ranks), seed
            continue
        machine = recorder.machine
        assert recorder.done[-1] == (Action.COMMIT, machine.here), seed
        assert machine.among(S.DONE) == machine.here != (), seed
        for rank in machine.here:
            actions = [action for action, some in recorder.done if rank in some]
            last = len(actions) - 1 - actions[::-1].index(Action.FETCH)
            assert Action.CONFIRM in actions[last:], seed


class Replicas(dict[int, int]):
    """Any holder that is left has the boxes of one that was lost."""

    def __init__(self, machine: ReceiverMachine) -> None:
        self.machine = machine

    def __missing__(self, rank: int) -> int:
        return self.machine.here[rank % len(self.machine.here)]
