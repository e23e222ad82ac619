"""What this rank has of a state, for ranks that take a part of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchrelay.errors import RemoteProtocolError
from torchrelay.plan.outline import Named, outline
from torchrelay.record.checkpoint.places import ALIGN
from torchrelay.record.checkpoint.schema import Checkpoint, DataFile
from torchrelay.record.checkpoint.stored import Shard, StoredTensor, Tensors
from torchrelay.record.pause import gc_paused
from torchrelay.resharding.record import LiveRank, encode
from torchrelay.state import tensors as t
from torchrelay.state.local_parts import cut, local_parts
from torchrelay.stores.shares.replicas import replicas_of
from torchrelay.transports.protocol.wire import Cut
from torchrelay.version import __version__


class Holding:
    """This rank's part of a state: `record` describes it, `select` gives boxes of its tensors.

    It holds on to the tensors. `UnsupportedLeafError` names a leaf that cannot be cut.
    """

    def __init__(self, state: object, step: int | None) -> None:
        self._tensors: list[torch.Tensor] = []
        with gc_paused():
            named = outline(state)
            part = self._part(named, step or 0)
            self.record = encode(LiveRank(step=step, part=part, replicas=replicas_of(named)))

    def _part(self, named: Named, step: int) -> Checkpoint:
        stored: list[StoredTensor] = []
        end = 0
        for name, tensor in named.tensors.items():
            shards = []
            for part in sorted(local_parts(tensor), key=lambda part: part.box):
                if part.tensor.numel():
                    shards.append(Shard(*part.box, 0, end))
                    self._tensors.append(part.tensor)
                    end += -(-part.tensor.nbytes // ALIGN) * ALIGN
            shape = tuple(tensor.size())
            stored.append(StoredTensor(name, t.NAMES[tensor.dtype], shape, shards))
        return Checkpoint(
            step=step,
            time="",
            torch="",
            torchrelay=__version__,
            outlines=(named.outline,),
            ranks=(0,),
            tensors=Tensors.of(stored),
            files=(DataFile("memory", max(1, end), max(1, end), b""),),
        )

    def select(self, cuts: Sequence[Cut]) -> list[torch.Tensor]:
        """Views of the boxes that another rank has asked for."""
        return [self._view(one) for one in cuts]

    def _view(self, asked: Cut) -> torch.Tensor:
        if asked.box >= len(self._tensors):
            raise RemoteProtocolError(f"box {asked.box} was asked for, of {len(self._tensors)}")
        tensor = self._tensors[asked.box]
        if not len(asked.offsets) == len(asked.sizes) == tensor.dim():
            raise RemoteProtocolError("a box of other dimensions was asked for")
        for offset, size, whole in zip(asked.offsets, asked.sizes, tensor.shape, strict=True):
            if offset + size > whole:
                raise RemoteProtocolError("a box that reaches out of its tensor was asked for")
        return cut(tensor, asked.offsets, asked.sizes)
