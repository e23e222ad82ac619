"""Where a save is staged and a load goes: what may be asked for, and a state that no GPU has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from torchrelay.memory.gpu.spare import DeviceCopy


def test_a_place_that_there_is_none_of_is_refused_with_those_there_are(tmp_path: Path) -> None:
    stage: Any = "disk"
    with pytest.raises(tr.errors.UsageError, match="'auto' or 'host' or 'device', not 'disk'"):
        tr.Checkpointer(tmp_path, options=tr.options.CheckpointerOptions(stage_on=stage))


def test_a_device_that_torch_has_none_of_is_refused(tmp_path: Path) -> None:
    device: Any
    with tr.Checkpointer(tmp_path) as checkpointer:
        for device in ("moon", 3.5):
            with pytest.raises(tr.errors.UsageError, match="device is one of torch's"):
                checkpointer.load(device=device)


@pytest.mark.parametrize("stage", ["auto", "host", "device"])
def test_a_state_in_host_memory_is_saved_as_it_was_when_the_call_was_made(
    tmp_path: Path, stage: Any
) -> None:
    state = {"w": torch.arange(100_000), "b": torch.ones(3)}
    with tr.Checkpointer(
        tmp_path, options=tr.options.CheckpointerOptions(stage_on=stage)
    ) as checkpointer:
        pending = checkpointer.save_async(1, state)
        state["w"].zero_()
        pending.result()
        loaded = checkpointer.load().state
    assert torch.equal(loaded["w"], torch.arange(100_000)) and torch.equal(
        loaded["b"], torch.ones(3)
    )


def test_a_state_without_tensors_on_a_gpu_needs_no_copy_on_one() -> None:
    assert not DeviceCopy().fits([torch.zeros(5), torch.zeros(3)])
