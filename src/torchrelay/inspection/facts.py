"""A state without its values as plain data, for `--json` and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from torchrelay.arguments import matches
from torchrelay.inspection.parameter_names import parameter_names
from torchrelay.record.dtypes import itemsize
from torchrelay.shares.layout import rank_of

if TYPE_CHECKING:
    from torchrelay.inspection.opened_state import Contents
    from torchrelay.planning.stored import StoredTensor


def narrowed(contents: Contents, patterns: Sequence[str]) -> Contents:
    """The parts of a state whose paths match one of the patterns; without patterns, all of it."""
    if not patterns:
        return contents
    return contents._replace(
        tensors=tuple([one for one in contents.tensors if matches(one.name, patterns)]),
        values=tuple([one for one in contents.values if matches(one.path, patterns)]),
        aliases=tuple([one for one in contents.aliases if matches(one.path, patterns)]),
    )


def nbytes_of(tensor: StoredTensor) -> int:
    """Bytes of all elements of a tensor."""
    return prod(tensor.shape) * itemsize(tensor.dtype)


def state_facts(contents: Contents, parameters: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A state as JSON tells it. `parameters`: see `parameter_names`; those of a state that is
    narrowed may be in the rest."""
    tensors = [tensor_facts(contents, tensor) for tensor in contents.tensors]
    if parameters is None:
        parameters = parameter_names(contents.values)
    return {
        "step": contents.step,
        "ranks": contents.ranks,
        "time": contents.time,
        "torch": contents.torch,
        "bytes": sum(facts["bytes"] for facts in tensors),
        "tensors": tensors,
        "values": [
            {"path": value.path, "text": value.text, "ranks": value.ranks}
            for value in contents.values
        ],
        "aliases": [alias._asdict() for alias in contents.aliases],
        "parameters": dict(parameters),
    }


def tensor_facts(contents: Contents, tensor: StoredTensor) -> dict[str, Any]:
    """A tensor as JSON tells it."""
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": nbytes_of(tensor),
        "shards": [
            {
                "rank": rank_of(contents.volumes[shard.file].name),
                "offsets": list(shard.offsets),
                "sizes": list(shard.sizes),
                "file": contents.volumes[shard.file].name,
            }
            for shard in tensor.shards
        ],
    }
