"""Which memory of a state is not trained: parameters that no gradient is computed for."""

from __future__ import annotations

import torch

from torchrelay.state import tensors as t
from torchrelay.state.paths import Path
from torchrelay.state.tree import flatten


def frozen_storages(state: object) -> set[int]:
    """The addresses of the storages of frozen parameters, of modules and of the state itself. A
    module's `state_dict` does not tell which they are: its tensors are detached."""
    found: set[int] = set()

    def opened(value: object, path: Path) -> object:
        if isinstance(value, torch.nn.Module):
            for parameter in value.parameters():
                _note(parameter, found)
        return {} if callable(getattr(value, "state_dict", None)) else value

    for leaf in flatten(state, opened).leaves:
        if isinstance(leaf, torch.nn.Parameter):
            _note(leaf, found)
    return found


def _note(parameter: torch.nn.Parameter, found: set[int]) -> None:
    if not parameter.requires_grad and (address := storage_of(parameter)):
        found.add(address)


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's own storage; 0 where it has none of its own."""
    if t.is_dtensor(tensor):
        tensor = t.dtensor_parts(tensor)[0]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()
