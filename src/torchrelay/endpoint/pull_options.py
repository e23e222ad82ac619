"""The options that `pull` and `recover` share: which parts of a state land, and how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

import torch

from torchrelay.loading.loader import LoadRequest
from torchrelay.memory.gpu.side import in_use
from torchrelay.progress import ProgressCallback


class PullOptions(TypedDict, total=False):
    """Keyword arguments.

    - `strict=True`: refuse a state that has missing or unexpected paths.
    - `key`: the state below this key, a dotted path; `into` is then its destination.
    - `include`: patterns of dotted paths, and nothing else. `model` means all below it, as
      `model.*` does.
    - `atomic=True`: nothing of `into` is written before every digest was compared. `False` writes
      as bytes arrive, and raises `TornStateError` if it cannot finish.
    - `device`: where new tensors are made, without `into`.
    - `verify=True`: compare digests also of memory that is mapped on this host.
    - `progress`: a function that receives a `Progress`.
    """

    strict: bool
    key: str | None
    include: str | Iterable[str]
    atomic: bool
    device: torch.device | str | None
    verify: bool
    progress: ProgressCallback | None


def check_options(options: PullOptions) -> None:
    """`TypeError` for an argument that does not exist, as Python raises it."""
    for name in options.keys() - PullOptions.__annotations__.keys():
        raise TypeError(f"unexpected keyword argument {name!r}: see `PullOptions` for the names")


def load_request(into: object, step: int | None, options: PullOptions) -> LoadRequest:
    """The request for a loader, which compares digests whatever `verify` says."""
    given: dict[str, Any] = {key: value for key, value in options.items() if key != "verify"}
    return LoadRequest(into, step, **given)


def wants_gpu(into: object, options: PullOptions) -> bool:
    """Whether some of a state lands on a GPU. Quick, so it does not look into objects that have
    their own `state_dict`, other than modules."""
    if not in_use():
        return False
    if into is None:
        return torch.device(options.get("device") or "cpu").type == "cuda"
    todo = [into]
    while todo:
        one = todo.pop()
        if isinstance(one, torch.Tensor):
            if one.is_cuda:
                return True
        elif isinstance(one, torch.nn.Module):
            todo.extend(one.parameters())
        elif isinstance(one, Mapping):
            todo.extend(one.values())
        elif isinstance(one, (list, tuple)):
            todo.extend(one)
    return False
