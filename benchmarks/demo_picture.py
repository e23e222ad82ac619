"""`python -m benchmarks.demo_picture` runs the demo and draws what it printed: docs/demo.svg.

The picture is a recording of one real run on this machine: each line of its events, its table and
its checks appears when it was printed, played faster so that all is there after PLAYED_SECONDS. A
viewer without animations, or a reader who wants none, sees all lines.
"""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path

from rich.console import Console

from torchrelay.demo.job import Settings
from torchrelay.demo.show import play

TARGET = Path(__file__).resolve().parents[1] / "docs" / "demo.svg"
COLUMNS = 100
PLAYED_SECONDS, HELD_SECONDS = 12.0, 8.0


class TimedLines(io.StringIO):
    """Printed text, and the time at which each line of it was complete."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = time.monotonic()
        self.times: list[float] = []

    def write(self, text: str) -> int:
        self.times += [time.monotonic() - self.begun] * text.count("\n")
        return super().write(text)


def main() -> int:
    printed = TimedLines()
    console = Console(record=True, width=COLUMNS, file=printed, force_terminal=False)
    code = play(Settings(), console)
    if code:
        print(console.export_text(), file=sys.stderr)
        return code
    speed = printed.times[-1] / PLAYED_SECONDS
    title = f"torchrelay demo, played at {speed:.1f} times its speed"
    picture = console.export_svg(title=title, unique_id="demo")
    picture = animated(without_fonts(picture), printed.times)
    TARGET.write_text(picture, encoding="utf-8")
    return 0


def animated(picture: str, times: list[float]) -> str:
    """A picture of rich whose lines appear one after the other, in a loop.

    Lines printed at 0, 3 and 6 s are shown from 0, 6 and 12 s of 20 s on: from 0, 30 and 60 % of
    each iteration.
    """
    whole = PLAYED_SECONDS + HELD_SECONDS
    rules = []
    for line, seen in enumerate(times):
        begin = 100 * PLAYED_SECONDS * seen / max(times[-1], 1e-9) / whole
        if begin >= 0.05:
            rules.append(
                f"@keyframes demo-at-{line} {{ 0%, {begin - 0.01:.2f}% {{ opacity: 0 }} "
                f"{begin:.2f}%, 100% {{ opacity: 1 }} }}\n"
                f'text[clip-path="url(#demo-line-{line})"] '
                f"{{ animation: demo-at-{line} {whole:g}s infinite }}"
            )
    motion = "\n".join(["@media (prefers-reduced-motion: no-preference) {", *rules, "}"])
    return picture.replace("</style>", f"{motion}\n    </style>", 1)


def without_fonts(picture: str) -> str:
    """Without rich's references to fonts on the network: a reader's browser fetches nothing."""
    begin = picture.find("@font-face")
    while begin >= 0:
        end = picture.index("}", begin) + 1
        picture = picture[:begin] + picture[end:].lstrip()
        begin = picture.find("@font-face")
    return "\n".join(line.rstrip() for line in picture.splitlines()) + "\n"


def lines_of(picture: str) -> list[int]:
    """The lines that appear in the course of a picture, in order."""
    return sorted(int(line) for line in re.findall(r"@keyframes demo-at-(\d+) ", picture))


if __name__ == "__main__":
    sys.exit(main())
