"""Copying runs of bytes between flat buffers and strided memory.

A `Region` is the memory of one leaf walked in the order of its image: bytes [a, b) of the image
can be read from it or written to it, whatever its strides and device are. Nothing outside the
leaf's own elements is ever touched. A `Stream` is made up of regions and host memory.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import prod
from operator import itemgetter

import numpy as np
import torch

from torchrelay.describing.pieces import NO_PIECES, Pieces
from torchrelay.geometry.runs import Copy, Runs
from torchrelay.geometry.strides import contiguous_strides, linear_boxes
from torchrelay.state.tensors import byte_offset, copy_all, raw


class Region:
    """Elements of a storage, in a fixed order, as a run of bytes.

    `address` says where the bytes lie, if they are one run of host memory, and is 0 otherwise.
    Holds `keep` alive, since such regions are known by address only. Without `elements`, those of a
    region that is not one run, and without an address it is all of a contiguous tensor of a device.
    """

    __slots__ = ("_is_run", "_itemsize", "_view", "address", "keep", "nbytes")

    def __init__(
        self,
        keep: torch.Tensor,
        nbytes: int,
        address: int = 0,
        elements: torch.Tensor | None = None,
    ) -> None:
        self.keep, self.nbytes, self.address = keep, nbytes, address
        self._view, self._is_run = elements, elements is None
        self._itemsize = 1 if elements is None else elements.element_size()

    @classmethod
    def of(
        cls,
        tensor: torch.Tensor,
        shape: Sequence[int],
        strides: Sequence[int],
        order: Sequence[int],
    ) -> Region:
        """`order` lists the dimensions that own memory from slowest to fastest; the others are
        walked at index 0 alone."""
        size = tensor.element_size()
        dims, steps = tuple([shape[n] for n in order]), tuple([strides[n] for n in order])
        nbytes = prod(dims) * size
        if steps == contiguous_strides(dims):
            # data_ptr() reads through conj and neg bits, which is what is wanted.
            return cls(tensor, nbytes, tensor.data_ptr() if tensor.is_cpu else 0)
        storage = tensor.untyped_storage()
        return cls(tensor, nbytes, 0, raw(storage, byte_offset(tensor), size, dims, steps))

    @classmethod
    def row_major(cls, tensor: torch.Tensor) -> Region:
        """All elements of a tensor in row-major order. Its conj and neg bits do not count."""
        if (tensor.is_cpu or tensor.is_cuda) and tensor.is_contiguous():
            return cls(tensor, tensor.nbytes, tensor.data_ptr() if tensor.is_cpu else 0)
        order = [dim for dim, size in enumerate(tensor.shape) if size > 1]
        return cls.of(tensor, tensor.shape, tensor.stride(), order)

    def as_bytes(self) -> Region:
        """A region of the same bytes, as they lie if they are one run, else copied to one."""
        memory = self._seen if self._is_run else self.keep.new_empty(self.nbytes, dtype=torch.uint8)
        if not self._is_run:
            for box, flat in self.boxes(0, self.nbytes, memory):
                flat.copy_(box)
        return Region.row_major(memory)

    def run(self, start: int, stop: int) -> torch.Tensor | None:
        """Bytes [start, stop) where they lie on a device, if they are one run there."""
        if not self._is_run or self.keep.is_cpu:
            return None
        view = self._seen
        return view if stop - start == self.nbytes else view[start:stop]

    @property
    def device_address(self) -> int:
        """Where the bytes lie, if they are one run of a GPU's memory; else 0."""
        return self.keep.data_ptr() if self._is_run and self.keep.is_cuda else 0

    @property
    def _seen(self) -> torch.Tensor:
        """The elements of a region without an address. A single run makes its view at first use:
        many are copied by their address alone."""
        if self._view is None:
            storage, offset = self.keep.untyped_storage(), byte_offset(self.keep)
            self._view = raw(storage, offset, 1, (self.nbytes,), (1,))
        return self._view

    def read(self, start: int, stop: int, out: torch.Tensor, *, wait: bool = True) -> None:
        """Copy bytes [start, stop) of the region to the host buffer `out`. Without `wait`, a GPU
        is asked to, where that buffer is pinned."""
        if self.address:
            ctypes.memmove(out.data_ptr(), self.address + start, stop - start)
            return
        for box, flat in self.boxes(start, stop, out):
            flat.copy_(box, non_blocking=not wait)

    def write(self, start: int, stop: int, data: torch.Tensor) -> None:
        """Copy the buffer `data` to bytes [start, stop) of the region."""
        if self.address:
            host = data[: stop - start].cpu()
            ctypes.memmove(self.address + start, host.data_ptr(), stop - start)
            return
        for box, flat in self.boxes(start, stop, data):
            box.copy_(flat)

    def boxes(
        self, start: int, stop: int, buffer: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of a region that is known by its view (no `address`), with their bytes in `buffer`
        as the same elements."""
        view, size = self._seen, self._itemsize
        items = buffer[: stop - start].view(view.dtype)
        first = start // size
        pairs = []
        for at, index in linear_boxes(view.shape, first, stop // size):
            box = view[index]
            flat = items[at - first : at - first + box.numel()].view(box.shape)
            pairs.append((box, flat))
        return pairs


_ALONE = 1 << 20  # bytes from which a copy of its own is as fast as one of many


def copy_boxes(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second to its first, all of them integers; small ones of a kind by one call."""
    together: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for to, source in pairs:
        if to.nbytes >= _ALONE or to.device != source.device:
            to.copy_(source)
        else:
            together.setdefault((to.device, to.dtype), []).append((to, source))
    for group in together.values():
        copy_all(*map(list, zip(*group, strict=True)))


@dataclass(eq=False)
class Stream:
    """Host memory by address (`host`), and what is on a device or not in one run (`elsewhere`),
    at positions that ascend and do not overlap.

    The bytes between them read as zeros and are dropped when written.
    """

    host: Runs
    regions: list[tuple[int, Region]]  # all that is neither in `host` nor in `on_device`
    nbytes: int
    on_device: Pieces = NO_PIECES  # runs of memory of devices

    @cached_property
    def device(self) -> Runs:
        """Runs of device memory, by address."""
        return self.on_device.runs

    @cached_property
    def elsewhere(self) -> list[tuple[int, Region]]:
        """Regions without an address on this host, in the order of the stream."""
        found = [(at, Region.row_major(tensor)) for at, tensor in self.on_device.tensors()]
        return sorted([*self.regions, *found], key=itemgetter(0))

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """The bytes [low, high) that are not filled: what alignment leaves open."""
        regions = [(at, at + region.nbytes) for at, region in self.elsewhere]
        table = np.array([*regions, (self.nbytes, self.nbytes)], np.uint64)
        lows = np.concatenate([self.host.starts, table[:, 0]])
        highs = np.concatenate([self.host.stops, table[:, 1]])
        order = np.argsort(lows)
        lows, highs = lows[order], np.concatenate([np.zeros(1, np.uint64), highs[order][:-1]])
        open_ = lows > highs
        return list(zip(highs[open_].tolist(), lows[open_].tolist(), strict=True))

    @classmethod
    def of(
        cls,
        placed: Iterable[tuple[int, Region]],
        nbytes: int,
        *more: Runs,
        pieces: Pieces = NO_PIECES,
    ) -> Stream:
        """A stream of regions, each with its position, of `more` host memory, and of `pieces`. The
        caller keeps the memory on the host alive."""
        regions = list(placed)
        host = [(at, region.address, region.nbytes) for at, region in regions if region.address]
        runs = Runs.merged(Runs.of(host), pieces.some(pieces.on_host).runs, *more)
        others = [one for one in regions if not one[1].address]
        return cls(runs, others, nbytes, pieces.some(~pieces.on_host))

    @property
    def on_host(self) -> bool:
        """Whether every byte lies in host memory that can be reached by address."""
        return not self.elsewhere and not self.gaps

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, Region]]:
        """What regions have of [start, stop): that range, the region's position, the region."""
        first = bisect_right(self.elsewhere, start, key=lambda piece: piece[0] + piece[1].nbytes)
        for at, region in islice(self.elsewhere, first, None):
            if at >= stop:
                return
            yield max(start, at), min(stop, at + region.nbytes), at, region

    @cached_property
    def devices(self) -> set[torch.device]:
        """The GPUs that have some of it."""
        return {region.keep.device for _, region in self.elsewhere if region.keep.is_cuda}

    def view(self, start: int, stop: int, device: str) -> torch.Tensor | None:
        """Bytes [start, stop) where they lie, if they are one run of that device's memory. They do
        not stay alive by this."""
        if device == "cpu":
            address = self.host.whole(start, stop)
            if address is None:
                return None
            memory = (ctypes.c_ubyte * (stop - start)).from_address(address)
            return torch.frombuffer(memory, dtype=torch.uint8)
        for low, high, at, region in self.pieces(start, stop):
            if (low, high) == (start, stop) and region.keep.device.type == device:
                return region.run(low - at, high - at)
        return None

    def read(
        self,
        start: int,
        stop: int,
        out: torch.Tensor,
        copy: Copy | None = None,
        *,
        devices: bool = True,
    ) -> None:
        """Copy bytes [start, stop) to the buffer `out`, on the host or a device.

        `copy` is used for host memory, if there is a better way than one piece after the other.
        Without `devices`, what lies on GPUs is left out: `ask_devices` brings that.
        """
        base = out.data_ptr()
        if out.is_cpu:
            self.host.gather(start, stop, base, copy)
        elif self.host.reaches(start, stop):
            host = torch.empty_like(out, device="cpu")
            self.read(start, stop, host, copy)
            out.copy_(host)
            return
        for low, high, at, region in self.pieces(start, stop):
            if devices or not region.keep.is_cuda:
                region.read(low - at, high - at, out[low - start :])
        first = bisect_right(self.gaps, start, key=itemgetter(1))
        for low, high in islice(self.gaps, first, None):
            if low >= stop:
                break
            low, high = max(start, low), min(stop, high)
            if out.is_cpu:
                ctypes.memset(base + low - start, 0, high - low)
            else:
                out[low - start : high - start].zero_()

    def ask_devices(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Ask GPUs to copy what they have of [start, stop) to the pinned buffer `out`. It is there
        when the current stream of each has got so far."""
        for low, high, at, region in self.pieces(start, stop):
            if region.keep.is_cuda:
                region.read(low - at, high - at, out[low - start :], wait=False)

    def write(self, start: int, stop: int, data: torch.Tensor, copy: Copy | None = None) -> None:
        """Copy the buffer `data`, on the host or a device, to bytes [start, stop). `copy` is as for
        `read`."""
        if self.host.reaches(start, stop):
            here = data.cpu()
            self.host.scatter(start, stop, here.data_ptr(), copy)
        for low, high, at, region in self.pieces(start, stop):
            region.write(low - at, high - at, data[low - start :])
