"""Backends that move device memory alone, by a stand-in: nccl between ranks cannot run here.

Host memory stands for that of a device, in a group of threads. With a GPU the same runs on its
memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.loop import Hub, LoopGroup, run_loop
from tests.support.ways import patched
from torchrelay.memory.digest import CELL_BYTES, digest
from torchrelay.memory.gpu.kernels import digest_of
from torchrelay.progress import Progress
from torchrelay.transports.routes import group as route

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
LONG = 30.0


@pytest.fixture(autouse=True)
def host_is_a_device() -> Iterator[None]:
    true = route.carriers

    def carriers(group: Any) -> list[str]:
        return ["cpu"] if group._hub.device == "cpu" else true(group)

    with patched(route, carriers=carriers):
        yield


def odd_state(seed: int, device: str) -> dict[str, Any]:
    make = torch.Generator().manual_seed(seed)  # ranks are threads here

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make)

    base = random(64, 64).to(device)
    return {
        "big": random(3 << 20).to(device),
        "views": [base[::2], base.t(), base[3:5, 7:9]],
        "small": [random(5).to(device) for _ in range(20)],
        "host": random(7),
        "step": seed,
    }


def same(got: dict[str, Any], sent: dict[str, Any]) -> bool:
    tensors = [(got["big"], sent["big"]), (got["host"], sent["host"])]
    for name in ("views", "small"):
        tensors += zip(got[name], sent[name], strict=True)
    equal = all(a.device == b.device and torch.equal(a, b) for a, b in tensors)
    return equal and got["step"] == sent["step"]


def on_device(rank: int, group: Any, mode: str, sent: dict[str, Any], device: str) -> bool:
    relay = tr.Relay(group, timeout=LONG)
    if rank == 0:
        report = relay.send(sent, [1, 2])
        return report.receivers == (1, 2) and report.routes == {1: "group", 2: "group"}
    into = None if mode == "new" else odd_state(2, device)
    got = relay.recv(0, into=into, atomic=mode != "stream")
    return got.report.route == "group" and got.report.verified and same(got.state, sent)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["new", "atomic", "stream"])
def test_device_to_device(mode: str, device: str) -> None:
    assert run_loop(on_device, 3, device, mode, odd_state(1, device), device) == [True] * 3


def damaged(rank: int, group: Any, sent: dict[str, Any], device: str) -> Any:
    relay = tr.Relay(group, timeout=LONG, chunk_bytes=4 << 20)  # chunks of several cells
    into = odd_state(2, device)
    try:
        if rank == 0:
            return relay.send(sent, 1).receivers
        report = relay.recv(0, into=into).report
    except tr.errors.RelayError as fault:
        return type(fault).__name__, rank == 0 or same(into, odd_state(2, device))
    return torch.equal(into["big"], sent["big"]), report.traffic.bytes - report.bytes


@pytest.mark.parametrize("device", DEVICES)
def test_damage_on_the_way_is_found_and_asked_for_again(device: str) -> None:
    ours, (right, again) = run_loop(damaged, 2, device, odd_state(1, device), device, flips=1)
    assert ours == (1,) and right and 4 << 20 <= again < 5 << 20


def test_damage_again_and_again_lands_nowhere() -> None:
    ours, theirs = run_loop(damaged, 2, "cpu", odd_state(1, "cpu"), "cpu", flips=1000)
    assert ours[0] == "PeerLostError" and theirs == ("DigestError", True)


def test_a_group_of_host_memory_alone_does_not_carry() -> None:
    class Gloo(LoopGroup):
        def _get_backend(self, device: torch.device) -> Any:
            class Named:
                def name(self) -> str:
                    return "gloo"

            return Named()

    with patched(route, carriers=TRUE):
        assert route.carriers(Gloo(Hub(2, "cuda"), 0)) == []
        assert route.carriers(LoopGroup(Hub(2, "cuda"), 0)) == ["cuda"]
        assert route.carriers(LoopGroup(Hub(2, "cpu"), 0)) == []
        assert route.carriers(None) == []


TRUE = route.carriers


# Transfers that are given up: what was posted on a backend stays posted


@contextlib.contextmanager
def giving_up() -> Iterator[Callable[[Progress], None]]:
    def stop(done: Progress) -> None:
        if done.done > done.total // 3:
            raise InterruptedError("enough")

    yield stop


def gives_up(rank: int, group: Any, who: int) -> Any:
    """One side gives up in the middle of the data; then the next transfer, and one to a third."""
    relay = tr.Relay(group, timeout=LONG, chunk_bytes=1 << 20, join_window=1.0)
    first: Any = None
    into = odd_state(5, "cpu")
    with giving_up() as stop:
        options = {"progress": stop} if rank == who else {}
        try:
            if rank == 0:
                relay.send(odd_state(1, "cpu"), 1, **options)
            elif rank == 1:
                relay.recv(0, into=into, **options)
        except (InterruptedError, tr.errors.RelayError) as fault:
            first = type(fault).__name__
    old = same(into, odd_state(5, "cpu"))
    if rank == 0:
        report = relay.send(odd_state(2, "cpu"), [1, 2])
        return first, report.receivers, report.routes
    got = relay.recv(0, into=into)
    return first, old, same(into, odd_state(2, "cpu")), got.report.instead.get("group", "")


@pytest.mark.parametrize("who", [0, 1])
def test_a_transfer_that_was_given_up_leaves_the_next_right(who: int) -> None:
    """Not through the backend: it would get the bytes of the one before."""
    ours, one, two = run_loop(gives_up, 3, "cpu", who)
    assert ours[0] is not None and one[0] is not None
    assert ours[1] == (1, 2) and one[1] and one[2] and two[2]
    assert "tcp" in ours[2].values() and "given up" in one[3] + two[3]


def again_and_again(rank: int, group: Any) -> Any:
    relay = tr.Relay(group, timeout=LONG, chunk_bytes=1 << 20)
    if rank == 0:
        return [relay.send(odd_state(seed, "cpu"), 1).route for seed in range(5)]
    return [same(relay.recv(0).state, odd_state(seed, "cpu")) for seed in range(5)]


def test_transfers_that_end_as_they_should_go_through_the_backend_each_time() -> None:
    assert run_loop(again_and_again, 2, "cpu") == [["group"] * 5, [True] * 5]


@needs_gpu
@pytest.mark.parametrize("nbytes", [0, 1, 4095, CELL_BYTES, CELL_BYTES + 1, 5 * CELL_BYTES + 77])
def test_a_device_makes_the_digests_of_the_host(nbytes: int) -> None:
    torch.manual_seed(nbytes)
    data = torch.randint(0, 256, (nbytes + 3,), dtype=torch.uint8, device="cuda")
    for start in (0, 3):
        some = data[start : start + nbytes]
        assert digest_of(some) == digest(some.cpu().numpy())
