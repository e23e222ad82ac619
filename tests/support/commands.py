"""The `torchrelay` command, run in this process: a new one would import torch first."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

import pytest

from torchrelay.cli import main


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def command(*arguments: object, answer: str = "") -> Ended:
    """Run a command as a user types it; `answer` is what the user answers to its questions."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv, sys.stdin
    sys.argv, sys.stdin = ["torchrelay", *map(str, arguments)], io.StringIO(answer)
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
            main()
    finally:
        sys.argv, sys.stdin = before
    code = left.value.code
    assert code is None or isinstance(code, int)
    return Ended(code or 0, out.getvalue(), err.getvalue())
