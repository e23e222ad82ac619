"""`python -m benchmarks.demo_picture` runs the demo and draws what it printed: docs/demo.svg.

The picture shows one real run on this machine: its events, its table and its checks.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console

from torchrelay.demo.job import Settings
from torchrelay.demo.show import play

TARGET = Path(__file__).resolve().parents[1] / "docs" / "demo.svg"
COLUMNS = 100


def main() -> int:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=False)
    code = play(Settings(), console)
    if code:
        print(console.export_text(), file=sys.stderr)
        return code
    picture = console.export_svg(title="torchrelay demo", unique_id="demo")
    TARGET.write_text(without_fonts(picture), encoding="utf-8")
    return 0


def without_fonts(picture: str) -> str:
    """Without rich's references to fonts on the network: a reader's browser fetches nothing."""
    begin = picture.find("@font-face")
    while begin >= 0:
        end = picture.index("}", begin) + 1
        picture = picture[:begin] + picture[end:].lstrip()
        begin = picture.find("@font-face")
    return "\n".join(line.rstrip() for line in picture.splitlines()) + "\n"


if __name__ == "__main__":
    sys.exit(main())
