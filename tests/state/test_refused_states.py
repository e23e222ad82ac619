"""What cannot be taken leaves everything as it was, or is called torn by name."""

from __future__ import annotations

import dataclasses
import enum
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchrelay as tr
from tests.support.ranks import RankPool
from torchrelay.progress import Progress

SECONDS = 120


# Registered types that cannot be made of what came.


def phases(*names: str) -> Any:
    """An enum that this process knows with these members."""
    kind = enum.Enum("Phase", names)  # type: ignore[misc]
    return tr.register(kind, name=f"phase of {len(names)}")


@dataclasses.dataclass
class Even:
    """Made of an even number of things; encoded as a tensor of its own."""

    count: int
    kept: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(2))


def even(state: dict[str, Any]) -> Even:
    if int(state["count"]) % 2:
        raise ValueError("an odd number")
    return Even(int(state["count"]), state["kept"])


tr.register(
    Even,
    name="test.Even",
    encode=lambda value: {"count": torch.tensor(value.count), "kept": value.kept},
    decode=even,
)


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


def code(known: set[str]) -> None:
    """Register colours as a version that knows these."""

    def decode(name: str) -> Colour:
        return {one: Colour[one] for one in known}[name]

    tr.register(Colour, name="test.Colour", encode=lambda one: one.name, decode=decode)


def skewed(rank: int, group: Any, how: str) -> None:
    """The sender knows a member that the receiver does not."""
    code({"RED", "GREEN"} if rank == 0 else {"RED"})
    with tr.Relay(group, timeout=30) as relay:
        if rank == 0:
            state = {"a": torch.ones(3), "at": [{"c": Colour.GREEN}], "z": 9}
            with pytest.raises(tr.errors.PeerRefusedError):
                relay.send(state, to=1)
            relay.send({**state, "at": [{"c": Colour.RED}]}, to=1)
            return
        mine = {"a": torch.zeros(3), "at": [{"c": Colour.RED}], "z": 0}
        into: dict[str, Any] = {} if how == "new" else {"into": mine, "atomic": how == "staged"}
        with pytest.raises(tr.errors.UnsupportedLeafError, match=r"test.Colour.*GREEN") as caught:
            relay.recv(0, **into)
        assert caught.value.path == "['at'][0]['c']"
        assert not mine["a"].any() and mine["z"] == 0  # type: ignore[attr-defined]
        assert relay.recv(0, **into).state["z"] == 9


@pytest.mark.parametrize("how", ["new", "staged", "direct"])
def test_an_enum_with_an_unknown_member_is_refused_before_a_byte_moves(
    pool2: RankPool, how: str
) -> None:
    pool2.run(skewed, how, timeout=SECONDS)


def odd(rank: int, group: Any) -> None:
    """What a type is made of is known when its bytes are here: after that nothing may fail."""
    with tr.Relay(group, timeout=30) as relay:
        if rank == 0:
            for count in (3, 4, 4):
                state = {"a": torch.ones(3), "e": Even(count, torch.ones(2)), "z": count}
                if count == 3:
                    with pytest.raises(tr.errors.PeerRefusedError, match="an odd number"):
                        relay.send(state, to=1)
                else:
                    relay.send(state, to=1)
            return
        kept = torch.zeros(2)
        mine = {"a": torch.zeros(3), "e": Even(0, kept), "z": 0}
        with pytest.raises(tr.errors.UnsupportedLeafError, match="an odd number") as caught:
            relay.recv(0, into=mine)
        assert caught.value.path == "['e']"
        assert not mine["a"].any() and not kept.any() and mine["z"] == 0  # type: ignore[attr-defined]
        for atomic in (True, False):
            mine["e"] = Even(0, kept.zero_())
            relay.recv(0, into=mine, atomic=atomic)
            assert mine["e"].count == mine["z"] == 4  # type: ignore[attr-defined]
            assert mine["e"].kept is kept and kept.all()  # type: ignore[attr-defined]


