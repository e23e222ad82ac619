"""torchft for tests, where there is one: installed, or its Python files (see `fetch_torchft`)."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")
SOURCE = Path(sys.prefix) / "torchft-src" / "torchft"
MISSING = "torchft is not installed, and its wheel could not be fetched"


def find_torchft() -> bool:
    """Make torchft's Python modules importable; False where this machine has none."""
    try:
        importlib.import_module("torchft.checkpointing.transport")
    except ImportError:
        if not SOURCE.is_dir():
            return False
        # The package without its __init__, which wants the native extension.
        package = types.ModuleType("torchft")
        package.__path__ = [str(SOURCE)]
        sys.modules["torchft"] = package
    return True


def find_interface() -> None:
    """Make the interface of torchft's transports importable: a test that needs no more of torchft
    runs without it, too."""
    if find_torchft():
        return
    names = ("torchft", "torchft.checkpointing", "torchft.checkpointing.transport")
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    bare = types.new_class("CheckpointTransport", (Generic[T],))
    sys.modules[names[-1]].CheckpointTransport = bare  # type: ignore[attr-defined]
