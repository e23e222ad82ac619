"""What ranks have of their own comes back to each of them, however little it differs by."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

import torchrelay as tr
from tests.support.ranks import RankPool

SEED = 11
ELEMENTS = 1_000_000


def tensors(rank: int) -> dict[str, torch.Tensor]:
    """Large tensors that differ from rank to rank in one element, at random places."""
    dice = random.Random(SEED)
    found = {}
    for number in range(12):
        at = dice.randrange(ELEMENTS - 1)
        found[f"one{number}"] = torch.zeros(ELEMENTS)
        found[f"one{number}"][at + rank] = rank + 1
    mask = torch.zeros(300_000, dtype=torch.bool)
    mask[200_001 + rank] = True
    turned = torch.zeros(700, 900).t()
    turned[5, 600 + rank] = 1.0
    unlike = torch.zeros(50_000, dtype=torch.float64)
    unlike[25_000] = -0.0 if rank else 0.0
    return found | {"mask": mask, "turned": turned, "zero": unlike}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def saved(rank: int, group: Any, root: str) -> list[str]:
    """The names of tensors that came back wrong; a replica among them is stored once."""
    wrong = []
    with tr.Checkpointer(root, group=group, timeout=60) as there:
        for step in (1, 2):
            mine, same = tensors(rank), torch.arange(200_000.0)
            if step == 1:
                there.save(step, {"own": mine, "same": same})
            else:
                there.save_async(step, {"own": mine, "same": same}).result(60)
            report = there.record(step)
            stored = sum(volume.nbytes for volume in report.volumes)
            expected = 2 * sum(one.nbytes for one in mine.values()) + same.nbytes
            if not expected <= stored < expected + 100_000:
                wrong.append(f"step {step} has {stored} bytes, not {expected}")
            into = {"own": {n: torch.zeros_like(one) for n, one in mine.items()}}
            there.load(into=into, step=step, strict=False)
            wrong += [n for n, one in mine.items() if bits(into["own"][n]) != bits(one)]
    return wrong


def test_one_element_that_differs_is_no_replica(pool2: RankPool, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    assert pool2.run(saved, str(tmp_path), timeout=100) == [[], []]
