"""Starts a child process of the trainer. An interpreter in isolated mode runs this file:

    python -I start.py SOCKET PACKAGE PROGRAM PATH...

So nothing in the working directory or next to the trainer's script can pass for a module of the
standard library. The package is imported from the trainer's copy; other modules are looked for in
the trainer's paths, after those of the interpreter. PROGRAM is a module of the package; its `serve`
gets the descriptor of the socket.
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
