"""What torch's `PGTransport` does wrong, line by line, and what happens here instead.

Each test first shows the fault on torch's own class, so that it would tell if torch mended it.
Faults of dying and stopped processes are in test_relay_faults.py as well, at every phase.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._pg_transport import PGTransport as Stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torchrelay as tr
from tests.support.ways import by, every_way, refused_soon
from torchrelay.dropin import PGTransport

CPU = torch.device("cpu")
SHORT = timedelta(seconds=4)


def stock(group: Any, into: object = None, seconds: float = 20) -> Stock:
    callback = None if into is None else lambda: into
    return Stock(group, timedelta(seconds=seconds), CPU, callback)


def passed(rank: int, group: Any, state: object, into: object = None) -> tuple[Any, Any]:
    """What torch's class and what Relay make of a state; errors are part of the answer.

    `into` is used for torch; a copy made beforehand for Relay.
    """
    spare = pickle.loads(pickle.dumps(into)) if into is not None else None
    theirs = ours = None
    if rank == 0:
        stock(group).send_checkpoint([1], state)
        tr.Relay(group, timeout=20).send(state, 1)
    else:
        theirs = stock(group, into).recv_checkpoint(0)
        try:
            ours = tr.Relay(group, timeout=20).recv(0, into=spare).state
        except tr.errors.RelayError as fault:
            ours = fault
    return theirs, ours


# Wrong data, no error


def conj(rank: int, group: Any) -> object:
    z = torch.tensor([1 + 2j, 3 - 4j])
    theirs, ours = passed(rank, group, {"z": z.conj()})
    if rank == 1:
        assert torch.equal(theirs["z"].resolve_conj(), z)  # un-conjugated
        assert torch.equal(ours["z"], z.conj())
    return rank


def refused_in_place(rank: int, group: Any, source: Any, destination: Any, word: str) -> object:
    """torch fills a destination that does not fit; Relay refuses on both sides, by path."""
    if rank == 0:
        stock(group).send_checkpoint([1], {"w": source})
        with pytest.raises(tr.errors.PeerRefusedError, match=word) as refusal:
            tr.Relay(group, timeout=20).send({"w": source}, 1)
        assert refusal.value.path == "['w']" and refusal.value.rank == 1
    else:
        before = destination.clone()
        stock(group, {"w": destination}).recv_checkpoint(0)
        assert not torch.equal(destination, before)
        kept = before.clone()
        with pytest.raises(tr.errors.MismatchError, match=word):
            tr.Relay(group, timeout=20).recv(0, into={"w": kept})
        assert torch.equal(kept, before)
    return rank


def channels_last(rank: int, group: Any) -> object:
    source = torch.arange(24.0).reshape(1, 2, 3, 4)
    into = {"w": torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last)}
    if rank == 0:
        stock(group).send_checkpoint([1], {"w": source})
        tr.Relay(group, timeout=20).send({"w": source}, 1)
    else:
        stock(group, into).recv_checkpoint(0)
        assert not torch.equal(into["w"], source)  # permuted
        tr.Relay(group, timeout=20).recv(0, into=into)
        assert torch.equal(into["w"], source)
    return rank


def sharded_into_replicated(rank: int, group: Any) -> object:
    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(2, 3) * (rank + 1)
    sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    mine = DTensor.from_local(torch.zeros(2, 3), mesh, [Replicate()], run_check=False)
    if rank == 0:
        stock(group).send_checkpoint([1], {"w": sharded})
        with pytest.raises(tr.errors.PeerRefusedError):
            tr.Relay(group, timeout=20).send({"w": sharded}, 1)
    else:
        stock(group, {"w": mine}).recv_checkpoint(0)
        assert mine.to_local().sum() == 6  # half of a tensor where the whole is meant
        mine.to_local().zero_()
        with pytest.raises(tr.errors.MismatchError, match=r"shape|placements"):
            tr.Relay(group, timeout=20).recv(0, into={"w": mine})
        assert mine.to_local().sum() == 0
    return rank


def whole_storage(rank: int, group: Any) -> object:
    source = torch.ones(10)[2:5]
    if rank == 0:
        stock(group).send_checkpoint([1], {"w": source})
        tr.Relay(group, timeout=20).send({"w": source}, 1)
    else:
        base = torch.zeros(10)
        stock(group, {"w": base[2:5]}).recv_checkpoint(0)
        assert base.sum() == 10  # also what is outside the state dict
        base.zero_()
        tr.Relay(group, timeout=20).recv(0, into={"w": base[2:5]})
        assert base.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0]
    return rank


class Gated:
    """A group on which the first sender's tensors leave after the second sender's."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.first = threading.get_ident()
        self.metadata_out, self.second_posted = threading.Event(), threading.Event()

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        first = threading.get_ident() == self.first
        if first and tag >= 3:
            self.metadata_out.set()
            assert self.second_posted.wait(20)
        if not first and tag == 1:
            assert self.metadata_out.wait(20)
        work = self.group.send(tensors, dst, tag)
        if not first and tag >= 3:
            self.second_posted.set()
        return work


