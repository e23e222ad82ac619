"""Directories that `from_pretrained` opens: a whole model, or the adapters of a PEFT model.

The weights come from a step. The model says under which names its own loader looks for them.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrelay.errors import CheckpointError, MismatchError, UsageError
from torchrelay.files import exists, is_dir
from torchrelay.stores.local.files import Files
from torchrelay.stores.tokens import new_token

SHARD_SIZE = "5GB"  # at which Hugging Face's own tools split


def is_pretrained(model: nn.Module) -> bool:
    """Whether the model writes such directories itself. Raises `UsageError` for one that would
    write weights that its loader does not find, or others than those of a step."""
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftMixedModel):
        raise UsageError("a PeftMixedModel cannot be exported: PEFT does not save one")
    adapters = peft is not None and isinstance(model, peft.PeftModel)
    if not adapters and getattr(model, "hf_quantizer", None) is not None:
        raise UsageError(
            "a quantized model writes the weights that it has now, not those of a step: load the "
            "step and call model.save_pretrained"
        )
    return hasattr(model, "save_pretrained")


def write_pretrained(
    model: Any, weights: dict[str, torch.Tensor], target: str | os.PathLike[str]
) -> None:
    """Have `model` write `weights`, which are a state dict of it, to a new directory. After a
    failure nothing has that name."""
    known = set(model.state_dict())
    if differing := sorted(known.symmetric_difference(weights)):
        raise MismatchError(
            "the step and the model have different weights: export with the model that was saved, "
            "before adapters are added, merged or removed",
            path=differing[0],
        )
    place = Path(target).absolute()
    if exists(place) and (not is_dir(place) or any(place.iterdir())):
        raise UsageError(f"{place} exists and is not overwritten: name another directory")
    temporary, files = place.with_name(f"{place.name}.tmp-{new_token()}"), Files()
    peft = sys.modules.get("peft")
    adapters = peft is not None and isinstance(model, peft.PeftModel)
    options = {} if adapters else {"max_shard_size": SHARD_SIZE}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(temporary, state_dict=weights, **options)
        _sync(temporary, files)
        files.rename(str(temporary), str(place))
        files.sync_name(str(place))
    except ValueError as fault:  # of transformers or PEFT, for what they cannot save
        raise UsageError(f"the model cannot be exported: {fault}") from fault
    except OSError as fault:
        why = fault.strerror or fault
        raise CheckpointError(f"cannot export: {why}", phase="write", file=str(place)) from fault
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(folder: Path, files: Files) -> None:
    for one in folder.rglob("*"):
        if is_dir(one):
            files.sync_dir(str(one))
        else:
            with one.open("rb") as file:
                os.fsync(file.fileno())
    files.sync_dir(str(folder))
