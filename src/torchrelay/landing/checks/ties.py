"""Destinations that share memory: each byte of it must be offered by one place alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd, prod
from typing import NamedTuple

import numpy as np
import torch

from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Box, Comparisons
from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.strides import contiguous_strides, extent, overlapping, packed
from torchrelay.landing.checks.fit import ArrayFit, Fit, Found
from torchrelay.record import manifest as m
from torchrelay.state import tensors as t
from torchrelay.state.paths import Path
from torchrelay.state.tree import show


class _Claim(NamedTuple):
    """The bytes of a destination: where they lie, and where in the stream they come from.

    The last dimension counts the bytes of an element; strides are in bytes.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    source: int
    source_strides: tuple[int, ...]
    flags: int  # conj and neg bits that the two sides do not share

    @property
    def end(self) -> int:
        return self.address + extent(self.shape, self.strides)

    @property
    def overlaps_itself(self) -> bool:
        layout = packed(self.shape, self.strides)
        return layout is None or layout.numel != prod(self.shape)

    @property
    def straight(self) -> bool:
        """Whether memory and stream have one geometry, so that no byte has two sources."""
        return self.strides == self.source_strides and not self.flags


def check_ties(fits: Sequence[Found], chunks: Chunks) -> None:
    """Raise `MismatchError` where a byte of the destinations would have to hold two values."""
    found: dict[object, tuple[list[int], list[tuple[int, int]]]] = {}
    for index, (pair, path, *_) in enumerate(fits):
        mine = pair.destination
        device: object = "cpu"
        if isinstance(mine, torch.Tensor) and not mine.is_cpu:
            device = mine.device
        if isinstance(mine, torch.Tensor) and mine.is_contiguous():
            low = mine.data_ptr()
            high = low + mine.nbytes
        else:
            claim = _claim(pair, chunks)
            low, high = claim.address, claim.end
            if claim.overlaps_itself and not claim.straight:
                _check([(claim, path)])
        indices, spans = found.setdefault(device, ([], []))
        indices.append(index)
        spans.append((low, high))
    for indices, spans in found.values():
        for group in overlapping(spans):
            if len(group) > 1:
                members = [fits[indices[i]] for i in group]
                _check([(_claim(pair, chunks), path) for pair, path, *_ in members])


def host_spans(fits: Sequence[Found], chunks: Chunks) -> Iterator[tuple[int, int]]:
    """Addresses [low, high) of each destination in host memory."""
    for pair, *_ in fits:
        if isinstance(pair, ArrayFit) or pair.destination.is_cpu:
            claim = _claim(pair, chunks)
            yield claim.address, claim.end


def _claim(pair: Fit | ArrayFit, chunks: Chunks) -> _Claim:
    if isinstance(pair, ArrayFit):
        return _array_claim(pair, chunks)
    part, mine = pair.part, pair.destination
    size = mine.element_size()
    offered = contiguous_strides(part.shape) if part.strides is None else part.strides
    return _Claim(
        mine.data_ptr(),
        (*part.shape, size),
        (*(stride * size for stride in mine.stride()), 1),
        chunks.start_of(part.storage) + part.offset,
        (*(stride * size for stride in offered), 1),
        (t.flags_of(mine) ^ part.flags) & (m.CONJ | m.NEG),
    )


def _array_claim(pair: ArrayFit, chunks: Chunks) -> _Claim:
    leaf, mine = pair
    size = mine.itemsize
    shape = leaf.shape[::-1] if leaf.fortran else leaf.shape
    offered = contiguous_strides(shape)[::-1] if leaf.fortran else contiguous_strides(shape)
    address: int = mine.__array_interface__["data"][0]
    source = chunks.start_of(leaf.storage)
    strides, source_strides = list(mine.strides), [stride * size for stride in offered]
    for dim, stride in enumerate(strides):
        if stride < 0:  # walk it from its other end
            address += (leaf.shape[dim] - 1) * stride
            source += (leaf.shape[dim] - 1) * source_strides[dim]
            strides[dim], source_strides[dim] = -stride, -source_strides[dim]
    return _Claim(
        address, (*leaf.shape, size), (*strides, 1), source, (*source_strides, 1), flags=0
    )


def _check(claims: list[tuple[_Claim, Path]]) -> None:
    first = claims[0][0]
    if all(claim == first for claim, _ in claims) and not first.overlaps_itself:
        return
    shift = first.source - first.address
    if all(claim.straight and claim.source - claim.address == shift for claim, _ in claims):
        return
    if _are_apart([claim for claim, _ in claims]):
        return
    low = min(claim.address for claim, _ in claims)
    high = max(claim.end for claim, _ in claims)
    unit = 0  # bytes that always go together: all is counted in these, to keep the map small
    for claim, _ in claims:
        unit = gcd(unit, claim.address - low, claim.shape[-1], *claim.strides[:-1])
    sources = np.full((high - low) // unit, -1, dtype=np.int64)
    for claim, path in claims:
        wanted = np.full((), claim.source, dtype=np.int64)
        units = claim.shape[-1] // unit
        steps = (*claim.source_strides[:-1], unit)
        for size, step in zip((*claim.shape[:-1], units), steps, strict=True):
            wanted = wanted[..., None] + np.arange(size, dtype=np.int64) * step
        wanted = wanted * 16 + claim.flags
        here = np.lib.stride_tricks.as_strided(
            sources[(claim.address - low) // unit :],
            shape=wanted.shape,
            strides=(*(stride // unit * 8 for stride in claim.strides[:-1]), 8),
        )
        taken = bool(np.any((here != -1) & (here != wanted)))
        here[...] = wanted
        if taken or not np.array_equal(here, wanted):
            raise MismatchError(
                "the destination shares memory with another or with itself (a tied, expanded or "
                "overlapping view), and would have to take different bytes in one place: what is "
                "offered is not shared that way",
                path=show(path),
            )


def _are_apart(claims: Sequence[_Claim]) -> bool:
    """Whether claims are boxes of one array that share no byte, as the columns of a matrix are.
    False says nothing: they may still be apart."""
    low = min(claim.address for claim in claims)
    strides = sorted(claims[0].strides, reverse=True)
    if 0 in strides or len(set(strides)) < len(strides):
        return False
    boxes: list[Box] = []
    for claim in claims:
        sizes = dict(zip(claim.strides, claim.shape, strict=True))
        if sorted(sizes, reverse=True) != strides:
            return False
        offsets, rest, wider = [], claim.address - low, None
        for stride in strides:
            offset, rest = divmod(rest, stride)
            if wider is not None and (offset + sizes[stride]) * stride > wider:
                return False  # it reaches into the next row
            offsets.append(offset)
            wider = stride
        boxes.append((tuple(offsets), tuple(sizes[stride] for stride in strides)))
    return not Comparisons().overlap(boxes)
