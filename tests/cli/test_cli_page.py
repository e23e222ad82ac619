"""Every command of docs/cli.md is run here, and prints what the page says.

A block is run in order in a folder with the checkpoint of four ranks. A line `$ torchrelay ...` is
a command, with its exit status behind `# status` where that is not 0; the lines below it are what
it prints, stdout before stderr, where `...` stands for any text and blanks are of any length. One
that ends in `&` goes on running, as a process of its own, until the test is over. Ports of the page
become free ones.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


def free_ports(text: str) -> str:
    """The text with each port of loopback in it replaced by a free one."""
    for port in sorted(set(re.findall(r"127\.0\.0\.1:(\d+)", text))):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{taken.getsockname()[1]}")
    return text


class Background:
    """Commands that run beside the others; each has printed what the page says."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []

    def start(self, shown: Shown) -> None:
        program = [sys.executable, "-c", "from torchrelay.cli import main; main()"]
        running = subprocess.Popen(
            [*program, *shown.arguments[:-1]], stdout=subprocess.PIPE, text=True
        )
        self._running.append(running)
        assert running.stdout is not None
        check(shown, Ended(0, running.stdout.readline(), ""))

    def end(self) -> list[int]:
        for running in self._running:
            running.send_signal(signal.SIGTERM)
        return [running.wait(30) for running in self._running]

    def kill(self) -> None:
        for running in self._running:
            running.kill()
            running.wait(30)
            assert running.stdout is not None
            running.stdout.close()


@contextmanager
def background() -> Iterator[Background]:
    beside = Background()
    try:
        yield beside
    finally:
        beside.kill()


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
    monkeypatch.delenv("TORCHRELAY_TOKEN", raising=False)
    source = "".join(block.source for block in CONSOLE if "demo" not in block.info)
    ran = 0
    with background() as beside:
        for shown in commands_of(free_ports(source.replace("page-job", f"page-{os.getpid()}"))):
            if shown.arguments[-1] == "&":
                beside.start(shown)
            else:
                check(shown, command(*shown.arguments))
            ran += 1
        assert beside.end() == [130, 130]
    assert ran > 40


def test_the_page_has_every_command() -> None:
    shown = {shown.arguments[0] for block in CONSOLE for shown in commands_of(block.source)}
    listed = command("--help").stdout.partition("Commands:\n")[2]
    names = set(re.findall(r"^  (\S+)", listed, re.M))
    assert names and names == shown - {"--version"}
