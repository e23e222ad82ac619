"""Leaves made of landed bytes, and copies that wait until a landing commits."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import numpy as np
import torch

from torchrelay.errors import UnsupportedLeafError
from torchrelay.geometry.strides import contiguous_strides
from torchrelay.record import manifest as m
from torchrelay.record.manifest import parts
from torchrelay.record.rows import LeafRows, Marks
from torchrelay.state import tensors as t
from torchrelay.state.leaves import Part, build
from torchrelay.state.paths import Path, naming, slots
from torchrelay.state.tree import records_of, unflatten


def make_leaf(
    leaf: m.Leaf,
    path: Path | Callable[[], Path],
    part: Part,
    rank: int,
    mesh: t.DeviceMesh | None = None,
) -> object:
    """The object of a leaf; a DTensor on `mesh` if that is given, else on one like the sender's."""
    try:
        if mesh is not None and isinstance(leaf, m.DTensorLeaf):
            return t.dtensor(part(leaf.local), leaf, mesh)
        return build(leaf, part, rank)
    except Exception as fault:  # also of the code of a tensor subclass
        with naming(path):
            raise UnsupportedLeafError(f"cannot be rebuilt here: {fault!r}") from fault


def check_records(tree: m.Node, leaves: Sequence[m.Leaf], wanted: Container[int]) -> None:
    """Make registered types that plain values are all of, to see that it works; those that have
    one of the `wanted` leaves. The others are known when their bytes are here."""
    for path, node in records_of(tree):
        inside = [index for _, index in slots(node)]
        if not any(index in wanted for index in inside):
            continue
        if all(isinstance(leaves[index], (m.ValueLeaf, m.SizeLeaf)) for index in inside):
            # A plain value has no tensors that would be asked for.
            values = {n: make_leaf(leaves[n], path, without_bytes, 0) for n in inside}
            unflatten(node, values, path)


def images_of(rows: LeafRows, leaves: Marks) -> Marks:
    """Marks the images of the leaves that are marked."""
    found: Marks = np.zeros(rows.record.images, bool)
    found[rows.images[leaves[rows.leaves]]] = True
    others = [part.storage for n, leaf in rows.others.items() if leaves[n] for part in parts(leaf)]
    found[[image for image in others if image >= 0]] = True
    return found


def without_bytes(part: m.TensorLeaf, device: torch.device | str = "cpu") -> torch.Tensor:
    """An empty tensor, or a meta one."""
    return t.without_storage(part, strides_of(part), device)


def strides_of(part: m.TensorLeaf) -> tuple[int, ...]:
    return contiguous_strides(part.shape) if part.strides is None else part.strides


def copy_elements(destination: object, source: object) -> None:
    if isinstance(destination, np.ndarray) and isinstance(source, np.ndarray):
        np.copyto(destination, source, casting="no")
        return
    assert isinstance(destination, torch.Tensor) and isinstance(source, torch.Tensor)
    for dim, stride in enumerate(destination.stride()):
        if stride == 0:  # expanded on both sides: one element is all
            destination, source = destination.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    t.copy_values(destination.detach(), source.detach())
