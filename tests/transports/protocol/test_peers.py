"""The fates of receivers, and the error that they add up to."""

from __future__ import annotations

import pytest

import torchrelay as tr
from torchrelay.errors import PeerLostError, PeerRefusedError, RelayError
from torchrelay.transports.protocol.peers import OVER, UNDER_WAY, Peer, Stage, outcome
from torchrelay.transports.wire.messages import Refuse


def ended(peers: list[Peer]) -> RelayError | None:
    return outcome(peers, sent="5 of 9 bytes sent", step=7, phase="data")


def failed(rank: int, reason: str = "connection lost: closed", *, timed_out: bool = False) -> Peer:
    peer = Peer(rank, Stage.ACTIVE)
    peer.give_up(reason, timed_out=timed_out)
    return peer


def test_every_stage_is_one_of_three_kinds() -> None:
    assert {Stage.EXPECTED, *UNDER_WAY, *OVER} == set(Stage)
    assert len(UNDER_WAY) + len(OVER) + 1 == len(Stage)


@pytest.mark.parametrize("stage", [Stage.EXPECTED, Stage.OFFERED, Stage.ACCEPTED, Stage.ACTIVE])
def test_what_was_not_told_to_commit_cannot_have_it(stage: Stage) -> None:
    peer = Peer(3, stage)
    peer.give_up("lost")
    assert peer.stage is Stage.FAILED


def test_what_was_told_to_commit_may_have_it() -> None:
    peer = Peer(3, Stage.CONFIRMED)
    peer.give_up("not done after 2 s", timed_out=True)
    assert peer.stage is Stage.UNKNOWN
    fault = ended([peer])
    assert isinstance(fault, tr.errors.TransferTimeoutError)
    assert "rank 3 not done after 2 s, and may have the state" in fault.message
    assert "no receiver is known to have the state" in fault.message


def test_one_that_has_it_is_enough() -> None:
    assert ended([failed(1), Peer(2, Stage.DONE), failed(3)]) is None
    assert ended([]) is None


def test_all_are_named_if_none_has_it() -> None:
    fault = ended([failed(4), failed(2, "did not join within 3 s", timed_out=True)])
    assert isinstance(fault, PeerLostError) and fault.rank == 4 and fault.step == 7
    for words in ("rank 4 connection lost", "rank 2 did not join", "5 of 9 bytes sent"):
        assert words in fault.message
    timed_out = ended([failed(2, timed_out=True), failed(4)])
    assert (
        isinstance(timed_out, tr.errors.TransferTimeoutError) and "timed out" in timed_out.message
    )


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("step", tr.errors.StepMismatchError),
        ("route", tr.errors.RouteError),
        ("mismatch", PeerRefusedError),
        ("manifest", PeerRefusedError),
        ("whatever a peer says", PeerRefusedError),
    ],
)
def test_a_refusal_is_told_whoever_else_has_the_state(kind: str, error: type[RelayError]) -> None:
    peer = Peer(2, Stage.OFFERED)
    peer.refuse(Refuse(kind, "not this one", "a.b"))
    fault = ended([Peer(1, Stage.DONE), peer, failed(3)])
    assert type(fault) is error and fault.rank == 2
    assert (fault.path, fault.phase, fault.step) == ("a.b", "join", 7)
    assert "rank 2 refused the state: not this one" in fault.message
