"""torchft for tests, where there is one: installed, or its Python files (see `fetch_torchft`)."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

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
