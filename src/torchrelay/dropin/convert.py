"""From one kind of checkpoint to another, without running anything that stands in it."""

from __future__ import annotations

import os
from typing import Any, Literal

from torchrelay.checkpointer import Checkpointer
from torchrelay.dropin.stock_dcp import (
    read_stock,
    read_torch_save,
    write_stock,
    write_torch_save,
)
from torchrelay.errors import UsageError
from torchrelay.stores.locate import OBJECTS, directory_at, scheme_of

Kind = Literal["torchrelay", "dcp", "torch"]
KINDS = ("torchrelay", "dcp", "torch")


def kind_of(place: str | os.PathLike[str]) -> Kind:
    """What a place holds: steps of this library, a stock DCP directory, or a `torch.save` file."""
    if scheme_of(place)[0] in OBJECTS:
        return "torchrelay"
    path = directory_at(place)
    if path.is_file():
        return "torch"
    if (path / ".metadata").is_file():
        return "dcp"
    if path.is_dir():
        return "torchrelay"
    raise UsageError(f"{os.fspath(place)}: no checkpoint there")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: Kind = "torchrelay",
    step: int | None = None,
) -> int | None:
    """Read a checkpoint of any kind whole, and write it as another kind.

    `step` is the one that is read from a place with several (the newest that verifies, by
    default), and the one that is written to such a place (0, by default). Returns the latter.
    """
    if to not in KINDS:
        raise UsageError(f"to is one of {', '.join(KINDS)}, not {to!r}")
    kind = kind_of(source)
    state: Any
    found: int | None = None
    if kind == "torchrelay":
        with Checkpointer(source, group=False, read_only=True) as places:
            loaded = places.load(step=step)
        state, found = loaded.state, loaded.step
    else:
        state = read_stock(source) if kind == "dcp" else read_torch_save(source)
    if to == "dcp":
        write_stock(target, state)
        return None
    if to == "torch":
        write_torch_save(target, state)
        return None
    written = found if step is None else step
    with Checkpointer(target, group=False) as places:
        return places.save(written or 0, state).step
