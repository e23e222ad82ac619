"""The states of several live ranks as one: what each leaf is, and which rank has it.

A plain tensor, and every other leaf that is not distributed, is that of the first rank that has it.
A distributed tensor is the boxes that all ranks have of it. The *sources* of a union are the images
of its ranks and its distributed tensors, in one range of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Numbers
from torchrelay.plan.holders import NONE, Holders
from torchrelay.plan.joined_trees import JoinedTrees
from torchrelay.record import manifest as m
from torchrelay.record.schema import Record

_encode = msgspec.msgpack.Encoder().encode
_ODD = m.CONJ | m.NEG | m.META


class Union:
    """The records of several ranks, which are valid streams; the first rank's values count."""

    def __init__(self, records: Mapping[int, Record]) -> None:
        self.joined = JoinedTrees(records)
        self.holders = Holders(self.joined)
        self.tensor_of = self.holders.tensor_of
        self._stride = max((record.images for record in self.joined.records), default=0) + 1
        self._first_tensor = self._stride * len(self.joined.ranks)
        # Dtypes and shapes of tensors, each once.
        self.fact_list: list[tuple[str, tuple[int, ...]]] = []
        self._fact_numbers: dict[bytes, int] = {}  # by encoding: numbers may hash alike

    # Sources

    def source(self, place: int, image: Any) -> Any:
        """The source of an image of a rank, by its place; of one or a column of them."""
        return place * self._stride + image

    def tensor_source(self, tensor: Any) -> Any:
        """The source of a distributed tensor, or of a column of them."""
        return self._first_tensor + tensor

    def rank_images(self, sources: Numbers) -> tuple[Numbers, Numbers]:
        """The place of the rank, and the image there, of each source; -1 for tensors."""
        places, images = np.divmod(sources, self._stride)
        tensors = sources >= self._first_tensor
        return np.where(tensors, NONE, places), np.where(tensors, NONE, images)

    def tensors(self, sources: Numbers) -> Numbers:
        """The distributed tensor of each source; below 0 for images of ranks."""
        return sources - self._first_tensor

    # Leaves that are all of a source, element for element

    def fact(self, dtype: str, shape: tuple[int, ...]) -> int:
        """The number of a dtype and shape, in `fact_list`."""
        number = self._fact_numbers.setdefault(_encode((dtype, shape)), len(self.fact_list))
        if number == len(self.fact_list):
            self.fact_list.append((dtype, shape))
        return number

    @cached_property
    def _leaf_columns(self) -> tuple[Numbers, Numbers]:
        tensors = self.tensor_of
        facts = [self.fact(tensor.dtype, tensor.shape) for tensor in self.holders.tensors]
        sources = np.where(tensors >= 0, self.tensor_source(tensors), NONE)
        of: Numbers = np.array([*facts, NONE], np.int64)[tensors]
        for home in self.joined.homes:
            rows = self.joined.first(home)
            kinds = rows.record.kinds
            plain = np.array([not kind.flags & _ODD for kind in kinds] + [False], bool)
            some = np.flatnonzero(rows.is_image & ~rows.is_sharded & plain[rows.kinds])
            known = np.array([self.fact(kind.dtype, kind.shape) for kind in kinds], np.int64)
            leaves = home.shift + rows.leaves[some]
            sources[leaves] = self.source(home.members[0], rows.images[some])
            of[leaves] = known[rows.kinds[some]] if len(some) else NONE
        return sources, of

    @property
    def source_of(self) -> Numbers:
        """The source that each leaf of the joined tree is all of; -1 where it is none."""
        return self._leaf_columns[0]

    @property
    def fact_of(self) -> Numbers:
        """The number of dtype and shape of each leaf that is all of a source; else -1."""
        return self._leaf_columns[1]

    def facts(self, leaf: int) -> tuple[str, tuple[int, ...]] | None:
        """Dtype and shape of a leaf that is all of a source."""
        fact = int(self.fact_of[leaf])
        return None if fact == NONE else self.fact_list[fact]

    def source_facts(self, sources: Numbers) -> Numbers:
        """The number of dtype and shape of each source."""
        found: Numbers = np.full(len(sources), NONE, np.int64)
        tensors = self.tensors(sources)
        known = [self.fact(tensor.dtype, tensor.shape) for tensor in self.holders.tensors]
        found[tensors >= 0] = np.array(known, np.int64)[tensors[tensors >= 0]]
        places, images = self.rank_images(sources)
        for place, record in enumerate(self.joined.records):
            mine = places == place
            if mine.any():
                kinds = [self.fact(kind.dtype, kind.shape) for kind in record.image_kinds]
                found[mine] = np.array(kinds, np.int64)[record.image_kind[images[mine]]]
        return found

    def check_values(self, leaves: Numbers) -> None:
        """`MismatchError` for a leaf whose values are yet to be reduced over ranks."""
        tensors = self.tensor_of[leaves]
        tensors = tensors[tensors >= 0]
        for tensor in tensors[self.holders.partial[tensors]][:1].tolist():
            raise MismatchError(
                "a DTensor with a partial placement has no value yet: redistribute it before it "
                "is sent",
                path=self.joined.path(self.holders.tensors[tensor].leaf),
            )
