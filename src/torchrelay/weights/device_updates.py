"""Updates of tensors on a GPU from memory of that GPU, each by one launch.

The first update is planned and landed as any other. Its copies are remembered: the next version of
the same layout goes to the same tensors by the same copies, and its record is not even read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrelay.errors import PeerLostError
from torchrelay.geometry.runs import Column, Moves
from torchrelay.memory.gpu import kernels
from torchrelay.memory.gpu.side import on_side_stream
from torchrelay.sources.device_source import DeviceLentStep, LentDevice
from torchrelay.state.backing import missing_memory

Fingerprint = list[tuple[int, int, int, torch.dtype]]


class _KnownCopies(NamedTuple):
    """Copies from one lent allocation: the volume and the byte in it, the address, and bytes."""

    layout: str
    places: Fingerprint
    names: list[str]
    volume: Any
    starts: Column
    destinations: Column
    nbytes: Column


class DeviceUpdates:
    """Of one destination."""

    def __init__(self, into: object) -> None:
        self._into = into
        self._known: _KnownCopies | None = None

    def learn(self, step: DeviceLentStep) -> None:
        """A step was landed. Its copies are remembered, if there was nothing but copies of runs
        from one server to tensors in plain containers."""
        places = _fingerprint(self._into)
        lease = step.only
        self._known = None
        if lease is None or not lease.layout or not step.runs or step.others or places is None:
            return
        names = sorted(lease.volumes)
        number = {name: index for index, name in enumerate(names)}
        volume = np.array([number[run.file] for run in step.runs], np.int64)
        columns = [[run.start, run.address, run.nbytes] for run in step.runs]
        starts, destinations, nbytes = np.array(columns, np.uint64).T
        if not _inside(destinations, nbytes, places):
            return  # a landing may hold bytes back in memory of its own
        self._known = _KnownCopies(
            lease.layout, places, names, volume, starts, destinations, nbytes
        )

    def fits(self, lent: LentDevice) -> bool:
        """Whether what is lent goes to the destination by the copies that are known."""
        known = self._known
        if known is None or not lent.lease.layout or lent.lease.layout != known.layout:
            return False
        return _fingerprint(self._into) == known.places

    def copy(self, lent: LentDevice) -> int:
        """Bring the destination to a version that `fits`; the bytes of it. `PeerLostError`, and
        nothing is written, if it is no longer lent."""
        known = self._known
        assert known is not None
        begins = np.array([lent.lease.volumes[name][0] for name in known.names], np.uint64)
        sources = begins[known.volume] + known.starts + np.uint64(lent.address)
        moves = Moves(
            np.arange(len(sources), dtype=np.uint64), sources, known.destinations, known.nbytes
        )
        torch.cuda.synchronize(lent.device)  # other streams may use what is overwritten
        if not lent.holds:
            raise PeerLostError(
                "the publisher was lost before its memory was read; nothing was written. Update "
                "again when it is back",
                step=lent.lease.step,
                phase="data",
            )
        with torch.cuda.device(lent.device), on_side_stream():
            kernels.copy(moves, lent.device)
        return int(known.nbytes.sum())

    def close(self) -> None:
        self._known = None


def _inside(addresses: Column, nbytes: Column, places: Fingerprint) -> bool:
    """Whether each of these ranges lies in the memory of one tensor."""
    rows = sorted(
        (address, address + count * dtype.itemsize) for _, address, count, dtype in places
    )
    lows, highs = np.array(rows, np.uint64).T
    at = np.searchsorted(lows, addresses, side="right").astype(np.int64) - 1
    return bool((at >= 0).all() and (addresses + nbytes <= highs[at]).all())


def _fingerprint(into: object) -> Fingerprint | None:
    """The tensors of a destination and their memory; None where it has anything but contiguous
    tensors of a GPU in dicts, lists and tuples."""
    try:
        return [(id(one), one.data_ptr(), one.numel(), one.dtype) for one in _tensors_on_gpu(into)]
    except TypeError:
        return None


def _tensors_on_gpu(into: object) -> Iterator[torch.Tensor]:
    todo = [into]
    while todo:
        one = todo.pop()
        if isinstance(one, torch.Tensor):
            plain = type(one) in (torch.Tensor, torch.nn.Parameter)
            whole = plain and one.is_cuda and one.is_contiguous()
            if not whole or missing_memory(one) is not None:
                raise TypeError(type(one))
            yield one
        elif isinstance(one, dict):
            todo.extend(one.values())
        elif isinstance(one, (list, tuple)):
            todo.extend(one)
        else:
            raise TypeError(type(one))
