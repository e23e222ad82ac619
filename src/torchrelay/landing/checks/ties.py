"""Destinations that share memory: each byte of it must come from one byte of the stream.

A destination has `a` (4 floats at 0x1000), its tie `b` (the same memory), and `c`, the transposed
view of a matrix `d` (2 x 2 floats at 0x2000). Each is a claim of memory for bytes of the stream;
strides are in bytes:

    leaf   memory   shape     strides    offered tied: source      offered singly: source
    a      0x1000   (4,)      (4,)       0                         0
    b      0x1000   (4,)      (4,)       0: the same claim, fine   16: byte 0x1000 has two sources
    d      0x2000   (2, 2)    (8, 4)     16, strides (8, 4)        32, strides (8, 4)
    c      0x2000   (2, 2)    (4, 8)     16, strides (4, 8): fine  48, strides (8, 4): two sources

Claims that reach into each other are compared: equal ones agree, and so do those that move memory
and source by one distance, and boxes of one array that share no byte. Of all others each byte is
looked up.

An object in place may write more memory when its state has landed. Those values come from no byte
of the stream: each of its tensors counts as bytes of their own, beyond the stream's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrelay.describing.pieces import Pieces
from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Box, Comparisons
from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.runs import reaching
from torchrelay.geometry.strides import contiguous_strides, extent, overlapping, packed
from torchrelay.landing.checks.fit import ArrayFit, Fit, Found
from torchrelay.state import tensors as t
from torchrelay.state.objects import OwnWrite
from torchrelay.state.paths import Path
from torchrelay.state.tree import show

_ELEMENT_BYTES = 16  # of the largest dtype


class _Claim(NamedTuple):
    """The bytes of a destination: where they lie, and where in the stream they come from.

    The last dimension counts the bytes of an element; strides are in bytes.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    source: int
    source_strides: tuple[int, ...]
    flags: int  # the conj and neg bits of the destination

    @property
    def end(self) -> int:
        return self.address + extent(self.shape, self.strides)

    @property
    def overlaps_itself(self) -> bool:
        layout = packed(self.shape, self.strides)
        return layout is None or layout.numel != prod(self.shape)

    @property
    def is_direct(self) -> bool:
        """Whether memory and stream have one geometry, so that no byte has two sources."""
        return self.strides == self.source_strides and not self.flags


class _Claimed(NamedTuple):
    """A claim, the path of the destination, and its address space: host and GPUs have one."""

    claim: _Claim
    path: Path
    space: torch.device | None


def check_ties(
    plain: Pieces,
    fits: Sequence[Found],
    writes: Sequence[tuple[Path, OwnWrite]],
    chunks: Chunks,
    path_of: Callable[[int], Path],
) -> None:
    """Raise `MismatchError` where a byte of the destinations would have to hold two values.

    `plain` has those that are one run of memory; two of them share some only if they are one
    leaf, whose path is asked for. `writes` are made by the objects at these paths.
    """
    if not fits and not writes and np.bincount(plain.keep, minlength=1).max() < 2:
        return
    claimed = [
        _Claimed(_claim(pair, chunks), path, _space(pair.destination)) for pair, path, _ in fits
    ]
    for one in claimed:
        if one.claim.overlaps_itself and not one.claim.is_direct:
            _check([one])
    own = [*_own_claims(writes, chunks.stream_bytes)]
    for one in own:
        if one.claim.overlaps_itself:
            _check([one])
    claimed += own
    spaces: dict[object, list[_Claimed]] = {None: []}
    for one in claimed:
        spaces.setdefault(one.space, []).append(one)
    for space, some in spaces.items():
        rows = plain if space is None else plain.some(np.zeros(0, np.intp))
        spans = [(claim.address, claim.end) for claim, *_ in some]
        lows, highs = np.array(spans, np.uint64).reshape(-1, 2).T
        lows = np.concatenate([rows.address, lows])
        highs = np.concatenate([rows.address + rows.nbytes, highs])
        meeting = np.flatnonzero(reaching(lows, highs))
        spans = list(zip(lows[meeting].tolist(), highs[meeting].tolist(), strict=True))
        for group in overlapping(spans):
            members = []
            for at in meeting[group].tolist():
                if at < len(rows):
                    path = path_of(int(rows.keep[at]))
                    members.append(_Claimed(_plain_claim(rows, at), path, space=None))
                else:
                    members.append(some[at - len(rows)])
            _check(members)


def _space(memory: torch.Tensor | np.ndarray[Any, Any]) -> torch.device | None:
    if isinstance(memory, np.ndarray) or memory.is_cpu or memory.is_cuda:
        return None
    return memory.device


