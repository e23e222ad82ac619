"""A stream of bytes made up of live memory, read from or written to in any range."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from operator import itemgetter

import torch

from torchrelay.state.memory import Region
from torchrelay.state.runs import Runs


class Stream:
    """Host memory by address (`host`), and regions that are on a device or not in one run
    (`elsewhere`, with their positions), at positions that ascend and do not overlap.

    What lies between them reads as zeros and is dropped when written.
    """

    def __init__(self, host: Runs, elsewhere: list[tuple[int, Region]], nbytes: int) -> None:
        self.nbytes = nbytes
        self.host = host
        self.elsewhere = elsewhere
        filled = [(at, at + region.nbytes) for at, region in elsewhere]
        filled += [(at, at + size) for at, _, size in host.within(0, nbytes)]
        self._gaps = _gaps(filled, nbytes)

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
        return not self.elsewhere and not self._gaps

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, Region]]:
        """What regions have of [start, stop): that range, the region's position, the region."""
        first = bisect_right(self.elsewhere, start, key=lambda piece: piece[0] + piece[1].nbytes)
        for at, region in islice(self.elsewhere, first, None):
            if at >= stop:
                return
            yield max(start, at), min(stop, at + region.nbytes), at, region

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Copy bytes [start, stop) to the buffer `out`, on the host or a device."""
        base = out.data_ptr()
        if out.is_cpu:
            self.host.gather(start, stop, base)
        elif self.host.reaches(start, stop):
            host = torch.empty_like(out, device="cpu")
            self.read(start, stop, host)
            out.copy_(host)
            return
        for low, high, at, region in self.pieces(start, stop):
            region.read(low - at, high - at, out[low - start :])
        first = bisect_right(self._gaps, start, key=itemgetter(1))
        for low, high in islice(self._gaps, first, None):
            if low >= stop:
                break
            low, high = max(start, low), min(stop, high)
            if out.is_cpu:
                ctypes.memset(base + low - start, 0, high - low)
            else:
                out[low - start : high - start].zero_()

    def write(self, start: int, stop: int, data: torch.Tensor) -> None:
        """Copy the host buffer `data` to bytes [start, stop)."""
        self.host.scatter(start, stop, data.data_ptr())
        for low, high, at, region in self.pieces(start, stop):
            region.write(low - at, high - at, data[low - start :])


def _gaps(filled: list[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """The bytes [low, high) of a stream that are not filled: what alignment leaves open."""
    ends = [(0, 0), *sorted(filled), (end, end)]
    return [(high, low) for (_, high), (low, _) in pairwise(ends) if low > high]
