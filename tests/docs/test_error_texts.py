"""Errors of the usual mistakes say what to do instead."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torchrelay as tr
from tests.support.ranks import RankPool
from torchrelay.dropin import PGTransport

SECONDS = 120


@tr.register
@dataclasses.dataclass
class Trainer:
    model: Any


class Half:
    """Gives its state, and takes none."""

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"t": Trainer(nn.Linear(2, 2))}, "['t']['Trainer']['model']"),
        ({"h": [Half()]}, "['h'][0]"),
    ],
)
def test_an_object_where_none_is_taken(tmp_path: Path, state: Any, path: str) -> None:
    with tr.Checkpointer(tmp_path) as held:
        with pytest.raises(
            tr.errors.UnsupportedLeafError, match=r"put its state_dict\(\)"
        ) as caught:
            held.save(0, state)
        assert caught.value.path == path


def test_a_class_in_place_of_a_module(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path) as held:
        with pytest.raises(tr.errors.UnsupportedLeafError, match="it is a class"):
            held.save(0, {"model": nn.Linear})


def trained(steps: int) -> torch.optim.Optimizer:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    return optimizer


def test_the_state_dict_of_a_new_optimizer_as_a_destination(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path) as held:
        for steps in (0, 1):
            held.save(steps, {"o": trained(steps).state_dict()})
            into = {"o": trained(1 - steps).state_dict()}
            with pytest.raises(
                tr.errors.MismatchError, match="pass the optimizer itself"
            ) as caught:
                held.load(into=into, step=steps)
            assert "['o'] is the state dict of an optimizer" in str(caught.value)
            held.load(into={"o": trained(1 - steps)}, step=steps)
        with pytest.raises(tr.errors.MismatchError) as caught:  # for another reason
            held.load(into={"o": trained(0), "more": 1})
        assert "optimizer" not in str(caught.value)


class Wrapped(nn.Module):
    """A model as DistributedDataParallel and torch.compile wrap it: under a name of theirs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize("name", ["module", "_orig_mod"])
def test_the_state_dicts_of_a_wrapped_model_and_of_one_that_is_not(
    tmp_path: Path, name: str
) -> None:
    with tr.Checkpointer(tmp_path) as held:
        plain, wrapped = nn.Sequential(nn.Linear(2, 2)), Wrapped(name)
        for step, (offered, mine) in enumerate([(plain, wrapped), (wrapped, plain)]):
            held.save(step, {"model": offered.state_dict()})
            with pytest.raises(tr.errors.MismatchError, match="pass the module itself") as caught:
                held.load(into={"model": mine.state_dict()}, step=step)
            assert f"the keys of ['model'] differ by '{name}'" in str(caught.value)
            held.load(into={"model": mine}, step=step)
        with pytest.raises(tr.errors.MismatchError) as caught:  # for another reason
            held.load(into={"model": nn.Linear(2, 2).state_dict()})
        assert "wrapper" not in str(caught.value)


def test_destinations_without_memory_or_of_another_size(tmp_path: Path) -> None:
    lazy = nn.LazyLinear(2)
    sparse = torch.eye(3).to_sparse()
    with tr.Checkpointer(tmp_path) as held:
        held.save(1, {"m": nn.Linear(2, 2), "s": torch.ones(3, 3).to_sparse()})
        for mine, text in [
            ({"m": nn.Linear(2, 2, device="meta")}, r"module\.to_empty\(device="),
            ({"m": lazy}, "run the module once"),
            ({"s": sparse}, "number of specified elements differs: offered 9, the destination has"),
        ]:
            with pytest.raises(tr.errors.MismatchError, match=text):
                held.load(into=mine, include="s" if "s" in mine else "m.*")
        with pytest.raises(tr.errors.UnsupportedLeafError, match="run the module once") as caught:
            held.save(2, {"m": lazy})
        assert caught.value.path == "['m']['weight']"


def told(rank: int, group: Any) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0).reshape(4, 2)
    shard = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    copies = distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None)
    texts = []
    with tr.Relay(group, timeout=30) as relay:
        cases = [
            ({"w": shard}, {"w": whole}),
            ({"w": whole}, {"w": shard}),
            ({"w": shard}, {"w": copies}),
            ({"w": shard}, {"w": shard}),
            ({"o": trained(1).state_dict()}, {"o": trained(0).state_dict()}),
        ]
        for offered, mine in cases:
            if rank == 0:
                with pytest.raises(tr.errors.PeerRefusedError) as refused:
                    relay.send(offered, to=1)
                texts.append(str(refused.value))
            else:
                with pytest.raises(tr.errors.MismatchError) as caught:
                    relay.recv(0, into=mine)
                texts.append(str(caught.value))
    return texts


def test_a_sharded_sender_and_a_whole_destination_and_the_like(pool2: RankPool) -> None:
    expected = [
        "name all of the sender's ranks as sources, which puts the parts together",
        "send from a model that is sharded the same way",
        "which reshards it",
        "receive from the rank with the same coordinate",
        "pass the optimizer itself",
    ]
    for texts in pool2.run(told, timeout=SECONDS):
        for text, words in zip(texts, expected, strict=True):
            assert words in text, text


