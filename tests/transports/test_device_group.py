"""Backends that move device memory alone, by stand-ins: nccl between ranks cannot run here.

With a GPU the data path runs on its memory through a group of threads; without one, what can be
tested is control through the store, with the data on gloo.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.loop import run_loop
from torchrelay.memory.gpu.kernels import digest_of
from torchrelay.record.digest import CELL_BYTES, digest
from torchrelay.transports.group.device_group import Mail


def by_mail(group: Any, **options: Any) -> tr.Relay:
    """A relay whose control messages go through the store of a gloo group."""
    relay = tr.Relay(group, **options)
    relay._group_lines._mail = Mail(group.get_group_store())
    relay._group_lines.direct = ["cpu"]
    return relay


def exchange(rank: int, group: Any) -> bool:
    relay = by_mail(group, timeout=20)
    state = {"w": torch.arange(3 << 20), "small": [torch.ones(3)] * 5, "n": 4}
    if rank == 0:
        with pytest.raises(tr.TransferTimeoutError):
            relay.send(state, 1, timeout=0.3)
        torch.distributed.barrier(group)
        relay.send(state, 1, step=1)
        with pytest.raises(tr.PeerRefusedError, match="dtype") as refusal:
            relay.send(state, 1, step=2)
        assert refusal.value.path == "['w']"
        report = relay.send(state, 1, step=3)
        return report.receivers == (1,)
    torch.distributed.barrier(group)
    fresh = relay.recv(0, step=1).state
    wrong = {"w": torch.zeros(3 << 20), "small": [torch.zeros(3)] * 5, "n": 0}
    with pytest.raises(tr.MismatchError):
        relay.recv(0, into=wrong, step=2)
    assert wrong["w"].sum() == 0
    into = {"w": torch.zeros(3 << 20, dtype=torch.int64), "small": [torch.zeros(3)] * 5, "n": 0}
    relay.recv(0, into=into, step=3)
    begun = time.monotonic()
    with pytest.raises(tr.TransferTimeoutError):
        relay.recv(0, timeout=0.3)
    assert time.monotonic() - begun < 10
    return all(torch.equal(s["w"], state["w"]) and s["n"] == 4 for s in (fresh, into))


def test_control_through_the_store(pool2: Any) -> None:
    assert pool2.run(exchange, timeout=60, fresh_group=True) == [True, True]


def odd_state(seed: int, device: str) -> dict[str, Any]:
    torch.manual_seed(seed)
    base = torch.randn(64, 64, device=device)
    return {
        "big": torch.randn(3 << 20, device=device),
        "views": [base[::2], base.t(), base[3:5, 7:9]],
        "small": [torch.randn(5, device=device) for _ in range(20)],
        "host": torch.randn(7),
        "step": seed,
    }


def on_device(rank: int, group: Any, mode: str, sent: dict[str, Any]) -> bool:
    relay = tr.Relay(group, timeout=30)
    if rank == 0:
        return relay.send(sent, [1, 2]).receivers == (1, 2)
    into = None if mode == "new" else odd_state(2, "cuda")
    got = relay.recv(0, into=into, atomic=mode != "stream").state
    tensors = [*zip(got["views"], sent["views"], strict=True), (got["big"], sent["big"])]
    return (
        all(a.is_cuda and torch.equal(a, b) for a, b in tensors)
        and torch.equal(got["host"], sent["host"])
        and all(torch.equal(a, b) for a, b in zip(got["small"], sent["small"], strict=True))
        and got["step"] == 1
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["new", "atomic", "stream"])
def test_device_to_device(mode: str) -> None:
    assert run_loop(on_device, 3, "cuda", mode, odd_state(1, "cuda")) == [True] * 3


def damaged(rank: int, group: Any, sent: dict[str, Any]) -> bool:
    relay = tr.Relay(group, timeout=30, chunk_bytes=4 << 20)  # chunks of several cells
    if rank == 0:
        return relay.send(sent, 1).receivers == (1,)
    into = odd_state(2, "cuda")
    got = relay.recv(0, into=into)
    again = got.report.wire_bytes - got.report.bytes
    return torch.equal(into["big"], sent["big"]) and 4 << 20 <= again < 5 << 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_damage_on_the_way_is_found_on_the_device() -> None:
    assert run_loop(damaged, 2, "cuda", odd_state(1, "cuda"), flips=1) == [True, True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("nbytes", [0, 1, 4095, CELL_BYTES, CELL_BYTES + 1, 5 * CELL_BYTES + 77])
def test_a_device_makes_the_digests_of_the_host(nbytes: int) -> None:
    torch.manual_seed(nbytes)
    data = torch.randint(0, 256, (nbytes + 3,), dtype=torch.uint8, device="cuda")
    for start in (0, 3):
        some = data[start : start + nbytes]
        assert digest_of(some, cells=True) == digest(some.cpu(), cells=True)
        assert digest_of(some, cells=False) == digest(some.cpu())