def test_a_type_that_its_bytes_do_not_make_tears_nothing(pool2: RankPool) -> None:
    pool2.run(odd, timeout=SECONDS)


@pytest.mark.parametrize("atomic", [True, False])
def test_a_checkpoint_with_an_unknown_member_is_refused_by_path(
    tmp_path: Path, atomic: bool
) -> None:
    code({"RED", "GREEN"})
    with tr.Checkpointer(tmp_path) as held:
        held.save(1, {"a": torch.ones(3), "c": Colour.GREEN, "z": 9})
        code({"RED"})
        mine = {"a": torch.zeros(3), "c": Colour.RED, "z": 0}
        for into in (mine, None):
            with pytest.raises(tr.errors.UnsupportedLeafError, match="GREEN") as caught:
                held.load(into=into, atomic=atomic)
            assert caught.value.path == "['c']"
        assert not mine["a"].any() and mine["z"] == 0  # type: ignore[attr-defined]
        code({"RED", "GREEN"})
        held.load(into=mine, atomic=atomic)
        assert mine["c"] is Colour.GREEN and mine["z"] == 9


@pytest.mark.parametrize("atomic", [True, False])
def test_a_type_of_a_checkpoint_that_its_bytes_do_not_make_tears_nothing(
    tmp_path: Path, atomic: bool
) -> None:
    kept = torch.zeros(2)
    mine = {"a": torch.zeros(3), "e": Even(0, kept), "z": 0}
    with tr.Checkpointer(tmp_path) as held:
        held.save(1, {"a": torch.ones(3), "e": Even(3), "z": 3})
        held.save(2, {"a": torch.ones(3), "e": Even(4, torch.ones(2)), "z": 4})
        with pytest.raises(tr.errors.UnsupportedLeafError, match="an odd number"):
            held.load(into=mine, step=1, atomic=atomic)
        assert not mine["a"].any() and not kept.any() and mine["z"] == 0  # type: ignore[attr-defined]
        held.load(into=mine, step=2, atomic=atomic)
    assert mine["e"].count == 4 and mine["e"].kept is kept and kept.all()  # type: ignore[attr-defined]


class Sour:
    """What it is cannot be said."""


tr.register(Sour, name="test.Sour", encode=lambda one: {}[one], decode=lambda one: Sour())


def test_a_type_that_cannot_be_encoded_is_refused_by_path(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path) as held:
        with pytest.raises(tr.errors.UnsupportedLeafError, match="cannot be encoded") as caught:
            held.save(0, {"a": [Sour()]})
        assert caught.value.path == "['a'][0]"
        held.save(1, {"a": [torch.ones(2)]})
        with pytest.raises(
            tr.errors.UnsupportedLeafError, match=r"test.Sour.*cannot be encoded"
        ) as caught:
            held.load(into={"a": [Sour()]})
        assert caught.value.path == "['a'][0]"


# Objects that refuse what they are told.


class Picky:
    """Takes its state, or refuses it."""

    def __init__(self, value: int, refuses: bool = False) -> None:
        self.value = value
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses and state["value"] == 1:
            raise RuntimeError("not that one")
        self.value = state["value"]


class Copier:
    """Copies what it is told into a tensor of its own."""

    def __init__(self, value: float) -> None:
        self.own = torch.full((3,), value)

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own.copy_(state["own"])


class Extra(nn.Linear):
    """A module with more than tensors in its state."""

    def __init__(self, value: int, refuses: bool = False) -> None:
        super().__init__(2, 2)
        nn.init.constant_(self.weight, value)
        self.value = value
        self.refuses = refuses

    def get_extra_state(self) -> Any:
        return {"value": self.value}

    def set_extra_state(self, state: Any) -> None:
        if self.refuses and state["value"] == 1:
            raise RuntimeError("not that one")
        self.value = state["value"]


class Late(nn.Linear):
    """A module that minds what its weights are when they are there."""

    def __init__(self, value: int, refuses: bool = False) -> None:
        super().__init__(2, 2)
        nn.init.constant_(self.weight, value)
        self.refuses = refuses

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        if self.refuses and bool((state["weight"] == 1).all()):
            raise RuntimeError("not those")
        return super().load_state_dict(state, strict, assign)


