"""Every command of docs/cli.md is run here, and prints what the page says.

A block is run in order in a folder with the checkpoint of four ranks. A line `$ torchrelay ...` is
a command, with its exit status behind `# status` where that is not 0; the lines below it are what
it prints, stdout before stderr, where `...` stands for any text and blanks are of any length.
"""

from __future__ import annotations

import re
import shlex
import shutil
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.test_docs import BLOCKS
from tests.support.commands import Ended, command

PAGE = "docs/cli.md"
CONSOLE = [block for block in BLOCKS if block.page == PAGE and block.info[0] == "console"]


class Shown(NamedTuple):
    arguments: list[str]
    status: int
    output: str


def commands_of(source: str) -> list[Shown]:
    found = []
    for part in re.split(r"^\$ torchrelay ", source, flags=re.M)[1:]:
        line, _, output = part.partition("\n")
        typed, _, status = line.partition("# status ")
        found.append(Shown(shlex.split(typed), int(status or 0), output))
    return found


def check(shown: Shown, done: Ended) -> None:
    printed = done.stdout + done.stderr
    flags = ELLIPSIS | NORMALIZE_WHITESPACE
    if not OutputChecker().check_output(shown.output, printed, flags):
        raise AssertionError(f"$ {shown.arguments}\n{shown.output}\nbut it printed:\n{printed}")
    assert done.returncode == shown.status, shown.arguments


@pytest.mark.timeout(180)
def test_commands_print_what_the_page_says(
    four_ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(four_ranks, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    ran = 0
    for block in CONSOLE:
        for shown in [] if "demo" in block.info else commands_of(block.source):
            check(shown, command(*shown.arguments))
            ran += 1
    assert ran > 25
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_has_every_command() -> None:
    shown = {shown.arguments[0] for block in CONSOLE for shown in commands_of(block.source)}
    listed = command("--help").stdout.partition("Commands:\n")[2]
    names = set(re.findall(r"^  (\S+)", listed, re.M))
    assert names and names == shown - {"--version"}
