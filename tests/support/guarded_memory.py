"""Writes beyond the memory of a tensor or an array end the process that makes them.

glibc's malloc checker sees what numpy and Python allocate. torch has an allocator of its own on
some platforms, so `guarded_memory.cpp` replaces that one. Used as a pytest plugin, and by ranks and
other children of the tests:

    environment(build(folder))          what a child process needs
    python -m pytest -p tests.support.guarded_memory ...
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import shutil
import subprocess
from pathlib import Path

import torch

_LIBRARY = "TORCHRELAY_TEST_GUARD"  # where the allocator lies, compiled
_CHECKER = "libc_malloc_debug.so.0"


def build(folder: Path) -> Path | None:
    """Compile the allocator; None where there is no C++ compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    library = folder / "guarded_memory.so"
    package = Path(torch.__file__).parent
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{package / 'include'}"]
    command += [str(Path(__file__).with_suffix(".cpp")), "-o", str(library)]
    command += [f"-L{package / 'lib'}", "-lc10"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return library


def environment(library: Path | None) -> dict[str, str]:
    """The environment of a process whose writes are checked."""
    found = {**os.environ, "LD_PRELOAD": _CHECKER, "MALLOC_CHECK_": "3"}
    return found if library is None else {**found, _LIBRARY: str(library)}


def install() -> None:
    """Have torch use the allocator, if this process is to."""
    library = os.environ.get(_LIBRARY)
    if library:
        faulthandler.enable()
        ctypes.CDLL(library).install()


install()
