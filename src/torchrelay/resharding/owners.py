"""Who is asked for what: the records of several live ranks as one record of a whole state. Pure.

Each box of a distributed tensor is taken from one of the ranks that have it, so that all of them
have about as much to send. A plain tensor is taken from the first rank that has it: nothing but
its bytes could prove that it is the same elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Box
from torchrelay.record.checkpoint.consistency import check
from torchrelay.record.checkpoint.places import ALIGN
from torchrelay.record.checkpoint.schema import Checkpoint, DataFile
from torchrelay.record.checkpoint.stored import Shard, StoredTensor, Tensors
from torchrelay.record.dtypes import itemsize
from torchrelay.resharding.record import LiveRank
from torchrelay.stores.shares.plans import LocalPlan, merge_outlines, renames


class Whole(NamedTuple):
    """A state that lies in the memory of several ranks.

    `record` describes it as if the n-th of them had written its part to file n. `places` says for
    each of them which of its own boxes is which box of a tensor of that record.
    """

    record: Checkpoint
    places: list[dict[tuple[str, Box], int]]


def whole_of(records: Mapping[int, LiveRank]) -> Whole:
    """The records of ranks, by rank, as one.

    `MismatchError` where they do not have all of a state, or do not agree on what it is;
    `ManifestError` where a record cannot be.
    """
    ranks = list(records)
    plans = [
        LocalPlan(record.part.outlines[0], [], b"", replicas=record.replicas)
        for record in records.values()
    ]
    names = renames(plans)
    outlines = merge_outlines(plans, names)
    holders: dict[str, dict[Box, list[int]]] = {}
    places: list[dict[tuple[str, Box], int]] = [{} for _ in ranks]
    facts: dict[str, tuple[str, tuple[int, ...]]] = {}
    for place, (record, renamed) in enumerate(zip(records.values(), names, strict=True)):
        count = 0  # of the boxes of the rank before
        for tensor in record.part.tensors:
            name = renamed.get(tensor.name, tensor.name)
            known = facts.setdefault(name, (tensor.dtype, tensor.shape))
            if known != (tensor.dtype, tensor.shape):
                raise MismatchError(
                    f"rank {ranks[place]} has it as {tensor.dtype} of shape {tensor.shape}, "
                    f"another rank as {known[0]} of shape {known[1]}",
                    rank=ranks[place],
                    path=name,
                )
            boxes = holders.setdefault(name, {})
            for index, shard in enumerate(tensor.shards, count):
                box = shard.offsets, shard.sizes
                boxes.setdefault(box, []).append(place)
                places[place][name, box] = index
            count += len(tensor.shards)
    plain = {names[place].get(n, n) for place, plan in enumerate(plans) for n in plan.replicas}
    owners = _Owners(len(ranks))
    for name, boxes in holders.items():
        boxes = _cover(name, facts[name][1], boxes, ranks)
        owners.add(name, boxes, itemsize(facts[name][0]), fixed=name in plain)
    tensors = [
        StoredTensor(name, *facts[name], tuple(shards)) for name, shards in owners.shards().items()
    ]
    whole = Checkpoint(
        step=next(iter(records.values())).step or 0,
        time="",
        torch="",
        torchrelay="",
        outlines=outlines.outlines,
        ranks=outlines.ranks,
        own=outlines.own,
        tensors=Tensors.of(tensors),
        files=tuple(
            DataFile(f"rank-{rank}", max(1, size), max(1, size), bytes(16))
            for rank, size in zip(ranks, owners.ends, strict=True)
        ),
    )
    check(whole)
    return Whole(whole, places)


def _cover(
    name: str, shape: tuple[int, ...], boxes: dict[Box, list[int]], ranks: Sequence[int]
) -> dict[Box, list[int]]:
    """Boxes that cover a tensor once."""
    whole = ((0,) * len(shape), shape)
    if whole in boxes:
        return {whole: boxes[whole]}
    elements = sum(prod(sizes) for _, sizes in boxes)
    if elements == prod(shape):
        return boxes
    if elements > prod(shape):
        raise MismatchError("ranks have overlapping parts of it", path=name)
    raise MismatchError(
        f"ranks {', '.join(map(str, ranks))} have {elements} of its {prod(shape)} elements: name "
        "every rank that has a part of it as a source",
        path=name,
    )


class _Owners:
    """Gives each box to one of its holders."""

    def __init__(self, holders: int) -> None:
        self._load = [0] * holders  # bytes that each is to send
        self._given: list[tuple[str, Box, int, int]] = []  # name, box, owner, bytes
        self._open: list[tuple[int, int, str, Box, list[int]]] = []  # not given yet
        self.ends: list[int] = []

    def add(self, name: str, boxes: dict[Box, list[int]], size: int, *, fixed: bool) -> None:
        for box, holders in boxes.items():
            nbytes = prod(box[1]) * size
            if fixed or len(holders) == 1:
                self._give(name, box, holders[0], nbytes)
            else:
                self._open.append((-nbytes, len(self._open), name, box, holders))

    def _give(self, name: str, box: Box, owner: int, nbytes: int) -> None:
        self._load[owner] += nbytes
        self._given.append((name, box, owner, nbytes))

    def shards(self) -> dict[str, list[Shard]]:
        """The shards of each tensor. Large boxes are given first, each to whoever has least."""
        for nbytes, _, name, box, holders in sorted(self._open, key=lambda one: one[:2]):
            self._give(name, box, min(holders, key=self._load.__getitem__), -nbytes)
        self.ends = [0] * len(self._load)
        found: dict[str, list[Shard]] = {}
        for name, (offsets, sizes), owner, nbytes in self._given:
            found.setdefault(name, []).append(Shard(offsets, sizes, owner, self.ends[owner]))
            self.ends[owner] += -(-nbytes // ALIGN) * ALIGN
        return found