def job(value: int, last: Any) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (value + 1))
    model(torch.ones(2)).sum().backward()
    for _ in range(value + 1):
        optimizer.step()
    nn.init.constant_(model.weight, value)
    return {
        "model": model,
        "optimizer": optimizer,
        "first": Picky(value),
        "last": last,
        "tensor": torch.full((2,), float(value)),
        "epoch": value,
    }


def told(state: dict[str, Any]) -> tuple[Any, ...]:
    """Values that say of each part whether it is old (0) or new (1)."""
    optimizer = state["optimizer"]
    step = next(iter(optimizer.state.values()))["step"]
    return (
        int(state["model"].weight[0, 0]),
        int(step) - 1,
        round(optimizer.param_groups[0]["lr"] * 10) - 1,
        state["first"].value,
        int(state["tensor"][0]),
        state["epoch"],
    )


OLD, NEW = (0,) * 6, (1,) * 6
KINDS: dict[str, Any] = {"object": Picky, "module": Extra}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", list(KINDS))
def test_an_object_that_refuses_leaves_a_load_as_it_was(
    tmp_path: Path, kind: str, strict: bool
) -> None:
    mine = job(0, KINDS[kind](0, refuses=True))
    parameters = list(mine["model"].parameters())
    with tr.Checkpointer(tmp_path) as held:
        held.save(1, job(1, KINDS[kind](1)))
        with pytest.raises(tr.errors.MismatchError, match="not that one") as caught:
            held.load(into=mine, strict=strict)
        assert caught.value.path == "['last']" and "as it was" in str(caught.value)
        assert told(mine) == OLD and mine["last"].value == 0
        if kind == "module":
            assert not mine["last"].weight.any()
        mine["last"].refuses = False
        held.load(into=mine, strict=strict)
    assert told(mine) == NEW and mine["last"].value == 1
    assert all(a is b for a, b in zip(parameters, mine["model"].parameters(), strict=True))


def refused_by_relay(rank: int, group: Any, kind: str) -> None:
    with tr.Relay(group, timeout=30) as relay:
        if rank == 0:
            state = job(1, KINDS[kind](1))
            with pytest.raises(tr.errors.PeerRefusedError, match="not that one") as refusal:
                relay.send(state, to=1)
            assert (refusal.value.rank, refusal.value.path) == (1, "['last']")
            assert refusal.value.phase == "commit"
            relay.send(state, to=1)
            return
        mine = job(0, KINDS[kind](0, refuses=True))
        with pytest.raises(tr.errors.MismatchError, match="not that one") as caught:
            relay.recv(0, into=mine)
        assert caught.value.path == "['last']"
        assert told(mine) == OLD and mine["last"].value == 0
        mine["last"].refuses = False
        relay.recv(0, into=mine)
        assert told(mine) == NEW and mine["last"].value == 1


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_object_that_refuses_leaves_a_receive_as_it_was(pool2: RankPool, kind: str) -> None:
    pool2.run(refused_by_relay, kind, timeout=SECONDS)


def refused_on_one(rank: int, group: Any, folder: str) -> None:
    with tr.Checkpointer(folder, group=group, timeout=30) as held:
        held.save(1, job(1, Picky(1)))
        mine = job(0, Picky(0, refuses=rank == 1))
        with pytest.raises(tr.errors.MismatchError, match="not that one") as caught:
            held.load(into=mine)
        assert caught.value.rank == 1
        assert told(mine) == OLD and mine["last"].value == 0


def test_an_object_that_refuses_on_one_rank_leaves_all_ranks_as_they_were(
    pool2: RankPool, tmp_path: Path
) -> None:
    pool2.run(refused_on_one, str(tmp_path), timeout=SECONDS)


