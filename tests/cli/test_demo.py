"""The demo runs, proves what it says, and reads well without a terminal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cli.test_cli_page import CONSOLE, check, commands_of
from tests.support.commands import Ended
from tests.support.forks import run_program
from torchrelay import cli
from torchrelay.demo.__main__ import run

SECONDS = 200  # a machine that is busy takes long to start four processes


def forked(folder: Path, *words: str) -> Ended:
    done = run_program("torchrelay.demo.__main__", *words, folder=folder, seconds=SECONDS)
    return Ended(done.code, done.output, "")


def as_a_user_starts_it(folder: Path, *words: str) -> Ended:
    done = subprocess.run(
        [sys.executable, "-m", "torchrelay.demo", *words],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=folder,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


# A program that is forked off cannot fork off workers once it has looked at the GPU.
STARTED = (
    [as_a_user_starts_it]
    if torch.cuda.is_available()
    else [forked, pytest.param(as_a_user_starts_it, marks=pytest.mark.slow)]
)


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("started", STARTED)
def test_demo_runs_and_every_claim_holds(started: Callable[..., Ended], tmp_path: Path) -> None:
    done = started(tmp_path, "--small")
    assert done.returncode == 0, done.stdout + done.stderr
    (shown,) = (s for block in CONSOLE for s in commands_of(block.source) if "demo" in s.arguments)
    check(shown, done)
    text = " ".join(done.stdout.split())
    assert text.count(" ok ") == 3 and "FAILED" not in text
    assert text.count("all workers are ended and started again") == 2, done.stdout
    assert "\x1b" not in done.stdout, "escape codes in output that is not a terminal's"
    for word in ("Traceback", "Warning"):
        assert word not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "call", "says"), [("rich.console", run, "demo"), ("typer", cli.main, "command")]
)
def test_a_missing_extra_is_one_clear_line(
    module: str,
    call: Callable[[], object],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as left:
        sys.exit(call())
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and "pip install 'torchrelay[cli]'" in line


def test_command_line_tells_the_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["torchrelay", "--version"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("torchrelay ")