def _own_claims(writes: Iterable[tuple[Path, OwnWrite]], end: int) -> Iterator[_Claimed]:
    """Claims for what objects write: bytes of a tensor as if it was stored at rest after `end`, in
    the dtype that it is converted to. Zeros come from one place."""
    zeros, end = end, end + _ELEMENT_BYTES
    begins: dict[object, int] = {}
    for path, write in writes:
        memory, size = write.memory, write.memory.element_size()
        source, steps = zeros, (0,) * memory.ndim
        if write.name is not None:
            key = path, write.name, memory.dtype
            if key not in begins:
                begins[key], end = end, end + prod(write.shape) * size
            strides = contiguous_strides(write.shape)
            steps = tuple([stride * size for stride in strides])
            source = begins[key] + sum(
                offset * step for offset, step in zip(write.offsets, steps, strict=True)
            )
        claim = _Claim(
            memory.data_ptr(),
            (*memory.shape, size),
            (*(stride * size for stride in memory.stride()), 1),
            source,
            (*steps, 1),
            _sign_bits(memory),
        )
        yield _Claimed(claim, (*path, write.parameter), _space(memory))


def _plain_claim(rows: Pieces, row: int) -> _Claim:
    address, nbytes, at = (int(column[row]) for column in (rows.address, rows.nbytes, rows.at))
    return _Claim(address, (nbytes,), (1,), at, (1,), flags=0)


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
        _sign_bits(mine),
    )


def _sign_bits(memory: torch.Tensor) -> int:
    conj, neg = t.lazy_bits(memory)
    return conj + 2 * neg


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


def _check(some: Sequence[_Claimed]) -> None:
    """Raise `MismatchError` if these claims, which reach into each other, do not agree."""
    wrong = _conflicting([claim for claim, *_ in some])
    if wrong is None:
        return
    path, mine = show(some[wrong].path), some[wrong].claim
    others = [] if _conflicting([mine]) is not None else some[:wrong]
    other = next((one.path for one in others if _conflicting([one.claim, mine]) is not None), None)
    here = "" if other is None else f"{show(other)} and {path} go to the same memory; "
    raise MismatchError(
        f"{here}the destination shares memory with another or with itself (a tied, expanded or "
        "overlapping view), and would have to take different bytes in one place: what is "
        "offered is not shared that way",
        path=path,
    )


def _conflicting(claims: Sequence[_Claim]) -> int | None:
    """The first of some claims for which a byte would have to hold two values; None if all of them
    agree."""
    first = claims[0]
    if all(claim == first for claim in claims) and not first.overlaps_itself:
        return None
    shift = first.source - first.address
    if all(claim.is_direct and claim.source - claim.address == shift for claim in claims):
        return None
    if _are_disjoint(claims):
        return None
    return _first_double(claims)


def _first_double(claims: Sequence[_Claim]) -> int | None:
    """The first claim that has a byte with another source, found byte by byte.

    Bytes that always go together are one unit, to keep the map small: of claims in float32 at
    0x1000 and 0x1008, a unit is 4 bytes. `sources` has what each unit of the memory comes from, and
    each claim writes its own: the first that meets another value, or overwrites its own, conflicts.
    """
    low = min(claim.address for claim in claims)
    high = max(claim.end for claim in claims)
    unit = 0
    for claim in claims:
        unit = gcd(unit, claim.address - low, claim.shape[-1], *claim.strides[:-1])
    sources = np.full((high - low) // unit, -1, dtype=np.int64)
    for number, claim in enumerate(claims):
        wanted = _sources_of(claim, unit)
        here = np.lib.stride_tricks.as_strided(
            sources[(claim.address - low) // unit :],
            shape=wanted.shape,
            strides=(*(stride // unit * 8 for stride in claim.strides[:-1]), 8),
        )
        taken = bool(np.any((here != -1) & (here != wanted)))
        here[...] = wanted
        if taken or not np.array_equal(here, wanted):
            return number
    return None


def _sources_of(claim: _Claim, unit: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where in the stream each unit of a claim comes from, and with which flags."""
    wanted = np.full((), claim.source, dtype=np.int64)
    steps = (*claim.source_strides[:-1], unit)
    sizes = (*claim.shape[:-1], claim.shape[-1] // unit)
    for size, step in zip(sizes, steps, strict=True):
        wanted = wanted[..., None] + np.arange(size, dtype=np.int64) * step
    found: np.ndarray[Any, np.dtype[np.int64]] = wanted * 16 + claim.flags
    return found


def _are_disjoint(claims: Sequence[_Claim]) -> bool:
    """Whether claims are boxes of one array that share no byte, as the columns of a matrix are.
    False says nothing: they may still be disjoint."""
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
        boxes.append((tuple(offsets), tuple([sizes[stride] for stride in strides])))
    return not Comparisons().overlap(boxes)
