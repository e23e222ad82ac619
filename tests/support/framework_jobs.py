"""A training job of a framework, in phases: whole; killed in the middle; resumed; on one rank.

A job script defines `train(folder, name, die_at)` and ends with `run_phases(train)`. All phases are
forks of one process, which has imported the framework once.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.forks import Done, run_program

Train = Callable[[Path, str, int | None], None]
PHASE_SECONDS = 120.0
DIES_AT = 9


def run_phases(train: Train) -> None:
    """What a job script does when it is run."""
    folder = Path(sys.argv[1])
    whole, killed, alone = folder / "whole", folder / "killed", folder / "alone"
    for place in (whole, killed):
        place.mkdir()
    assert _run(train, 2, whole, "whole") == [0, 0]
    codes = _run(train, 2, killed, "first", DIES_AT)
    assert codes == [-signal.SIGKILL] * 2, codes
    shutil.copytree(killed, alone, symlinks=True)
    assert _run(train, 2, killed, "second") == [0, 0]
    assert _run(train, 1, alone, "second") == [0]


def _run(train: Train, ranks: int, folder: Path, name: str, die_at: int | None = None) -> list[int]:
    """Exit codes of the ranks. When one dies, the others are killed, as torchrun does."""
    print(f"--- {name} on {ranks} in {folder.name}", flush=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fork = get_context("fork")
    environment = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store of this process
    }
    if ranks == 1:
        environment = {}
    processes = [
        fork.Process(target=_be_rank, args=(train, rank, environment, folder, name, die_at))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    ends = time.monotonic() + PHASE_SECONDS
    while any(process.exitcode is None for process in processes):
        dead = [process for process in processes if process.exitcode]
        if dead or time.monotonic() > ends:
            for process in processes:
                process.join(0 if not dead else 5)
                process.kill()
        processes[0].join(0.05)
        processes[-1].join(0.05)
    return [process.exitcode or 0 for process in processes]


def _be_rank(
    train: Train,
    rank: int,
    environment: dict[str, str],
    folder: Path,
    name: str,
    die_at: int | None,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment)
    # Jobs train on the CPU: a framework would give each rank a GPU of its own.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if environment:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    train(folder, name, die_at)


def rank_here() -> int:
    return int(os.environ.get("RANK", "0"))


class Losses:
    """The losses of one rank, in a file, so that a killed rank's are there too."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = folder / f"{name}-{rank_here()}.json"

    def add(self, step: int, loss: float) -> None:
        with self._file.open("a") as out:
            out.write(json.dumps([step, loss]) + "\n")


def save_weights(folder: Path, name: str, weights: dict[str, Any]) -> None:
    torch.save(weights, folder / f"{name}-{rank_here()}.pt")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# What a test asks of a job


def losses_of(folder: Path, *names: str, rank: int = 0) -> list[list[float]]:
    files = [folder / f"{name}-{rank}.json" for name in names]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def run_job(script: Path, folder: Path, *words: str, seconds: float = 400.0) -> Done:
    return run_program(str(script), str(folder), *words, folder=folder, seconds=seconds)


def check_exact_resume(folder: Path, last: int, saved: int, near: float = 0.1) -> None:
    """Killed and resumed gives the losses and weights of an undisturbed run, bit for bit; on one
    rank the job continues from the same step, and its losses are `near`: dropout differs."""
    for rank in (0, 1):
        calm = losses_of(folder / "whole", "whole", rank=rank)
        first = losses_of(folder / "killed", "first", rank=rank)
        second = losses_of(folder / "killed", "second", rank=rank)
        assert [step for step, _ in calm] == list(range(1, last + 1))
        assert second[0][0] == saved + 1 and second[-1][0] == last
        assert [*first[:saved], *second] == calm
        ours, theirs = (
            torch.load(folder / place / f"{name}-{rank}.pt", weights_only=True)
            for place, name in (("whole", "whole"), ("killed", "second"))
        )
        assert set(ours) == set(theirs)
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    alone = losses_of(folder / "alone", "second")
    assert [step for step, _ in alone] == list(range(saved + 1, last + 1))
    calm = losses_of(folder / "whole", "whole")
    assert all(
        abs(one - other) < near for (_, one), (_, other) in zip(alone, calm[saved:], strict=True)
    )
