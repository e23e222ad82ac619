"""What this rank has of a state, for ranks that take a part of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from torchrelay.errors import RemoteProtocolError
from torchrelay.resharding.record import RankBox, RankRecord, encode
from torchrelay.state.outline import outline
from torchrelay.stores.planning import replicas_of
from torchrelay.stores.plans import resolve_items
from torchrelay.transports.wire import Cut


def shared(make: Callable[[], Holding]) -> Callable[[], Holding]:
    """A function that makes a holding when it is first called, and gives the same ever after."""
    made: list[Holding] = []
    lock = threading.Lock()

    def get() -> Holding:
        with lock:
            if not made:
                made.append(make())
            return made[0]

    return get


class Holding:
    """This rank's part of a state: `record` describes it, `select` gives boxes of its tensors.

    It holds on to the tensors. `UnsupportedLeafError` names a leaf that cannot be cut.
    """

    def __init__(self, state: object, step: int | None) -> None:
        named = outline(state)
        # The coordinator's plan has all that a rank has; no other one has its plain tensors.
        planner = DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(named.tensors), None, is_coordinator=True)
        drafted = resolve_items(planner.create_local_plan().items, planner, named.tops)
        self._tensors = drafted.tensors
        boxes = tuple(RankBox(*entry[:5]) for entry in drafted.entries)
        self.record = encode(
            RankRecord(step=step, outline=named.outline, boxes=boxes, plain=replicas_of(named))
        )

    def select(self, cuts: Sequence[Cut]) -> list[torch.Tensor]:
        """Views of the boxes that another rank has asked for."""
        return [self._cut(cut) for cut in cuts]

    def _cut(self, cut: Cut) -> torch.Tensor:
        if cut.box >= len(self._tensors):
            raise RemoteProtocolError(f"box {cut.box} was asked for, of {len(self._tensors)}")
        view = self._tensors[cut.box]
        if not len(cut.offsets) == len(cut.sizes) == view.dim():
            raise RemoteProtocolError("a box of other dimensions was asked for")
        for dim, (offset, size) in enumerate(zip(cut.offsets, cut.sizes, strict=True)):
            if offset + size > view.shape[dim]:
                raise RemoteProtocolError("a box that reaches out of its tensor was asked for")
            view = view.narrow(dim, offset, size)
        return view