def at_once(rank: int, group: Any) -> object:
    one, two = {"w": torch.ones(4), "name": "one"}, {"w": torch.ones(4) * 2, "name": "two"}
    if rank == 0:
        gated = Gated(group)
        second = threading.Thread(target=lambda: stock(gated).send_checkpoint([1], two))
        second.start()
        stock(gated).send_checkpoint([1], one)
        second.join(20)
        relay = tr.Relay(group, timeout=20)
        threads = [threading.Thread(target=relay.send, args=(s, 1)) for s in (one, two) * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    else:
        mixed: Any = stock(group).recv_checkpoint(0)
        stock(group).recv_checkpoint(0)
        assert mixed["name"] == "one" and mixed["w"][0] == 2  # one's metadata, two's tensors
        relay = tr.Relay(group, timeout=20)
        for _ in range(8):
            got = relay.recv(0).state
            assert got["w"].tolist() == [1.0 if got["name"] == "one" else 2.0] * 4
    return rank


def stale(rank: int, group: Any) -> object:
    """torch has no step and does not tell about keys."""
    relay = tr.Relay(group, timeout=20)
    if rank == 0:
        stock(group).send_checkpoint([1], {"a": torch.ones(2), "b": torch.ones(2)})
        with pytest.raises(tr.errors.StepMismatchError), refused_soon():
            relay.send({"a": torch.ones(2)}, 1, step=99)
        with pytest.raises(tr.errors.PeerRefusedError):
            relay.send({"a": torch.ones(2), "b": torch.ones(2)}, 1, step=100)
        relay.send({"a": torch.ones(2), "b": torch.ones(2)}, 1, step=100)
    else:
        into = {"a": torch.zeros(2), "c": torch.zeros(2)}
        stock(group, into).recv_checkpoint(0)
        with pytest.raises(tr.errors.StepMismatchError, match="99"):
            relay.recv(0, step=100)
        with pytest.raises(tr.errors.MismatchError, match=r"'b'.*'c'"):
            relay.recv(0, into=into, step=100)
        got = relay.recv(0, into=into, step=100, strict=False)
        assert (got.step, got.report.unexpected_keys, got.report.missing_keys) == (
            100,
            ("['b']",),
            ("['c']",),
        )
        assert into["a"].sum() == 2
    return rank


def other_device(rank: int, group: Any) -> object:
    """A destination that torch skips without a word; here a meta tensor stands for a GPU's."""
    if rank == 0:
        stock(group).send_checkpoint([1], {"w": torch.ones(2)})
        with pytest.raises(tr.errors.PeerRefusedError, match="meta"):
            tr.Relay(group, timeout=20).send({"w": torch.ones(2)}, 1)
    else:
        into = {"w": torch.empty(2, device="meta")}
        got: Any = stock(group, into).recv_checkpoint(0)
        assert got["w"] is not into["w"]
        with pytest.raises(tr.errors.MismatchError, match="meta"):
            tr.Relay(group, timeout=20).recv(0, into=into)
    return rank


# Failure


def own_timeout(rank: int, group: Any) -> object:
    """The constructor's timeout counts, and the group lives on after it has passed."""
    short, enough = timedelta(seconds=0.3), timedelta(seconds=20)
    for alone in (1, 0):
        if rank == alone:
            begun = time.monotonic()
            with pytest.raises(TimeoutError, match="timed out"):
                if alone == 1:
                    PGTransport(group, short, CPU).recv_checkpoint(0)
                else:
                    PGTransport(group, short, CPU).send_checkpoint([1], {"w": 1})
            assert time.monotonic() - begun < 1.3
        torch.distributed.barrier(group)
    if rank == 1:
        return PGTransport(group, enough, CPU).recv_checkpoint(0)
    PGTransport(group, enough, CPU).send_checkpoint([1], {"w": 2})
    return {"w": 2}


def ignored_timeout(rank: int, group: Any) -> float:
    begun = time.monotonic()
    if rank == 1:
        with pytest.raises(RuntimeError):
            stock(group, seconds=0.3).recv_checkpoint(0)
    return time.monotonic() - begun


def refusal(rank: int, group: Any, ours: bool) -> float:
    """Seconds until the sender hears that the receiver cannot take the state."""
    begun = time.monotonic()
    into = {"w": torch.zeros(3)}
    if rank == 0:
        with pytest.raises((RuntimeError, tr.errors.PeerRefusedError)):
            if ours:
                tr.Relay(group, timeout=30).send({"w": torch.ones(4)}, 1)
            else:
                stock(group).send_checkpoint([1], {"w": torch.ones(4)})
        return time.monotonic() - begun
    with pytest.raises((AssertionError, tr.errors.MismatchError)):
        if ours:
            tr.Relay(group, timeout=30).recv(0, into=into)
        else:
            stock(group, into).recv_checkpoint(0)
    return 0.0


def late_receiver(rank: int, group: Any, ours: bool, flag: str) -> bool:
    """Whether rank 2 has its state before rank 1, which waits for just that, comes."""
    done = Path(flag)
    relay = tr.Relay(group, timeout=20, join_window=1.0)
    state = {"w": torch.ones(4), "v": torch.ones(4)}
    served = True
    if rank == 0:
        if ours:
            report = relay.send(state, [1, 2])
            assert 2 in report.receivers, report
            if 1 in report.failed:  # it came after the window
                relay.send(state, 1)
        else:
            stock(group).send_checkpoint([1, 2], state)
    if rank == 1:
        end = time.monotonic() + (10 if ours else 2)
        while not done.exists() and time.monotonic() < end:
            time.sleep(0.01)
        served = done.exists()
    if rank in (1, 2):
        (relay.recv if ours else stock(group).recv_checkpoint)(0)
    if rank == 2:
        done.touch()
    return served


# Waste


class Counting:
    """A group that counts what is sent."""

    def __init__(self, group: Any) -> None:
        self.group, self.bytes, self.messages = group, 0, 0

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        self.bytes += sum(tensor.nbytes for tensor in tensors)
        self.messages += 1
        return self.group.send(tensors, dst, tag)


def waste(rank: int, group: Any) -> object:
    flat = torch.randn(1 << 20)
    tied = torch.nn.Linear(64, 64).weight.data
    views = {str(i): flat[i * 1000 : i * 1000 + 1000] for i in range(100)}
    cases = {"small view": {"v": flat[:10]}, "views": views, "tied": {"a": tied, "b": tied}}
    relay = tr.Relay(group, timeout=20)
    needed = {"small view": (40, 48), "views": (400_000,), "tied": (tied.nbytes,)}  # 48: aligned
    if rank == 0:
        counted = {}
        for name, state in cases.items():
            counting = Counting(group)
            stock(counting).send_checkpoint([1], state)
            counted[name] = counting.bytes
            report = relay.send(state, 1)
            assert report.traffic.bytes in (
                (0, *needed[name]) if report.route == "memory" else needed[name]
            )
        assert counted["small view"] >= flat.nbytes
        assert counted["views"] >= 100 * flat.nbytes and counted["tied"] >= 2 * tied.nbytes
    else:
        for name in cases:
            theirs: Any = stock(group).recv_checkpoint(0)
            got = relay.recv(0)
            ours, report = got.state, got.report
            assert report.traffic.bytes in needed[name], (name, report)
            if name == "small view":
                assert theirs["v"].untyped_storage().nbytes() == flat.nbytes
                assert ours["v"].untyped_storage().nbytes() == 40
            if name == "tied":
                assert theirs["a"].data_ptr() != theirs["b"].data_ptr()
                assert ours["a"] is ours["b"]
    return rank


def messages(rank: int, group: Any) -> object:
    state = {str(i): torch.randn(10) for i in range(50)}
    relay = tr.Relay(group, timeout=20)
    if rank == 0:
        counting = Counting(group)
        stock(counting).send_checkpoint([1, 2, 3], state)
        assert counting.messages == 3 * 52
        report = relay.send(state, [1, 2, 3], route="tcp")
        assert report.traffic.messages == 1 and report.traffic.bytes <= 1.3 * report.bytes
        report = relay.send(state, [1, 2, 3], route="memory")
        assert report.traffic.messages == 0 and report.traffic.bytes == 0
    else:
        stock(group).recv_checkpoint(0)
        assert len(relay.recv(0).state) == 50
        assert len(relay.recv(0).state) == 50
    return rank


# Refused or lost


class Wrapped(torch.Tensor):
    """A tensor subclass that says how to flatten itself."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: Any, size: Any, stride: Any) -> Any:
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))


def odd_storage() -> torch.Tensor:
    base = torch.arange(10, dtype=torch.uint8)
    made: torch.Tensor = torch.empty(0, dtype=torch.int32).set_(base.untyped_storage(), 0, (2,))
    return made


def odd_leaves() -> dict[str, Callable[[], torch.Tensor]]:
    return {
        "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
        "subclass": lambda: Wrapped(torch.ones(2)),
        "meta": lambda: torch.empty(3, device="meta"),
        "sparse": lambda: torch.eye(2).to_sparse(),
        "odd storage": odd_storage,
    }


def refused_by_stock(rank: int, group: Any, name: str) -> object:
    tr.register(Wrapped)
    leaf = odd_leaves()[name]()
    if rank == 0:
        if name != "odd storage":  # there the receiver raises
            with pytest.raises((AssertionError, RuntimeError, ValueError)):
                stock(None).send_checkpoint([1], {"w": leaf})
        tr.Relay(group, timeout=20).send({"w": leaf}, 1)
        return True
    got = tr.Relay(group, timeout=20).recv(0).state["w"]
    assert type(got) is type(leaf) and got.shape == leaf.shape and got.layout == leaf.layout
    assert got.requires_grad == leaf.requires_grad and got.device == leaf.device
    if name == "subclass":
        got, leaf = got.inner, leaf.inner
    if name == "sparse":
        got, leaf = got.to_dense(), leaf.to_dense()
    return leaf.is_meta or torch.equal(got, leaf)


def requires_grad(rank: int, group: Any) -> object:
    theirs, ours = passed(rank, group, {"w": torch.ones(2, requires_grad=True)})
    if rank == 1:
        assert not theirs["w"].requires_grad and ours["w"].requires_grad
    return rank


# Trust


class Payload:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path(self.path).touch, ()


def hostile(rank: int, group: Any, path: str, ours: bool) -> bool:
    """Whether what the peer sent was executed."""
    if rank == 0:
        data = torch.frombuffer(bytearray(pickle.dumps(Payload(path))), dtype=torch.uint8)
        group.send([torch.tensor([data.numel()])], 1, 1).wait()
        group.send([data], 1, 2).wait()
        return False
    transport: Any = (PGTransport if ours else Stock)(group, SHORT, CPU)
    with pytest.raises(tr.errors.RemoteProtocolError if ours else AttributeError):
        transport.recv_checkpoint(0)
    return Path(path).exists()


@pytest.mark.parametrize(
    "case",
    [
        conj,
        channels_last,
        sharded_into_replicated,
        whole_storage,
        at_once,
        stale,
        other_device,
        requires_grad,
        waste,
    ],
    ids=lambda case: case.__name__,
)
@every_way
def test_between_two(pool2: Any, case: Any, way: str) -> None:
    assert pool2.run(by, way, case, timeout=60) == [0, 1]


@pytest.mark.parametrize(
    ("source", "destination", "word"),
    [
        (torch.ones(4), torch.zeros(4, dtype=torch.int32), "dtype"),
        (torch.ones(2, 2), torch.zeros(4), "shape"),
    ],
    ids=["another dtype", "another shape"],
)
def test_in_place_checks(pool2: Any, source: Any, destination: Any, word: str) -> None:
    assert pool2.run(refused_in_place, source, destination, word, timeout=60) == [0, 1]


@pytest.mark.parametrize("name", odd_leaves())
@every_way
def test_leaves_that_torch_refuses(pool2: Any, name: str, way: str) -> None:
    assert pool2.run(by, way, refused_by_stock, name, timeout=60) == [True, True]


def test_timeout_is_honoured(pool2: Any) -> None:
    assert pool2.run(ignored_timeout, timeout=60, group_timeout=2)[1] > 1.5
    assert pool2.run(own_timeout, timeout=60, fresh_group=True) == [{"w": 2}] * 2


def test_refusal_reaches_the_sender(pool2: Any) -> None:
    assert pool2.run(refusal, False, timeout=60, group_timeout=3)[0] > 2.5
    assert pool2.run(refusal, True, timeout=60, fresh_group=True)[0] < 2


def test_late_receiver_delays_nobody(pool4: Any, tmp_path: Path) -> None:
    assert not pool4.run(late_receiver, False, str(tmp_path / "theirs"), timeout=60)[1]
    assert pool4.run(late_receiver, True, str(tmp_path / "ours"), timeout=60)[1]


def test_messages_and_bytes_of_three_receivers(pool4: Any) -> None:
    assert pool4.run(messages, timeout=60) == [0, 1, 2, 3]


def test_nothing_is_executed(pool2: Any, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    assert pool2.run(hostile, str(theirs), False, timeout=60, fresh_group=True)[1] is True
    assert pool2.run(hostile, str(ours), True, timeout=60, fresh_group=True)[1] is False
