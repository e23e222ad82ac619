"""HTML tables of results, which notebooks show: escaped text, cut off where a table is long."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import torch

import torchrelay as tr
from torchrelay.replicas.comparison import Comparison
from torchrelay.results import Attempt, Differing, Outcome
from torchrelay.tables import ROWS_SHOWN, html_table

HOSTILE = "<script>alert('&')</script>"


def cells(html: str) -> list[list[str]]:
    """Captions and rows of the tables, once an XML parser has taken them."""
    root = ElementTree.fromstring(f"<div>{html}</div>")
    assert not list(root.iter("script"))
    return [
        ["".join(cell.itertext()) for cell in row] if row.tag == "tr" else ["".join(row.itertext())]
        for row in root.iter()
        if row.tag in ("tr", "caption", "p")
    ]


def test_text_is_escaped() -> None:
    found = cells(html_table(HOSTILE, (HOSTILE, ""), [(HOSTILE, 3)]))
    assert found == [[HOSTILE], [HOSTILE, ""], [HOSTILE, "3"]]
    assert cells(html_table(HOSTILE, ("a",), [])) == [[HOSTILE]]


def test_a_long_table_is_cut_off() -> None:
    found = cells(html_table("many", ("n",), [(n,) for n in range(ROWS_SHOWN + 5)]))
    assert len(found) == 2 + ROWS_SHOWN + 1 and found[-1] == ["and 5 more"]


def test_a_report() -> None:
    report = tr.Report(
        3,
        1000,
        {"plan": 0.25, "write": 0.5},
        {1: Outcome(), HOSTILE: Outcome("failed", "gone", bytes=7)},
        (Attempt("disk", 4, "damaged"),),
        differing=(Differing("model.w", "parameter", (1, 2)),),
    )
    found = cells(report._repr_html_())
    assert ["step 3: 1000 bytes in 0.75 s"] in found and ["plan", "0.25"] in found
    assert [HOSTILE, "failed", "", "7", "gone"] in found
    assert ["disk", "4", "damaged"] in found and ["model.w", "parameter", "1, 2"] in found
    assert str(report).splitlines()[0] == found[0][0]


def test_a_report_of_a_save_that_was_skipped() -> None:
    assert cells(tr.Report(3, 0, skipped="busy")._repr_html_()) == [["step 3: skipped: busy"]]


def test_a_comparison() -> None:
    equal = Comparison(2, 100, 0.5)
    assert cells(equal._repr_html_()) == [[str(equal)]]
    unequal = Comparison(2, 100, 0.5, 1, (Differing("model.w", "parameter", (1,)),))
    head, _, row = cells(unequal._repr_html_())
    assert head == [str(unequal).splitlines()[0]] and row == ["model.w", "parameter", "1", ""]


def test_a_loaded_state_and_a_step(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path, no_dist=True) as checkpointer:
        checkpointer.save(7, {"model": {"w": torch.ones(4)}})
        got, step = checkpointer.load(), checkpointer.record(7)
    assert cells(got._repr_html_())[0][0].startswith("step 7: 16 bytes")
    found = step._repr_html_()
    assert cells(found)[0][0].startswith("step 7: ")
    files = {row[0] for row in cells(found)[2:]}
    assert files == {path.name for path in tmp_path.rglob("*.safetensors")}
    assert re.search(rf"torch {re.escape(torch.__version__)}", unescape(found))
