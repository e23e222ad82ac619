"""`python -m torchrelay.demo [--small]`"""

from __future__ import annotations

import argparse
import sys

from torchrelay.demo.job import SMALL, Settings
from torchrelay.system import needs_linux


def run(*, small: bool = False) -> int:
    """Run the demo on this terminal; returns the exit code."""
    needs_linux("the demo")
    try:
        from rich.console import Console
    except ImportError:
        print("the demo needs rich: pip install 'torchrelay[cli]'", file=sys.stderr)
        return 2
    from torchrelay.demo.show import play

    try:
        return play(SMALL if small else Settings(), Console())
    except KeyboardInterrupt:
        return 130


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torchrelay.demo", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny model, fewer steps")
    return run(small=parser.parse_args().small)


if __name__ == "__main__":
    sys.exit(main())
