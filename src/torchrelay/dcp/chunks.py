"""The chunks that torch's planners take for the parts of a rank, against what the rank has.

torch's own list is wrong for a tensor with uneven rows that tensor parallelism and then FSDP2 have
cut: some rows belong to no rank, and others to two. Planners before torch 2.14 take a tensor that
names its boxes (`CheckpointableTensor`) for a whole one. Such a plan is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from torchrelay.errors import UnsupportedLeafError
from torchrelay.state import tensors as t
from torchrelay.state.checkpointable import boxed, is_checkpointable
from torchrelay.state.local_parts import LocalBoxes
from torchrelay.state.paths import naming


def check_chunks(planner: SavePlanner | LoadPlanner) -> None:
    """`UnsupportedLeafError` if torch's planner takes other boxes of a tensor for this rank's than
    the rank has. Planners that are not torch's are not checked."""
    if not isinstance(planner, (DefaultSavePlanner, DefaultLoadPlanner)):
        return
    state: Mapping[str, Any] = getattr(planner, "state_dict", {})
    boxes, known = LocalBoxes(), set()
    for name, tensor in state.items():
        if is_checkpointable(tensor):
            with naming(name):
                boxed(tensor)
                if not hasattr(dcp, "CheckpointableTensor"):
                    raise UnsupportedLeafError(
                        f"it names its boxes of a larger tensor, and the planners of torch "
                        f"{torch.__version__} take it for a whole one: use torchrelay.Checkpointer,"
                        " or torch 2.14 or later"
                    )
        if not t.is_dtensor(tensor):
            continue
        spec = t.dtensor_parts(tensor)[1]
        if any(placement.is_partial() for placement in spec.placements):
            continue  # torch refuses it
        with naming(name):
            mine = [piece.box for piece in boxes.of(tensor) if 0 not in piece.box[1]]
            if spec not in known and mine != (theirs := _chunks(tensor)):
                raise UnsupportedLeafError(
                    f"this rank has {_show(mine)}, and torch's planner takes it to have "
                    f"{_show(theirs)}: it does not know how the mesh dimensions cut uneven rows "
                    "one after the other; use torchrelay.Checkpointer"
                )
        known.add(spec)


def _chunks(tensor: t.DTensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The chunks with elements that torch lists for this rank."""
    if tensor.device_mesh.get_coordinate() is None:
        return []
    chunks: Any = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    found = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
    return [box for box in found if 0 not in box[1]]


def _show(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    if not boxes:
        return "nothing of it"
    return ", ".join(f"{list(sizes)} at {list(offsets)}" for offsets, sizes in boxes[:3])
