"""The kind of checkpoint at a path or URL, by what is there. No torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from torchrelay.files import is_dir, is_file
from torchrelay.stores.locate import OBJECTS, directory_at, scheme_of, split_step

Kind = Literal["torchrelay", "dcp", "torch", "safetensors"]

# The archives of torch.save, and the pickles it wrote before 1.6.
_TORCH_SAVE = (b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19")


def kind_of(place: str | os.PathLike[str]) -> Kind | None:
    """Steps of this library or one of them, a stock DCP directory, a file of `torch.save` or of
    safetensors; None where there is nothing."""
    if scheme_of(place)[0] in OBJECTS:
        return "torchrelay"
    path = directory_at(place)
    if is_file(path):
        named = path.suffix == ".safetensors"
        return "torch" if is_torch_save(path) or not named else "safetensors"
    if is_file(path / ".metadata"):
        return "dcp"
    return "torchrelay" if is_dir(directory_at(split_step(place)[0])) else None


def is_torch_save(path: Path) -> bool:
    """Whether a file begins as those of `torch.save` do; `OSError` where it cannot be read."""
    with path.open("rb") as file:
        return file.read(16).startswith(_TORCH_SAVE)
