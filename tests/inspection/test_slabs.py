"""A tensor comes out of its boxes whole, in order, and in pieces no larger than asked for."""

from __future__ import annotations

import tracemalloc
from itertools import product

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.held_source import BoxOf, HeldSource
from torchrelay.inspection.slabs import slabs
from torchrelay.inspection.statistics import histogram, statistics


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[BoxOf]]:
    """A shape, and a grid of boxes that cover it once, in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    edges = []
    for length in shape:
        inner = draw(st.sets(st.integers(1, length), max_size=2)) - {length}
        edges.append([0, *sorted(inner), length])
    boxes = []
    for place in product(*(range(len(edge) - 1) for edge in edges)):
        offsets = tuple(edge[at] for edge, at in zip(edges, place, strict=True))
        sizes = tuple(edge[at + 1] - edge[at] for edge, at in zip(edges, place, strict=True))
        boxes.append((offsets, sizes))
    return shape, draw(st.permutations(boxes))


@given(cuts(), st.sampled_from([torch.int64, torch.bfloat16]), st.integers(1, 200))
def test_slabs_are_the_tensor_in_order(
    cut: tuple[tuple[int, ...], list[BoxOf]], dtype: torch.dtype, most: int
) -> None:
    shape, boxes = cut
    tensor = torch.randn(shape).mul(100).to(dtype)
    source = HeldSource({"t": tensor}, {"t": boxes})
    found = list(slabs(source, source.contents.tensors[0], most))
    joined = np.concatenate(found)
    assert joined.tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert max(slab.size for slab in found) <= max(most, dtype.itemsize)
    assert source.largest <= max(most, dtype.itemsize)


def test_a_tensor_without_elements_has_no_slab() -> None:
    source = HeldSource({"t": torch.empty(0, 3)})
    assert list(slabs(source, source.contents.tensors[0])) == []


def test_statistics_of_a_large_tensor_take_little_memory() -> None:
    tensor = torch.zeros(1, 20_000_000)  # 80 MB in a single row
    source = HeldSource({"t": tensor}, {"t": [((0, 0), (1, 10)), ((0, 10), (1, 19_999_990))]})
    tracemalloc.start()
    try:
        known = statistics(source, source.contents.tensors[0])
        assert known is not None
        histogram(source, source.contents.tensors[0], known)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 8 << 20 < peak < 72 << 20
