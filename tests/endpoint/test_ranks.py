"""Ranks that each serve their part of a sharded state, at one URL; read whole or resharded."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import torchrelay as tr
from tests.support import flat
from tests.support.fsdp_job import fsdp_job, train, whole

_pull = partial(flat.pull, same_host=False)  # over TCP, though this is the same host

TIMEOUT = 60
_kept: dict[str, Any] = {}  # in a rank: what stays between two calls


def serve_part(rank: int, group: Any, seed: int) -> tuple[str, dict[str, torch.Tensor]]:
    """Train and serve; the URL, and the state in whole tensors."""
    _kept["job"] = fsdp_job(seed)
    train(_kept["job"], 2)
    _kept["endpoint"] = tr.serve(_kept["job"], step=2, timeout=TIMEOUT)
    return _kept["endpoint"].url, whole(_kept["job"])


def publish_part(rank: int, group: Any, step: int) -> dict[str, torch.Tensor]:
    train(_kept["job"], 1)
    _kept["endpoint"].publish(_kept["job"], step=step).result(TIMEOUT)
    return whole(_kept["job"])


def train_on(rank: int, group: Any, steps: int) -> list[float]:
    return train(_kept["job"], steps)


def close_part(rank: int, group: Any) -> None:
    _kept.pop("endpoint").close()


def pull_part(
    rank: int, group: Any, url: str, dims: int, reshare: bool
) -> tuple[int, Any, dict[str, int], str]:
    """Pull into another mesh; the step, the state in whole tensors, where it came from, and where
    this rank has served it."""
    into = fsdp_job(99, dims=dims)
    got = _pull(url, into=into, group=dist.group.WORLD, reshare=reshare, timeout=TIMEOUT)
    _kept["job"] = got.state
    here = "" if got.seed is None else got.seed.url
    if got.seed is not None:
        dist.barrier()  # the other may still take from it
        got.seed.close()
    return got.step, whole(got.state), got.report.sources, here


def train_undisturbed(rank: int, group: Any, seed: int, dims: int) -> list[float]:
    return train(fsdp_job(seed, dims=dims), 4)


def refuse_part(rank: int, group: Any, url: str) -> tuple[str, bool]:
    """One rank's destination does not fit: no rank's is written."""
    job = fsdp_job(98)
    before = {name: x.clone() for name, x in whole(job).items()}
    if rank == 1:
        job["extra"] = torch.zeros(3)
    try:
        _pull(url, into=job, group=dist.group.WORLD, timeout=TIMEOUT)
    except tr.errors.MismatchError as fault:
        after = whole(job)
        return str(fault), all(torch.equal(before[name], after[name]) for name in before)
    return "", False


@pytest.fixture(scope="module")
def served(pool4: Any) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    found = pool4.run(serve_part, 1)
    assert len({url for url, _ in found}) == 1
    yield found[0]
    pool4.run(close_part)


def _same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


def _flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {f"model.{key}": x for key, x in state["model"].items()}
    found["column"] = state["column"]
    for index, held in state["optimizer"]["state"].items():
        found.update({f"optimizer.state.{index}.{key}": x for key, x in held.items()})
    return found


def test_one_process_pulls_the_whole(served: tuple[str, Any]) -> None:
    url, wanted = served
    got = _pull(url, timeout=TIMEOUT)
    assert got.step == 2 and got.state["step"] == 2
    assert _same(_flat(got.state), wanted)
    assert len(got.report.sources) == 4  # every rank gave its part


def test_curl_gets_whole_tensors_of_all_ranks(served: tuple[str, Any], tmp_path: Path) -> None:
    url, wanted = served
    file = tmp_path / "model.safetensors"
    subprocess.run(["curl", "-sSf", "-o", file, f"{url}/model.safetensors"], check=True, timeout=60)
    found = load_file(file)
    assert _same(found, wanted)
    part = tmp_path / "part"
    for start, stop in ((0, 1000), (1001, 5000), (5001, file.stat().st_size)):
        subprocess.run(
            [
                "curl",
                "-sSf",
                "-r",
                f"{start}-{stop}",
                "-o",
                part,
                f"{url}/model.safetensors?step=2",
            ],
            check=True,
            timeout=60,
        )
        assert part.read_bytes() == file.read_bytes()[start : stop + 1]


@pytest.mark.parametrize("reshare", [False, True])
@pytest.mark.parametrize("dims", [1, 2])
def test_two_ranks_of_another_mesh_pull_their_parts_and_train_on(
    served: tuple[str, Any], pool2: Any, dims: int, reshare: bool
) -> None:
    url, wanted = served
    both = pool2.run(pull_part, url, dims, reshare)
    for (step, found, sources, _), (*_, other) in zip(both, reversed(both), strict=True):
        assert step == 2
        assert _same(found, wanted)
        # No endpoint has all of it; the other rank may.
        assert len(sources) > 1 or set(sources) == {other}
    undisturbed = pool2.run(train_undisturbed, 1, dims)[0]
    assert pool2.run(train_on, 2) == [undisturbed[2:]] * 2


def test_one_rank_that_cannot_land_keeps_all_from_it(served: tuple[str, Any], pool2: Any) -> None:
    for message, untouched in pool2.run(refuse_part, served[0]):
        assert "extra" in message
        assert untouched


def test_readers_of_a_step_finish_on_it_while_ranks_publish_the_next(
    served: tuple[str, Any], pool4: Any
) -> None:
    url, _ = served
    wanted = pool4.run(publish_part, 3)[0]
    got = _pull(url, timeout=TIMEOUT)
    assert got.step == 3 and _same(_flat(got.state), wanted)
    wanted = pool4.run(publish_part, 4)[0]
    got = _pull(url, newer_than=3, timeout=TIMEOUT)
    assert got.step == 4 and _same(_flat(got.state), wanted)