def torn_on_one(rank: int, group: Any, folder: str) -> None:
    """The other has no tensors, and all of its state is new when it hears of it."""

    def state(value: int, refuses: bool) -> dict[str, Any]:
        if rank == 1:
            return {"late": Late(value, refuses)}
        return {"picky": Picky(value), "epoch": value}

    with tr.Checkpointer(folder, group=group, timeout=30) as held:
        held.save(1, state(1, False))
        mine = state(0, True)
        with pytest.raises(tr.errors.TornStateError, match="the rest is new") as caught:
            held.load(into=mine)
        assert caught.value.rank == 1
        if rank == 0:
            assert mine["picky"].value == mine["epoch"] == 1


def test_a_module_that_is_torn_on_one_rank_leaves_no_other_rank_between(
    pool2: RankPool, tmp_path: Path
) -> None:
    pool2.run(torn_on_one, str(tmp_path), timeout=SECONDS)


def test_an_object_that_cannot_be_put_back_is_named_torn(tmp_path: Path) -> None:
    def state(value: int, refuses: bool) -> dict[str, Any]:
        return {
            "w": torch.full((2,), float(value)),
            "copier": Copier(value),
            "picky": Picky(value, refuses),
        }

    mine = state(0, True)
    with tr.Checkpointer(tmp_path) as held:
        held.save(1, state(1, False))
        with pytest.raises(tr.errors.TornStateError) as caught:
            held.load(into=mine)
    assert "['copier'] may be part new, the rest is old" in str(caught.value)
    assert not mine["w"].any() and mine["picky"].value == 0
    assert mine["copier"].own.all()


@pytest.mark.parametrize("atomic", [True, False])
def test_a_module_that_refuses_its_new_weights_is_named_torn(tmp_path: Path, atomic: bool) -> None:
    """They were written by then, and all the rest with them."""
    mine = job(0, Late(0, refuses=True))
    with tr.Checkpointer(tmp_path) as held:
        held.save(1, job(1, Late(1)))
        with pytest.raises(tr.errors.TornStateError) as caught:
            held.load(into=mine, atomic=atomic)
    assert caught.value.path == "['last']" and "the rest is new" in str(caught.value)
    assert told(mine)[0] == told(mine)[4] == told(mine)[5] == 1


def torn_by_relay(rank: int, group: Any, atomic: bool) -> None:
    with tr.Relay(group, timeout=30) as relay:
        if rank == 0:
            with pytest.raises(tr.errors.RelayError):
                relay.send(job(1, Late(1)), to=1, step=5)
            return
        mine = job(0, Late(0, refuses=True))
        with pytest.raises(tr.errors.TornStateError) as caught:
            relay.recv(0, into=mine, atomic=atomic)
        assert caught.value.path == "['last']" and caught.value.step == 5
        assert "the rest is new" in str(caught.value)


@pytest.mark.parametrize("atomic", [True, False])
def test_a_receive_names_what_is_torn(pool2: RankPool, atomic: bool) -> None:
    pool2.run(torn_by_relay, atomic, timeout=SECONDS)


# What was not touched is not torn.


@pytest.mark.parametrize("step", [5, None])
def test_a_step_that_goes_while_it_is_loaded_does_not_tear_what_was_not_touched(
    tmp_path: Path, step: int | None
) -> None:
    """As beside a trainer that keeps one step: it is removed between its check and its landing."""
    mine = {"w": torch.zeros(1 << 16), "picky": Picky(0)}

    def gone(told: Progress) -> None:
        if told.done >= told.total // 2:
            shutil.rmtree(tmp_path / "step-5", ignore_errors=True)

    with tr.Checkpointer(tmp_path) as held:
        held.save(5, {"w": torch.ones(1 << 16), "picky": Picky(1)})
        try:
            held.load(into=mine, step=step, progress=gone)
        except tr.errors.RelayError as fault:
            assert not isinstance(fault, tr.errors.TornStateError), fault
            assert not mine["w"].any() and mine["picky"].value == 0
        else:
            assert mine["w"].all() and mine["picky"].value == 1
