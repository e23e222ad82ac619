"""`examples/quickstart.ipynb` runs from top to bottom, with the kinds of output that it shows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import run_program
from tools.notebook import executed

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def shown(notebook: dict[str, Any]) -> list[list[str]]:
    """The kinds of output of each code cell."""
    return [
        [key for output in cell["outputs"] for key in output.get("data", {"text": ""})]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


def test_it_runs(tmp_path: Path) -> None:
    copy = tmp_path / "quickstart.ipynb"
    shutil.copy(NOTEBOOK, copy)
    done = run_program("tools.notebook", str(copy), folder=tmp_path, seconds=100)
    assert done.code == 0, done.output
    found, kept = json.loads(copy.read_text("utf-8")), json.loads(NOTEBOOK.read_text("utf-8"))
    assert shown(found) == shown(kept), "run `python -m tools.notebook examples/quickstart.ipynb`"
    assert shown(found).count(["text/plain", "text/html"]) >= 4
    assert [cell["source"] for cell in found["cells"]] == [c["source"] for c in kept["cells"]]


def notebook_of(*sources: str) -> dict[str, Any]:
    cells = [{"cell_type": "code", "source": [source]} for source in sources]
    return {"cells": [{"cell_type": "markdown", "source": ["# A"]}, *cells]}


def test_cells_share_names_and_show_their_last_value() -> None:
    text, one, two = executed(notebook_of("a = 1\nprint(a)", "a + 1"))["cells"]
    assert text == {"cell_type": "markdown", "source": ["# A"]}
    assert one["outputs"] == [{"output_type": "stream", "name": "stdout", "text": ["1\n"]}]
    assert two["outputs"][0]["data"] == {"text/plain": ["2"]}
    assert (one["execution_count"], two["outputs"][0]["execution_count"]) == (1, 2)


def test_a_cell_that_raises_ends_it() -> None:
    with pytest.raises(ZeroDivisionError):
        executed(notebook_of("1 / 0", "a = 1"))
