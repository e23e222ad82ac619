"""`Checkpointer` on object storage: a real S3 protocol server on loopback."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchrelay as tr
from tests.support.ranks import RankPool
from tests.support.s3 import BUCKET, LOSE, S3


def job(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "model": {"w": torch.randn(512, 700), "b": torch.randn(3)},
        "optim": {"m": torch.randn(512, 700), "step": seed},
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (
        all(torch.equal(one["model"][key], other["model"][key]) for key in one["model"])
        and torch.equal(one["optim"]["m"], other["optim"]["m"])
        and one["optim"]["step"] == other["optim"]["step"]
    )


def test_save_load_keep_and_delete(s3: S3) -> None:
    with tr.Checkpointer(s3.url("runs/a"), keep=tr.KeepLast(2), timeout=60) as held:
        held.save(1, job(1))
        pending = held.save_async(2, job(2))
        pending.result(timeout=60)
        held.save(3, job(3))
        assert held.steps() == [2, 3]
        assert same(held.load().state, job(3))
        into = job(0)
        weight = into["model"]["w"]
        held.load(into, step=2)
        assert into["model"]["w"] is weight and same(into, job(2))
        assert held.verify() == 3
        held.delete(3)
        assert held.latest() == 2


def test_a_step_is_read_once_for_an_atomic_load(s3: S3) -> None:
    with tr.Checkpointer(s3.url("runs/a"), timeout=60) as held:
        held.save(1, job(1))
        s3.requests.clear()
        into = job(0)
        held.load(into)
        assert same(into, job(1))
        assert len(s3.seen(r"GET .*model\.safetensors")) == 1


def test_the_manifest_is_the_last_object(s3: S3) -> None:
    with tr.Checkpointer(s3.url("runs/a"), timeout=60) as held:
        held.save(1, job(1))
    puts = s3.seen(r"^(PUT|POST) /")
    assert "manifest.json" in puts[-1], puts


def test_damage_is_found_and_the_step_before_is_taken(s3: S3) -> None:
    with tr.Checkpointer(s3.url("runs/a"), timeout=60) as held:
        held.save(1, job(1))
        held.save(2, job(2))
        listing = s3.ask("GET", f"/{BUCKET}?list-type=2&prefix=runs/a/step-2")[1].decode()
        key = next(
            part.split("</Key>")[0] for part in listing.split("<Key>")[1:] if "optim" in part
        )
        status, body, _ = s3.ask("GET", f"/{BUCKET}/{key}")
        assert status == 200
        damaged = bytearray(body)
        damaged[-100] ^= 1
        s3.ask("PUT", f"/{BUCKET}/{key}", bytes(damaged))
        into = job(0)
        with pytest.warns(RuntimeWarning, match=r"step 2 .*damaged.*optim\.m"):
            got = held.load(into)
        assert got.step == 1 and same(into, job(1))
        with pytest.raises(tr.errors.DamagedError, match=r"optim\.safetensors"):
            held.verify(2)


def test_a_service_that_fails_leaves_the_step_before(s3: S3) -> None:
    with tr.Checkpointer(s3.url("runs/a"), timeout=20) as held:
        held.save(1, job(1))
        s3.hook = lambda method, path: (
            403 if "step-2" in path and method in ("PUT", "POST") else None
        )
        with pytest.raises(tr.errors.CheckpointError):
            held.save(2, job(2))
        pending = held.save_async(2, job(2))
        with pytest.raises(tr.errors.CheckpointError):
            pending.result(timeout=60)
        s3.hook = None
        assert held.steps() == [1]
        held.save(2, job(2))
        assert same(held.load().state, job(2))


def save_together(rank: int, group: Any, url: str, env: dict[str, str]) -> bool:
    os.environ.update(env)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(35.0).view(7, 5)
    with tr.Checkpointer(url, timeout=60) as held:
        held.save(1, {"model": {"w": distribute_tensor(whole, mesh, [Shard(0)])}})
        pending = held.save_async(
            2, {"model": {"w": distribute_tensor(whole + 1, mesh, [Shard(1)])}}
        )
        pending.result(timeout=60)
        into = {"model": {"w": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(0)])}}
        held.load(into)
        return torch.equal(into["model"]["w"].full_tensor(), whole + 1)


def test_ranks(s3: S3, pool2: RankPool) -> None:
    env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    url = s3.url("runs/b")
    assert pool2.run(save_together, url, env, timeout=90) == [True, True]
    with tr.Checkpointer(url, timeout=60) as held:
        assert torch.equal(held.load(step=1).state["model"]["w"], torch.arange(35.0).view(7, 5))


def test_what_did_not_change_is_copied_by_the_service(s3: S3) -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {"base": torch.nn.Linear(1024, 2048), "head": torch.nn.Linear(9, 9)}
    )
    model["base"].requires_grad_(False)
    trained = sum(one.nbytes for one in model["head"].parameters())
    with tr.Checkpointer(s3.url("runs/a"), timeout=60) as held:
        for step in (1, 2, 3):
            with torch.no_grad():
                model["head"].weight += 1
            s3.requests.clear()
            if step == 2:
                report = held.save_async(step, {"model": model}).result(60)
                assert isinstance(report, tr.Report)
            else:
                report = held.save(step, {"model": model})
            data = [one for one in s3.requests if one.method in ("PUT", "POST")]
            data = [one for one in data if "manifest.json" not in one.path]
            copies = [one for one in data if "x-amz-copy-source" in one.headers]
            sent = sum(int(one.headers.get("content-length", 0)) for one in data)
            if step > 1:
                assert len(copies) == 1 and report.bytes_reused > 8 << 20
                assert sent < 1.1 * trained + 4096, sent  # headers, and the index
                assert len(s3.requests) <= 16, s3.seen("")
        for step in (1, 3):
            held.delete(step)
        got = held.load(step=held.verify(2)).state["model"]
        assert torch.equal(got["base.weight"], model["base"].weight)


@pytest.mark.parametrize("refused", [501, 403, 500])
def test_a_service_that_does_not_copy_gets_the_bytes(s3: S3, refused: int) -> None:
    model = torch.nn.Linear(1024, 512).requires_grad_(False)

    def hook(method: str, path: str) -> int | None:
        last = s3.requests[-1]
        return refused if "x-amz-copy-source" in last.headers else None

    s3.hook = hook
    with tr.Checkpointer(s3.url("runs/a"), timeout=60) as held:
        for step in (1, 2):
            report = held.save(step, {"model": model})
            assert report.bytes_reused == 0 and report.bytes_written == report.bytes
            assert bool(report.instead) == (step == 2)
            assert held.verify(step) == step


def test_a_copy_whose_answer_is_lost(s3: S3) -> None:
    model = torch.nn.Linear(1024, 512).requires_grad_(False)
    lost: list[str] = []

    def hook(method: str, path: str) -> int | None:
        if "x-amz-copy-source" in s3.requests[-1].headers and not lost:
            lost.append(path)
            return LOSE
        return None

    s3.hook = hook
    with tr.Checkpointer(s3.url("runs/a"), timeout=60) as held:
        for step in (1, 2):
            held.save(step, {"model": model})
            assert held.verify(step) == step
    assert lost
