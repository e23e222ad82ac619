"""A type checker in strict mode has nothing to say about our names in the examples.

Complaints about other libraries, which come without types, are not counted.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("basedpyright")

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900
# Arguments of a caller may be untyped, as torch's modules are: that is not about our names.
OF_THE_CALLER = {"reportUnknownArgumentType", "reportMissingImports", "reportMissingTypeStubs"}


class Complaint(NamedTuple):
    file: str
    line: int
    rule: str
    text: str


def check(folder: Path, config: Path) -> list[Complaint]:
    config.write_text(
        json.dumps(
            {
                "include": [str(folder)],
                "typeCheckingMode": "strict",
                "extraPaths": [str(ROOT / "src")],
                "pythonPath": sys.executable,
            }
        )
    )
    command = [sys.executable, "-m", "basedpyright", "-p", str(config), "--outputjson"]
    command += ["--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] > 0, done.stderr
    return [
        Complaint(one["file"], one["range"]["start"]["line"] + 1, one["rule"], one["message"])
        for one in found["generalDiagnostics"]
        if one.get("rule")
    ]


def our_names(tree: ast.AST) -> set[str]:
    """Names that are imported from torchrelay, and variables that our calls return."""
    ours: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            ours |= {one.asname or one.name for one in node.names if one.name == "torchrelay"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchrelay"):
            ours |= {one.asname or one.name for one in node.names}
    for _ in range(3):  # of variables of variables
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and _is_call_of(node.value, ours):
                ours |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    return ours


def _is_call_of(value: ast.expr, ours: set[str]) -> bool:
    while isinstance(value, (ast.Call, ast.Attribute)):
        value = value.func if isinstance(value, ast.Call) else value.value
    return isinstance(value, ast.Name) and value.id in ours


def about_us(complaints: list[Complaint]) -> Iterator[Complaint]:
    for one in complaints:
        text = Path(one.file).read_text(encoding="utf-8")
        names = our_names(ast.parse(text))
        line = text.splitlines()[one.line - 1]
        if one.rule not in OF_THE_CALLER and any(_names(line, ours, one.text) for ours in names):
            yield one


def _names(line: str, ours: str, text: str) -> bool:
    """Whether a complaint about a line is about this name of ours: about its type or that of an
    attribute, or about how it is used."""
    unknown = re.match(r'Type of "(\w+)"', text)
    if unknown is None:
        return re.search(rf"\b{ours}\b\s*[.(]", line) is not None
    return unknown[1] == ours or re.search(rf"\b{ours}\.(\w+\.)*{unknown[1]}\b", line) is not None


@pytest.mark.timeout(SECONDS + 20)
def test_the_examples_are_clean(tmp_path: Path) -> None:
    assert list(about_us(check(ROOT / "examples", tmp_path / "pyright.json"))) == []


@pytest.mark.timeout(SECONDS + 20)
def test_a_complaint_about_us_is_seen(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    shutil.copy(ROOT / "examples" / "fsdp" / "train.py", wrong / "train.py")
    (wrong / "use.py").write_text(
        "import torchrelay as tr\n\n"
        "checkpointer = tr.Checkpointer('runs/a', keeps=3)\n"
        "got = tr.recover([checkpointer])\n"
        "print(got.step)\n"
    )
    found = {(Path(one.file).name, one.line) for one in about_us(check(wrong, tmp_path / "p.json"))}
    assert found == {("use.py", 3), ("use.py", 5)}
