"""A destination with the publisher's names, over the parameters of a caller.

Its tensors are views of the caller's parameters wherever a view can take what is published. So a
load, pull or receive plans and reads what this process needs, straight to where it belongs. Memory
is made only for values that are converted, or that go to several places.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchrelay.errors import MismatchError, UnsupportedLeafError, UsageError
from torchrelay.geometry.boxes import Box, Comparisons, around, shared, within
from torchrelay.memory.writable import READ_ONLY, ReadOnlyMemory
from torchrelay.planning.box_catalog import PARTIAL
from torchrelay.state import tensors as t
from torchrelay.state.backing import missing_memory
from torchrelay.state.boxed import BoxedTensor
from torchrelay.state.checkpointable import with_boxes
from torchrelay.state.local_parts import LocalPart, cut, local_parts
from torchrelay.state.objects import InPlaceObject, OfferedTensor, OwnWrite, flatten_objects
from torchrelay.state.paths import dotted
from torchrelay.state.tree import slots
from torchrelay.weights.mapping.layout import ParameterLayout, RankOf, layout_of
from torchrelay.weights.mapping.rules import ParameterRule, WeightMapping, matched

Shards = RankOf | Mapping[str, RankOf]


class _Place(NamedTuple):
    """Memory of a parameter, in the publisher's order of dimensions, that takes a box."""

    box: Box
    memory: torch.Tensor


class _Copy(NamedTuple):
    """Values that are copied after the landing: a box of the memory number `part` of a name, which
    begins at `offsets` of the publisher's tensor."""

    name: str
    part: int
    box: Box
    memory: torch.Tensor
    offsets: tuple[int, ...]


class _MappedSource:
    """One of the publisher's tensors, as the mapping expects it, and where it goes."""

    def __init__(self, dtype: str, shape: tuple[int, ...], parameter: str) -> None:
        self.dtype, self.shape, self.parameter = dtype, shape, parameter
        self.places: list[_Place] = []

    def add(self, place: _Place) -> None:
        """Note memory, unless it is that of another name of the same parameter."""
        known = ((one.box, _memory(one.memory)) for one in self.places)
        if (place.box, _memory(place.memory)) not in known:
            self.places.append(place)


