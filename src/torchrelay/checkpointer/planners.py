"""The reads that a planner of the user's own asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from torchrelay.landing.seam import Landing
from torchrelay.plan.reads import BoxRead
from torchrelay.plan.share import Portion, RankShare
from torchrelay.record.checkpoint.schema import Checkpoint
from torchrelay.stores.box_reads import asked_for, by_name
from torchrelay.stores.metadata import metadata_of

Layers = list[dict[str, torch.Tensor]]


class PlannedReads:
    """The reads that a planner of the user's asks for, in place of the library's own plan.

    It is shown the tensors by name, new ones first and then the caller's; a tensor that goes to
    several places has one in each layer. `reads` has what it wants to fill of both.
    """

    def __init__(
        self,
        planner: LoadPlanner,
        coordinator: bool,
        checkpoint: Checkpoint,
        share: RankShare,
        landing: Landing,
    ) -> None:
        self._planner = planner
        self._metadata = metadata_of(checkpoint)
        self._tensors = by_name(checkpoint)
        self._coordinator = coordinator
        self._filled: list[tuple[ReadItem, torch.Tensor]] = []
        new = [(share.portions[memory.image], share.whole(*memory)) for memory in landing.held()]
        own = [(share.portions[image], whole) for image, _, whole in landing.own()]
        first = list(self._ask(_layers(new)))
        self._new_items = len(self._filled)
        self.reads = first, list(self._ask(_layers(own)))

    def _ask(self, layers: Layers) -> Iterator[BoxRead]:
        planner = self._planner
        for layer in layers:
            planner.set_up_planner(dict(layer), self._metadata, self._coordinator)
            plan = planner.create_local_plan()
            plan = planner.finish_plan(planner.create_global_plan([plan])[0])
            for item in plan.items:
                if item.type.name != "TENSOR":
                    continue
                place = planner.resolve_tensor(item).detach()
                self._filled.append((item, place))
                yield asked_for(item, self._tensors[item.storage_index.fqn], place)

    def tell_new(self) -> None:
        """Tell the planner of new tensors that have been read."""
        self._tell(self._filled[: self._new_items])

    def tell_own(self) -> None:
        self._tell(self._filled[self._new_items :])

    def _tell(self, filled: Iterable[tuple[ReadItem, torch.Tensor]]) -> None:
        for item, place in filled:
            self._planner.commit_tensor(item, place)


def _layers(tensors: Iterable[tuple[Portion, torch.Tensor]]) -> Layers:
    layers: Layers = []
    for portion, tensor in tensors:
        name = portion.tensor.name
        layer = next((one for one in layers if name not in one or one[name] is tensor), None)
        if layer is None:
            layers.append(layer := {})
        layer[name] = tensor
    return layers
