"""The demo runs, proves what it says, and reads well without a terminal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.test_cli_page import CONSOLE, check, commands_of
from tests.support.commands import Ended
from tests.support.forks import run_program
from torchrelay import cli
from torchrelay.demo.__main__ import run

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 200  # a machine that is busy takes long to start four processes


@pytest.mark.timeout(SECONDS + 20)
def test_demo_runs_and_every_claim_holds() -> None:
    done = run_program("torchrelay.demo.__main__", "--small", folder=ROOT, seconds=SECONDS)
    assert done.code == 0, done.output
    (shown,) = (s for block in CONSOLE for s in commands_of(block.source) if "demo" in s.arguments)
    check(shown, Ended(done.code, done.output, ""))
    text = " ".join(done.output.split())
    assert "bit for bit" in text
    assert "ok The losses are the same on all ranks." in text
    assert "ok Each of these delivered the same bits." in text
    for rank in range(4):
        assert f"rank {rank} {'receives' if rank else 'sends'}" in text
    assert text.count("PGTransport") >= 2
    assert "FAILED" not in text
    assert "\x1b" not in done.output, "escape codes in output that is not a terminal's"
    assert "Traceback" not in done.output and "Warning" not in done.output


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 20)
def test_demo_runs_as_a_user_starts_it() -> None:
    command = [sys.executable, "-m", "torchrelay.demo", "--small"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr


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