BAD_CALLS: dict[str, tuple[Any, str]] = {
    "no place": (lambda held: tr.Checkpointer(None, no_dist=True), "a directory or a bucket"),  # type: ignore[arg-type]
    "no group": (lambda held: tr.Checkpointer(held.url, group="x"), "group is a process group"),
    "a mesh": (
        lambda held: tr.pull(
            "http://127.0.0.1:9", group=type("Mesh", (), {"get_group": lambda self: None})()
        ),
        r"not Mesh: its get_group\(\) is one",
    ),
    "not in the group": (lambda held: tr.Relay(-100), "this rank is not in the group"),
    "no keeper": (
        lambda held: tr.Checkpointer(held.url, no_dist=True, keeper=object()),  # type: ignore[arg-type]
        "keeper is a Keeper",
    ),
    "no signal": (
        lambda held: tr.Checkpointer(
            held.url,
            no_dist=True,
            options=tr.options.CheckpointerOptions(signals=(signal.SIGKILL,)),
        ).reached_preemption(1),
        "SIGKILL.* is not a signal to handle",
    ),
    "include": (lambda held: held.load(include=5), "include is a pattern, or several"),
    "include a tensor": (lambda held: held.load(include=torch.tensor(5)), "include is a pattern"),
    "device": (lambda held: held.load(device="nowhere"), "device is one of torch's"),
    "delete": (lambda held: held.delete("1"), "step is an int"),
    "verify": (lambda held: held.verify("1"), "step is an int"),
    "holds": (lambda held: held.holds("1"), "step is an int"),
    "one source": (lambda held: tr.recover(sources=held.url), r"sources is a list of them"),
    "no source": (lambda held: tr.recover(sources=None), r"sources is a list of them"),  # type: ignore[arg-type]
    "age": (
        lambda held: tr.recover(
            sources=[held.url], options=tr.options.RecoverOptions(max_age_seconds=-1)
        ),
        "max_age_seconds is a positive",
    ),
    "no URL": (lambda held: tr.pull(5), "a source is a URL"),  # type: ignore[arg-type]
    "token": (lambda held: tr.Access(token=5), "token= must be a string"),  # type: ignore[arg-type]
    "address": (
        lambda held: tr.serve({}, step=1, no_dist=True, address=5),  # type: ignore[arg-type]
        "address is HOST:PORT",
    ),
    "certificate": (
        lambda held: tr.Access(certfile=__file__),
        "test_error_texts.*holds no certificate with its key",
    ),
}


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tr.Checkpointer]:
    with tr.Checkpointer(tmp_path_factory.mktemp("run"), no_dist=True) as held:
        held.save(1, {"w": torch.ones(2)})
        yield held


@pytest.mark.parametrize("call", BAD_CALLS)
def test_an_argument_that_cannot_be(one_step: tr.Checkpointer, call: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    act, said = BAD_CALLS[call]
    with pytest.raises(tr.errors.UsageError, match=said):
        act(one_step)
    assert one_step.steps() == [1] and signal.getsignal(signal.SIGTERM) == before


def test_a_key_that_is_not_there(one_step: tr.Checkpointer) -> None:
    with pytest.raises(tr.errors.MismatchError, match="no key 'modl'; its keys: w"):
        one_step.load(key="modl")


def test_a_step_that_is_not_there(one_step: tr.Checkpointer) -> None:
    for act in (one_step.verify, one_step.record, one_step.delete):
        with pytest.raises(tr.errors.StepNotFoundError, match="no step 9 in"):
            act(9)


def bad_relays(rank: int, group: Any) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"join_window": "x"}, "join_window is a number of seconds"),
        ({"chunk_bytes": "1"}, "chunk_bytes is a positive number"),
        ({"pool": 1.5}, "pool is a number of bytes"),
        ({"connections": "2"}, "connections is a number from 1 to"),
        ({"timeout": None}, "timeout is a number of seconds"),
    ]
    for arguments, said in bad:
        with pytest.raises(tr.errors.UsageError, match=said):
            tr.Relay(group, **arguments)
    with tr.Relay(group, timeout=30) as relay:
        for peer in (None, 1.0, "1", [None], object()):
            with pytest.raises(tr.errors.UsageError, match="a rank, or several in a list"):
                relay.send({}, to=peer)  # type: ignore[arg-type]
    with pytest.raises(tr.errors.UsageError, match="timeout is a number"):
        PGTransport(group, None, torch.device("cpu"))  # type: ignore[arg-type]
    PGTransport(group, 5.0, torch.device("cpu"))  # type: ignore[arg-type]


def test_a_relay_that_cannot_be(pool2: RankPool) -> None:
    pool2.run(bad_relays, timeout=SECONDS)


def a_part_alone(rank: int, group: Any, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)], src_data_rank=None)}
    with tr.Relay(group, timeout=30) as relay:
        for act in (
            lambda: tr.Checkpointer(f"{folder}/{rank}", no_dist=True).save(1, state),
            lambda: tr.serve(state, step=1, no_dist=True),
            lambda: relay.share(state, step=1),
        ):
            with pytest.raises(
                tr.errors.UnsupportedLeafError, match="has 4 of the 8 elements"
            ) as caught:
                act()
            assert caught.value.path == "w"


def test_a_process_on_its_own_keeps_no_part_of_a_tensor(pool2: RankPool, tmp_path: Path) -> None:
    """Nobody could read the step."""
    pool2.run(a_part_alone, str(tmp_path), timeout=SECONDS)