class _MappedTensors:
    """Names and memory of a destination: `sources` by the publisher's names, the `copies` that are
    left to make when these have landed, and everything that does not fit."""

    def __init__(self) -> None:
        self.sources: dict[str, _MappedSource] = {}
        self.copies: list[_Copy] = []
        self.padding: list[tuple[str, torch.Tensor]] = []  # of parameters
        self.distributed: list[torch.Tensor] = []
        self.unmatched: list[str] = []  # parameters
        self.unplaced: set[str] = set()  # the publisher's, for parameters that have problems
        self.problems: list[str] = []
        self._read_only = ReadOnlyMemory()

    def add(
        self, name: str, mine: object, mapping: WeightMapping, shard_of: Callable[[str], RankOf]
    ) -> None:
        """Add a parameter of the caller's."""
        if mapping.keeps(name):
            return
        found = mapping.rule_for(name)
        if found is None:
            self.unmatched.append(name)
            return
        rule, names = found
        try:
            tensor = _checked_parameter(mine, self._read_only)
            if t.is_distributed(tensor):
                self.distributed.append(tensor)
                layout = layout_of(rule, tuple(tensor.size()))
            else:
                layout = layout_of(rule, tuple(tensor.shape), shard_of(name))
            self._add_layout(name, rule, names, layout, tensor)
        except (MismatchError, UnsupportedLeafError) as fault:
            self.problems.append(f"{name}: {fault.message}")
            self.unplaced.update(names)

    def _add_layout(
        self,
        name: str,
        rule: ParameterRule,
        names: Sequence[str],
        layout: ParameterLayout,
        tensor: torch.Tensor,
    ) -> None:
        parts = local_parts(tensor)
        dtype = rule.dtype or t.NAMES[tensor.dtype]
        for found in layout.boxes:
            there = names[found.part]
            source = self.sources.setdefault(there, _MappedSource(dtype, found.shape, name))
            if (source.dtype, source.shape) != (dtype, found.shape):
                raise MismatchError(
                    f"takes {there} as {dtype} {list(found.shape)}, and {source.parameter} "
                    f"takes it as {source.dtype} {list(source.shape)}"
                )
            for part in parts:
                both = shared(part.box, found.place)
                if both is None:
                    continue
                memory = _inside(part, both)
                skip = within(both, found.place)
                if rule.transpose:
                    memory, skip = memory.t(), skip[::-1]
                offsets = tuple([a + b for a, b in zip(found.box[0], skip, strict=True)])
                source.add(_Place((offsets, tuple(memory.shape)), memory))
        for part in parts if layout.padding is not None else ():
            assert layout.padding is not None
            rest = shared(part.box, layout.padding)
            if rest is not None:
                self.padding.append((name, _inside(part, rest)))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The destination: of each name that this process takes something of, the memory for it."""
        found = {}
        self.copies = []
        for name, source in self.sources.items():
            if source.places:
                found[name] = self._memory_for(name, source)
        return found

    def _memory_for(self, name: str, source: _MappedSource) -> torch.Tensor:
        boxes = [place.box for place in source.places]
        parts: list[tuple[Box, torch.Tensor]] = []
        if Comparisons().overlap(boxes):
            whole = around(boxes)
            parts.append((whole, _staging(source, whole, source.places[0].memory.device)))
            for box, memory in source.places:
                inside = within(box, whole), box[1]
                self.copies.append(_Copy(name, 0, inside, memory, box[0]))
        else:
            for number, (box, memory) in enumerate(source.places):
                if t.NAMES[memory.dtype] != source.dtype:
                    everything = (0,) * len(box[1]), box[1]
                    self.copies.append(_Copy(name, number, everything, memory, box[0]))
                    memory = _staging(source, box, memory.device)
                parts.append((box, memory))
        if len(parts) == 1 and parts[0][0][1] == source.shape:
            return parts[0][1]
        return BoxedTensor.of_parts(parts, source.shape)


class MappedDestination(InPlaceObject):
    """`into` as a destination with the names and layouts of a publisher, which `mapping` says.

    Pass it as `into=` to whatever loads, pulls or receives, or put it into the state where the
    publisher has a flat dict of tensors. The load is all or nothing, as that of a module is: the
    parameters change when everything has arrived and was verified. A `MismatchError` before a byte
    moves lists every name without a counterpart, and every shape and dtype that does not fit.

    `into` is a module, or a dict of tensors. Plain tensors of rules with a `split` are those of one
    rank: `shard` is its rank and the number of ranks, for all of them or by patterns of names.
    DTensors say themselves what they have, and are whole parameters to the rules.

    It is a destination only: as a state that is saved or published it has no meaning.
    """

    def __init__(self, into: object, mapping: WeightMapping, *, shard: Shards = (0, 1)) -> None:
        self.into, self.mapping = into, mapping
        self._shards = {"**": shard} if isinstance(shard, tuple) else dict(shard)
        for one in self._shards.values():
            if not 0 <= one[0] < one[1]:
                raise UsageError(f"shard is a rank and the number of ranks, not {one!r}")
        self._mapped = _MappedTensors()
        self._offered: dict[str, _MappedSource] = {}  # that the next landing writes

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors to be written, by the publisher's names."""
        flat = with_boxes(flatten_objects(self.into)[0])
        self._mapped = found = _MappedTensors()
        for path, leaf in slots(flat.tree):
            found.add(dotted(path), flat.leaves[leaf], self.mapping, self._shard_of)
        return found.tensors()

    def check(
        self,
        offered: Mapping[str, OfferedTensor | None],
        wanted: Callable[[str], bool],
        *,
        strict: bool,
    ) -> Collection[str]:
        sources, ignores = self._mapped.sources, self.mapping.ignores
        problems = list(self._mapped.problems)
        taken = sources.keys() | self._mapped.unplaced
        self._offered = {n: one for n, one in sources.items() if n in offered and wanted(n)}
        for name, source in self._offered.items():
            problems += _differences(name, source, offered[name])
        if strict:
            lone = self._mapped.unmatched
            problems += [f"{name}: no rule is about this parameter" for name in lone]
            problems += [
                f"{name}: not published, and {source.parameter} is made of it"
                for name, source in sources.items()
                if name not in offered and wanted(name)
            ]
            problems += [
                f"{name}: published, and no parameter takes it"
                for name in offered
                if name not in taken and not ignores(name) and wanted(name)
            ]
        if problems:
            raise MismatchError(
                f"the mapping does not fit in {len(problems)} places:"
                + "".join(f"\n  {problem}" for problem in problems)
            )
        return {
            name
            for name in offered
            if (not sources[name].places if name in sources else ignores(name))
        }

    def own_writes(self) -> list[OwnWrite]:
        writes = []
        for name, _, _, memory, offsets in self._mapped.copies:
            if name in self._offered:
                source = self._offered[name]
                writes.append(OwnWrite(source.parameter, memory, name, source.shape, offsets))
        return [*writes, *(OwnWrite(*padding) for padding in self._mapped.padding)]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called by the landing, when the tensors of `state` have been written."""
        mapped = self._mapped
        with torch.no_grad():
            for name, part, box, memory, _ in mapped.copies:
                if name in self._offered:
                    memory.copy_(cut(local_parts(state[name])[part].tensor, *box))
            for _, rest in mapped.padding:
                rest.zero_()
        t.note_written(mapped.distributed)

    def _shard_of(self, parameter: str) -> RankOf:
        for pattern, shard in self._shards.items():
            if matched(pattern, parameter) is not None:
                return shard
        return 0, 1


def _staging(source: _MappedSource, box: Box, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # it may be written outside of that mode, too
        return torch.empty(box[1], dtype=t.dtype_named(source.dtype), device=device)


def _inside(part: LocalPart, box: Box) -> torch.Tensor:
    """The memory of a box of a parameter, which lies in one of its local parts."""
    return cut(part.tensor, within(box, part.box), box[1])


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _checked_parameter(mine: object, read_only: ReadOnlyMemory) -> torch.Tensor:
    if not isinstance(mine, torch.Tensor):
        raise MismatchError(f"is a {type(mine).__name__}, not a tensor")
    if t.is_dtensor(mine) and any(one.is_partial() for one in mine.placements):
        raise MismatchError(PARTIAL)
    if t.is_distributed(mine):
        for part in local_parts(mine):
            _check_written(part.tensor, read_only)
        return mine
    plain = mine.detach()  # engines have parameters of their own types
    if not t.is_plain(plain):
        raise MismatchError(f"is of type {type(mine).__name__}, which a mapping cannot fill")
    if plain.is_meta:
        raise MismatchError("is a meta tensor, which has no memory")
    _check_written(plain, read_only)
    return plain


def _check_written(memory: torch.Tensor, read_only: ReadOnlyMemory) -> None:
    why = missing_memory(memory) or (READ_ONLY if read_only.has(memory) else None)
    if why is not None:
        raise MismatchError(f"cannot be written: {why}")


def _differences(name: str, source: _MappedSource, offered: OfferedTensor | None) -> list[str]:
    if offered is None:
        return [f"{name}: published as something else than a tensor"]
    pairs = (("dtype", offered.dtype, source.dtype), ("shape", offered.shape, source.shape))
    found = [
        f"{name}: published with {what} {there}, and {source.parameter} takes {here}"
        for what, there, here in pairs
        if there != here
    ]
    in_parts = any(place.box[1] != source.shape for place in source.places)
    if not found and not offered.in_boxes and in_parts:
        found.append(
            f"{name}: {source.parameter} takes a part of it, which cannot be read alone: receive "
            "from a list of ranks, or publish a tensor that does not share its memory with others"
        )
    return found
