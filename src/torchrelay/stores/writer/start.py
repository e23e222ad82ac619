"""Starts a process beside the trainer. An interpreter in isolated mode runs this file:

    python -I start.py SOCKET PACKAGE PROGRAM PATH...

So nothing in the working directory or beside the trainer's script can pass for a module of the
standard library. The package is taken from where the trainer has it; what else the trainer can
import is looked for where it would find it, after the interpreter's own places. PROGRAM is a
module of the package; its `serve` gets the socket's descriptor.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location


def main() -> None:
    _, link, package, program, *paths = sys.argv
    sys.path += [path for path in paths if path not in sys.path]
    spec = spec_from_file_location(
        "torchrelay", f"{package}/__init__.py", submodule_search_locations=[package]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no package in {package}")
    sys.modules["torchrelay"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["torchrelay"])
    import_module(program).serve(int(link))


if __name__ == "__main__":
    main()
