"""The sender's state machine, driven without sockets: each row of its table, and any schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.recorder import AT, Driver, Recorder, at_port, machine
from tests.support.rounds import rounds
from torchrelay.errors import StateError
from torchrelay.transports.protocol.peers import OVER, UNDER_WAY, Stage
from torchrelay.transports.protocol.sender_machine import SenderMachine
from torchrelay.transports.routes.route import Link
from torchrelay.transports.wire.messages import (
    Abort,
    Accept,
    Confirmed,
    Digests,
    Done,
    Fetched,
    Go,
    Join,
    Message,
    Need,
    NodeAddress,
    Offer,
    Ping,
    Pong,
    ProcessLocation,
    Refuse,
    RouteNote,
    Want,
)

READS = b"some"
TCP, MEMORY, PARTS = Accept("tcp"), Accept("memory"), Accept("memory", reads=READS)


def at(
    stage: Stage, *, others: int = 0, address: NodeAddress | None = AT, **terms: Any
) -> tuple[SenderMachine, Recorder]:
    """A machine whose receiver 1 is at a stage; the others are expected."""
    made, recorder = machine(list(range(1, others + 2)), **terms)
    if stage is Stage.EXPECTED:
        return made, recorder
    made.joined(1, Join(address=address), False, 0.0)
    if stage is Stage.ACCEPTED:
        assert others
        made.received(1, TCP, 0.1)
    elif stage in (Stage.ACTIVE, Stage.CONFIRMED, Stage.DONE):
        made.received(1, PARTS, 0.1)
        if stage is not Stage.ACTIVE:
            made.received(1, Fetched(), 0.2)
        if stage is Stage.DONE:
            made.received(1, Done(), 0.3)
    assert made.peers[1].stage is stage
    recorder.effects.clear()
    return made, recorder


def ended(stage: Stage) -> list[str]:
    """What is done about a receiver that is given up. One that was told to commit hears no more:
    its connection may belong to its next transfer by now."""
    return ["drop"] if stage is Stage.CONFIRMED else ["Abort", "drop"]


# Each row


def test_a_receiver_that_joins_is_made_an_offer() -> None:
    made, recorder = at(Stage.EXPECTED)
    join = Join(location=ProcessLocation("a"))
    assert made.joined(1, join, True, 3.0)
    assert recorder.effects == [(1, "offer", (join, True))]
    assert made.peers[1].stage is Stage.OFFERED and made.peers[1].joined_at == 3.0


def test_a_receiver_that_joins_twice_or_too_late_is_not_served() -> None:
    made, recorder = at(Stage.OFFERED)
    assert not made.joined(1, Join(address=AT), False, 1.0)
    made, recorder = at(Stage.EXPECTED)
    made.end_join(60.0)
    assert not made.joined(1, Join(address=AT), False, 61.0) and recorder.effects == []


def test_a_receiver_that_wants_another_step_is_refused() -> None:
    made, recorder = at(Stage.EXPECTED, step=5)
    assert made.joined(1, Join(9), False, 3.0)
    peer = made.peers[1]
    assert peer.stage is Stage.REFUSED and peer.refusal is not None
    assert peer.refusal.kind == "step" and peer.refused_in == "join"
    said = Abort("step 5 is offered, step 9 was asked for", kind="step")
    assert recorder.effects == [(1, "send", said), (1, "drop", None)]
    made, _ = at(Stage.ACTIVE)
    assert not made.joined(1, Join(9), False, 3.0)  # a second call of that rank
    assert made.peers[1].stage is Stage.ACTIVE


def test_a_receiver_that_asks_for_the_step_is_made_an_offer() -> None:
    made, recorder = at(Stage.EXPECTED, step=5)
    made.joined(1, Join(5), False, 3.0)
    assert recorder.names(1) == ["offer"] and made.peers[1].stage is Stage.OFFERED


def test_a_receiver_that_does_not_come_has_failed() -> None:
    made, recorder = at(Stage.EXPECTED)
    assert made.join_ends() == 60.0
    made.end_join(60.0)
    peer = made.peers[1]
    assert (
        peer.stage is Stage.FAILED and peer.timed_out and "did not join within 60 s" in peer.reason
    )
    assert recorder.effects == [] and made.over


@pytest.mark.parametrize("others", [0, 2])
def test_a_receiver_that_reads_begins_at_once(others: int) -> None:
    made, recorder = at(Stage.OFFERED, others=others)
    made.received(1, MEMORY, 1.0)
    assert recorder.effects == [(1, "go", Link(1, None, None, 0))]
    assert made.peers[1].stage is Stage.ACTIVE


def test_a_receiver_of_parts_waits_for_no_chain() -> None:
    made, recorder = at(Stage.OFFERED, others=2)
    made.received(1, Accept("tcp", reads=READS), 1.0)
    assert recorder.names(1) == ["go"] and made.peers[1].stage is Stage.ACTIVE


def test_the_only_receiver_waits_for_no_chain() -> None:
    made, recorder = at(Stage.OFFERED)
    made.received(1, TCP, 1.0)
    assert recorder.names(1) == ["go"]


def test_a_receiver_that_no_other_can_reach_is_fed_alone() -> None:
    made, recorder = at(Stage.OFFERED, others=2, address=None)
    made.received(1, TCP, 1.0)
    assert recorder.names(1) == ["go"]


def test_receivers_of_a_chain_begin_when_all_are_here() -> None:
    made, recorder = machine([1, 2, 3])
    for rank in (1, 2, 3):
        made.joined(
            rank, Join(location=ProcessLocation("aba"[rank - 1]), address=at_port(rank)), False, 0.0
        )
    for rank in (1, 2, 3):
        assert made.join_ends() > 0.0 and recorder.effects[-1].name == "offer"
        made.received(rank, TCP, 0.0)
        assert made.peers[rank].stage is Stage.ACCEPTED
    assert made.join_ends() == float("-inf")
    made.end_join(0.5)
    # The two that share a machine are next to each other.
    links = [
        Link(1, None, 3, 0),
        Link(3, 1, 2, 1, at_port(1)),
        Link(2, 3, None, 2, at_port(3)),
    ]
    assert recorder.effects[-3:] == [(link.rank, "go", link) for link in links]
    assert not made.joining and len(made.among(Stage.ACTIVE)) == 3


def test_receivers_of_a_chain_begin_when_the_window_ends() -> None:
    made, recorder = at(Stage.ACCEPTED, others=1)
    assert made.join_ends() == 10.0
    made.end_join(10.0)
    assert recorder.effects == [(1, "go", Link(1, None, None, 0))]
    assert made.peers[2].stage is Stage.FAILED


def test_one_that_comes_after_the_join_is_over_is_fed_alone() -> None:
    made, recorder = machine([1, 2])
    for rank in (1, 2):
        made.joined(rank, Join(address=AT), False, 0.0)
    made.joining = False
    made.received(2, TCP, 1.0)
    assert recorder.effects[-1] == (2, "go", Link(2, None, None, 0))


@pytest.mark.parametrize("stage", [Stage.OFFERED, Stage.ACCEPTED, Stage.ACTIVE])
def test_a_receiver_that_gives_up_has_failed(stage: Stage) -> None:
    made, recorder = at(stage, others=1)
    made.received(1, Abort("no memory", timed_out=True), 4.0)
    peer = made.peers[1]
    assert recorder.names(1) == ["drop"]
    assert peer.stage is Stage.FAILED and peer.timed_out and peer.reason == "gave up: no memory"


def test_a_receiver_that_does_not_answer_the_offer_is_aborted() -> None:
    made, recorder = at(Stage.OFFERED, others=1)
    made.end_join(10.0)
    assert recorder.names(1) == ["Abort", "drop"] and recorder.effects[0].what.timed_out
    assert made.peers[1].stage is Stage.FAILED and made.peers[1].timed_out


def test_a_receiver_that_needs_chunks_is_fed() -> None:
    made, recorder = at(Stage.ACTIVE)
    need = Need((3, 1), True)
    made.received(1, need, 1.0)
    assert recorder.effects == [(1, "feed", need)] and not made.peers[1].rerouted


def test_a_receiver_that_lost_its_upstream_is_named_once() -> None:
    made, recorder = machine([1, 2])
    for rank in (1, 2):
        made.joined(rank, Join(address=AT), False, 0.0)
        made.received(rank, TCP, 0.0)
    made.end_join(0.0)
    for rank in (1, 2, 2):
        made.received(rank, Need((0,)), 1.0)
    assert [peer.rank for peer in made.peers.values() if peer.rerouted] == [2]
    assert recorder.names(2).count("feed") == 2


def test_digests_and_notes_go_where_they_belong() -> None:
    made, recorder = at(Stage.ACTIVE)
    want, note = Want(((0, 3),)), RouteNote(b"ring")
    made.received(1, want, 1.0)
    made.received(1, note, 1.0)
    assert recorder.effects == [(1, "tell_digests", want), (1, "note", note)]
    assert made.peers[1].stage is Stage.ACTIVE


@pytest.mark.parametrize("stage", [Stage.ACTIVE, Stage.CONFIRMED])
def test_a_receiver_of_parts_may_take_more(stage: Stage) -> None:
    made, recorder = at(stage)
    made.received(1, PARTS, 1.0)
    assert recorder.names(1) == ["go"] and made.peers[1].stage is Stage.ACTIVE
    made.received(1, Fetched(), 2.0)
    assert recorder.names(1) == ["go", "confirm"]


def test_a_receiver_that_has_all_is_told_to_commit() -> None:
    made, recorder = at(Stage.ACTIVE)
    made.received(1, Fetched(), 1.0)
    assert recorder.effects == [(1, "confirm", None)]
    assert made.peers[1].stage is Stage.CONFIRMED


def test_a_receiver_of_parts_that_could_have_got_two_states_commits_none() -> None:
    """Another state was sent to it meanwhile, and it did not say which step it wants."""
    for join, refused in (
        (Join(parts=True, address=AT), True),
        (Join(step=5, parts=True, address=AT), False),
        (Join(address=AT), False),
    ):
        made, recorder = machine([1], step=5)
        made.joined(1, join, False, 0.0)
        made.received(1, PARTS, 0.1)
        recorder.another = True
        made.received(1, Fetched(), 0.2)
        assert (made.peers[1].stage is Stage.REFUSED) == refused
        assert recorder.names(1)[-2:] == (["Abort", "drop"] if refused else ["go", "confirm"])


def test_nobody_commits_a_state_that_has_changed() -> None:
    made, recorder = at(Stage.ACTIVE, others=1)
    made.joined(2, Join(address=AT), False, 0.0)
    recorder.changed = True
    with pytest.raises(StateError):
        made.received(1, Fetched(), 1.0)
    made.abort("the sender gave up")
    assert recorder.names(1) == ["Abort", "drop"]
    assert recorder.names(2) == ["offer", "Abort", "drop"]
    assert {peer.stage for peer in made.peers.values()} == {Stage.FAILED}


def test_a_receiver_that_has_committed_is_done() -> None:
    made, recorder = at(Stage.CONFIRMED)
    made.end_join(0.5)
    assert not made.over
    made.received(1, Done(), 1.0)
    assert made.peers[1].stage is Stage.DONE and made.over and recorder.effects == []


@pytest.mark.parametrize("how", ["lost", "abort", "silent", "time", "out of turn", "gave up"])
def test_a_confirmed_receiver_that_is_lost_is_unknown(how: str) -> None:
    made, _ = at(Stage.CONFIRMED, others=1)
    made.joining = False
    act: dict[str, Callable[[], None]] = {
        "lost": lambda: made.lost(1, "closed"),
        "abort": lambda: made.received(1, Abort("no"), 1.0),
        "silent": lambda: made.tick(99.0, {1: 10.1}, {}),
        "time": made.time_is_up,
        "out of turn": lambda: made.received(1, Fetched(), 1.0),
        "gave up": lambda: made.abort("Ctrl-C"),
    }
    act[how]()
    assert made.peers[1].stage is Stage.UNKNOWN


@pytest.mark.parametrize("stage", UNDER_WAY)
def test_a_refusal_counts_at_any_stage(stage: Stage) -> None:
    made, recorder = at(stage, others=1)
    refusal = Refuse("mismatch", "dtype differs", "a.b")
    made.received(1, refusal, 1.0)
    peer = made.peers[1]
    assert peer.stage is Stage.REFUSED and peer.refusal == refusal
    assert recorder.names(1) == ["drop"]
    wanted = "commit" if stage in (Stage.ACTIVE, Stage.CONFIRMED) else "join"
    assert peer.refused_in == wanted


@pytest.mark.parametrize("stage", [Stage.OFFERED, Stage.ACCEPTED, Stage.ACTIVE])
def test_a_receiver_that_is_lost_has_failed(stage: Stage) -> None:
    made, recorder = at(stage, others=1)
    made.lost(1, "closed by the other side")
    assert made.peers[1].stage is Stage.FAILED and not made.peers[1].timed_out
    assert recorder.names(1) == ["drop"]
    made.lost(1, "again")
    assert made.peers[1].reason == "connection lost: closed by the other side"


TURNS: dict[Stage, set[type]] = {
    Stage.OFFERED: {Accept, Refuse, Abort},
    Stage.ACCEPTED: {Refuse, Abort},
    Stage.ACTIVE: {Accept, Refuse, Abort, Need, Want, RouteNote, Fetched},
    Stage.CONFIRMED: {Accept, Refuse, Abort, Done},
}
SAID: list[Message] = [
    *(
        PARTS,
        Refuse("step", ""),
        Abort(""),
        Need((0,)),
        Want(()),
        RouteNote(b""),
        Fetched(),
        Done(),
    ),
    *(Join(), Offer(b"", bytes(16)), Go(), Digests((), b""), Confirmed(), Pong()),
]


@pytest.mark.parametrize("stage", UNDER_WAY)
@pytest.mark.parametrize("message", SAID, ids=lambda one: type(one).__name__)
def test_what_is_said_out_of_turn_ends_its_receiver(stage: Stage, message: Message) -> None:
    made, recorder = at(stage, others=1)
    made.received(1, message, 1.0)
    out_of_turn = "out of turn" in made.peers[1].reason
    assert out_of_turn == (type(message) not in TURNS[stage])
    if out_of_turn:
        assert recorder.names(1) == ended(stage) and made.peers[1].stage in OVER


@pytest.mark.parametrize("stage", [Stage.ACTIVE, Stage.CONFIRMED])
def test_the_whole_state_is_accepted_once(stage: Stage) -> None:
    made, _ = at(stage)
    made.received(1, MEMORY, 1.0)
    assert "sent Accept out of turn" in made.peers[1].reason


@pytest.mark.parametrize("message", SAID, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("stage", [*OVER, Stage.EXPECTED])
def test_a_receiver_that_is_not_served_says_nothing_here(stage: Stage, message: Message) -> None:
    made, recorder = at(Stage.EXPECTED)
    made.peers[1].stage = stage
    made.received(1, message, 1.0)
    made.lost(1, "closed")
    assert made.peers[1].stage is stage and recorder.effects == []


def test_a_route_that_was_not_offered() -> None:
    made, recorder = at(Stage.OFFERED)
    made.received(1, Accept("teleport"), 1.0)
    assert "not known here" in made.peers[1].reason
    assert recorder.names(1) == ["Abort", "drop"]


def test_a_route_that_was_not_asked_for_is_a_refusal() -> None:
    made, recorder = at(Stage.OFFERED, route="memory")
    made.received(1, TCP, 1.0)
    peer = made.peers[1]
    assert peer.refusal is not None and peer.refusal.kind == "route"
    assert recorder.names(1) == ["Abort", "drop"]


@pytest.mark.parametrize("name", ["offer", "go", "feed", "tell_digests", "note"])
def test_what_cannot_be_done_ends_its_receiver(name: str) -> None:
    made, recorder = machine([1, 2])
    recorder.answers[name, 1] = "no memory"
    made.joined(1, Join(address=AT), False, 0.0)
    made.joined(2, Join(address=AT), False, 0.0)
    for message in (MEMORY, Need((0,)), Want(()), RouteNote(b"")):
        made.received(1, message, 1.0)
    assert recorder.names(1)[-2:] == ["Abort", "drop"] and "no memory" in made.peers[1].reason
    assert made.peers[1].stage is Stage.FAILED
    assert made.peers[2].stage is Stage.OFFERED and recorder.names(2) == ["offer"]


# Time


def test_a_receiver_that_is_alone_has_the_whole_time() -> None:
    made, recorder = at(Stage.ACTIVE)
    assert made.patience == 0.0
    made.tick(59.0, {1: 59.0}, {1: 59.0})
    assert recorder.effects == [] and made.peers[1].stage is Stage.ACTIVE


@pytest.mark.parametrize(("silent", "stuck", "word"), [(10.1, 0, "message"), (0, 10.1, "data")])
def test_one_of_several_that_makes_no_progress_has_failed(
    silent: float, stuck: float, word: str
) -> None:
    made, recorder = at(Stage.ACTIVE, others=1)
    made.joined(2, Join(address=AT), False, 0.0)
    made.tick(11.0, {1: silent}, {1: stuck})
    assert f"took no {word} for 10 s" in made.peers[1].reason
    assert recorder.names(1) == ["Abort", "drop"] and made.peers[2].stage is Stage.OFFERED


@pytest.mark.parametrize("stage", [Stage.ACCEPTED, Stage.ACTIVE, Stage.CONFIRMED])
def test_receivers_are_asked_whether_they_are_there(stage: Stage) -> None:
    """Also those that wait for the others: they say nothing of themselves meanwhile."""
    made, recorder = at(stage, others=1)
    for now in (1.0, 2.6, 2.7, 5.2):
        made.tick(now, {1: 0.1}, {})
    assert recorder.names(1) == ["Ping", "Ping"]


def test_one_that_waits_for_the_others_and_is_gone_does_not_begin() -> None:
    made, recorder = at(Stage.ACCEPTED, others=2)
    made.joined(2, Join(address=AT), False, 0.0)
    made.received(2, TCP, 0.0)
    made.tick(10.2, {1: 10.1, 2: 0.1}, {})
    assert made.peers[1].stage is Stage.FAILED
    made.end_join(10.2)
    assert recorder.effects[-1] == (2, "go", Link(2, None, None, 0))


def test_patience_is_no_more_than_a_quarter_of_the_time() -> None:
    made, _ = machine([1, 2], window=10.0, seconds=8.0)
    assert made.patience == 2.0 and made.tick_seconds <= 0.5


@pytest.mark.parametrize("stage", UNDER_WAY)
def test_all_ends_with_the_deadline(stage: Stage) -> None:
    made, recorder = at(stage, others=1)
    made.joining = False
    made.peers[2].give_up("absent")
    made.time_is_up()
    assert made.over and made.peers[1].timed_out and recorder.names(1) == ended(stage)


def test_a_window_for_the_others_and_as_long_for_each_answer() -> None:
    made, _ = machine([1, 2, 3], window=5.0, join_timeout=30.0, seconds=60.0)
    assert made.join_ends() == 30.0  # for the first to come
    made.joined(1, Join(address=AT), False, 8.0)
    assert made.join_ends() == 60.0  # nobody waits for nobody: it is alone
    made.received(1, TCP, 9.0)
    assert made.join_ends() == 13.0
    made.joined(2, Join(address=AT), False, 12.0)
    assert made.join_ends() == 17.0
    made.received(2, TCP, 12.5)
    assert made.join_ends() == 13.0


def test_each_receiver_that_says_nothing_costs_the_others_a_window_at_most() -> None:
    made, _ = machine([1, 2, 3, 4], window=1.0, seconds=60.0)
    made.joined(1, Join(address=AT), False, 0.0)
    made.received(1, TCP, 0.0)
    for rank, now in ((2, 0.9), (3, 1.8), (4, 2.7)):
        assert made.join_ends() <= rank - 1
        made.joined(rank, Join(address=AT), False, now)
    assert made.join_ends() == 3.7


def test_waiting_leaves_half_of_the_time_for_serving() -> None:
    made, _ = machine([1, 2], window=50.0, seconds=10.0, join_timeout=10.0)
    made.joined(1, Join(address=AT), False, 2.0)
    made.received(1, TCP, 2.0)
    assert made.join_ends() == 6.0


# Any schedule


SCHEDULES, BATCH = 20_000, 2_000


def play(seed: int) -> Driver:
    driver = Driver(seed)
    driver.run()
    where = f"seed {seed}"
    for rank, peer in driver.machine.peers.items():
        assert peer.stage in OVER, f"{where}: rank {rank} is {peer.stage}"
        reads = peer.accept is not None and peer.accept.reads is not None
        assert driver.confirmed[rank] <= 1 or reads, f"{where}: rank {rank} is confirmed twice"
        if peer.stage in (Stage.DONE, Stage.UNKNOWN):
            assert driver.confirmed[rank] >= 1, f"{where}: rank {rank} was not confirmed"
    if driver.aborted:
        return driver
    assert driver.now <= driver.seconds + 1.0, f"{where}: {driver.now} s"
    # Whatever the others do, the first to come wait a window for them to come, and one for the
    # answer of each that says nothing. What it says itself takes a few steps.
    for rank in driver.healthy & set(driver.came):
        peer = driver.machine.peers[rank]
        if driver.seconds >= 4 * driver.window:
            assert peer.stage is Stage.DONE, f"{where}: rank {rank} is {peer.stage}: {peer.reason}"
            took = driver.over_at[rank] - min(driver.came.values())
            bound = (1 + len(set(driver.ranks) - driver.healthy)) * driver.window + 3.0
            assert took < bound, f"{where}: rank {rank} took {took} s"
    return driver


@pytest.mark.parametrize("first", range(0, SCHEDULES, BATCH))
def test_random_schedules(first: int) -> None:
    """Every receiver ends in a final stage, nothing is done for it after that, none is confirmed
    twice, and one that fails does not delay the others beyond the windows."""
    seeds = range(first, first + rounds(BATCH, 3))
    print(f"seeds {seeds[0]} to {seeds[-1]}")
    stages = {peer.stage for seed in seeds for peer in played(seed)}
    assert stages == set(OVER)


def played(seed: int) -> list[Any]:
    return list(play(seed).machine.peers.values())


def nothing(*args: Any, **how: Any) -> None:
    pass


def waits_for_all(self: SenderMachine) -> float:
    expected = self.among(Stage.EXPECTED, Stage.OFFERED)
    return self.begun + self.seconds if expected else float("-inf")


def asks_some(self: SenderMachine, now: float, silent: Any, stuck: Any) -> None:
    for peer in self.among(Stage.ACTIVE):
        if self.patience and silent.get(peer.rank, 0.0) > self.patience:
            self.fail(peer, "took no message")
        else:
            self.effects.send(peer, Ping())


def forgets(self: SenderMachine, peer: Any, reason: str, **how: Any) -> None:
    self.effects.drop(peer)


def eager(self: SenderMachine, peer: Any, message: Message) -> None:
    self.effects.confirm(peer)


def confirms_early(self: SenderMachine, peer: Any, link: Any = None) -> None:
    self.effects.confirm(peer)
    peer.stage = Stage.CONFIRMED


MUTANTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "the lost are waited for": ("lost", nothing),
    "all are waited for": ("join_ends", waits_for_all),
    "who waits for the others is not asked whether it is there": ("tick", asks_some),
    "who fails is served on": ("fail", forgets),
    "who waits does not begin": ("_go", nothing),
    "the deadline does not count": ("time_is_up", nothing),
    "what is out of turn is confirmed": ("_out_of_turn", eager),
    "a state is committed before it came": ("_go", confirms_early),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_machine_that_does_not_do_its_part_is_found_out(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """So that the schedules above are known to reach what they are for."""
    method, instead = MUTANTS[name]
    monkeypatch.setattr(SenderMachine, method, instead)
    limited = Driver._step
    steps = [0]

    def step(self: Driver) -> None:
        steps[0] += 1
        assert steps[0] < 100_000, "somebody hangs"
        assert self.now < self.seconds + 10, "the deadline has passed"
        limited(self)

    monkeypatch.setattr(Driver, "_step", step)
    with pytest.raises(AssertionError):
        for seed in range(300):
            play(seed)
