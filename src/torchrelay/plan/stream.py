"""A stream of bytes made up of live memory, read from or written to in any range."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import islice
from operator import itemgetter

import numpy as np
import torch

from torchrelay.geometry.runs import Copy, Runs
from torchrelay.plan.region import Region


class Stream:
    """Host memory by address (`host`), and what is on a device or not in one run (`elsewhere`),
    at positions that ascend and do not overlap.

    The bytes between them read as zeros and are dropped when written.
    """

    def __init__(
        self,
        host: Runs,
        regions: list[tuple[int, Region]],
        nbytes: int,
        device: Runs | None = None,
        far: Callable[[], Iterable[tuple[int, torch.Tensor]]] = tuple,
    ) -> None:
        self.nbytes = nbytes
        self.host = host
        self.device = device or Runs([], [], [])  # contiguous tensors on GPUs, by address
        self._far = far  # gives the same tensors, each with its position
        self.regions = regions  # all others

    @cached_property
    def elsewhere(self) -> list[tuple[int, Region]]:
        """Regions without an address on this host, in the order of the stream."""
        found = [(at, Region.row_major(tensor)) for at, tensor in self._far()]
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
    def of(cls, placed: Iterable[tuple[int, Region]], nbytes: int) -> Stream:
        """A stream of regions, each with its position. The caller keeps their memory alive."""
        pieces = list(placed)
        host = [(at, region.address, region.nbytes) for at, region in pieces if region.address]
        runs = Runs(*([piece[n] for piece in host] for n in range(3)))
        return cls(runs, [piece for piece in pieces if not piece[1].address], nbytes)

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

    def write(self, start: int, stop: int, data: torch.Tensor) -> None:
        """Copy the host buffer `data` to bytes [start, stop)."""
        self.host.scatter(start, stop, data.data_ptr())
        for low, high, at, region in self.pieces(start, stop):
            region.write(low - at, high - at, data[low - start :])
