"""The site as a whole: navigation, generated pages, figures, lengths, names of tests, the build."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import figures
from tests.docs.test_docs import PAGES, ROOT, name_of, text_of, without_code
from tools.docs import reference
from tools.docs.site import adapted, more_pages
from torchrelay.check import bucket, folder, links

# Words that a page has, written by hand; the two formats are looked up, not read through.
MOST_WORDS = 1_700
MOST_WORDS_OF_FORMATS = {"wire-format.md": 5_200, "checkpoint-format.md": 2_100}
MOST_WORDS_OF_README = 800
GENERATED = {"conformance.md", "index-a-z.md", "map.md", "module-list.md", "reference.md"}
REGIONS = re.compile(
    r"<!-- (?:figures: [\w-]+|conformance|generated: \w+) -->.*?<!-- end of \w+ -->", re.S
)
BUILD_SECONDS = 100


def by_hand(text: str) -> str:
    """What somebody has to write and to read: no generated regions, no code that tests run."""
    return without_code(REGIONS.sub("", text))


def words_of(text: str) -> int:
    """Words; numbers and the strokes of a table are none."""
    return sum(1 for word in text.split() if re.search(r"[^\W\d_]", word))


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").split()) <= MOST_WORDS_OF_README


def test_every_cell_of_the_comparison_has_its_source() -> None:
    """A test or a measurement of ours, or the project's documentation; or the cell is empty."""
    section = text_of("README.md").split("## Comparison\n", 1)[1].split("\n## ", 1)[0]
    head, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) >= 5
    for row in rows:
        name, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert name and len(cells) == head.count("|") - 2
        assert all(re.fullmatch(r"\[[\w ]+\]\(\S+\)|", cell) for cell in cells), row


BY_HAND = [path for path in PAGES if path.name not in GENERATED]


@pytest.mark.parametrize("path", BY_HAND, ids=name_of)
def test_every_page_is_short(path: Path) -> None:
    words = words_of(by_hand(path.read_text("utf-8")))
    assert words <= MOST_WORDS_OF_FORMATS.get(path.name, MOST_WORDS)


# Navigation


def in_navigation() -> list[str]:
    listed = re.findall(r"([\w/-]+\.md)$", text_of("mkdocs.yml").split("\nnav:\n", 1)[1], re.M)
    return listed + re.findall(r"([\w/-]+\.md)", str(more_pages()))


def test_every_page_is_in_the_navigation_once() -> None:
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in PAGES if path.parent != ROOT]
    assert sorted(in_navigation()) == sorted(pages)


def test_every_guide_is_on_the_home_page() -> None:
    home = text_of("docs/README.md")
    for page in in_navigation():
        if page.startswith("guides/"):
            assert f"]({page})" in home, page


# Generated


@pytest.mark.parametrize("path", [reference.REFERENCE, reference.MODULES], ids=name_of)
def test_generated_pages_are_those_of_the_code(path: Path) -> None:
    assert path.read_text("utf-8") == reference.written()[path], "run `make docs`"


# Figures


@pytest.mark.parametrize(
    "path", [p for p in PAGES if "<!-- figures: " in p.read_text()], ids=name_of
)
def test_figures_are_those_of_the_result_files(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text == figures.filled(text), "run `python -m benchmarks.figures`"


def test_the_chart_is_that_of_the_result_files() -> None:
    assert text_of(figures.CHART) == figures.chart(), "run `python -m benchmarks.figures`"


# Conditions of a measurement, and limits: no results.
# Thresholds that are given, not measured.
GIVEN = {"200 MB/s", "64 KiB/s"} | {
    f"{area.LEAST_SPEED / 1e6:.0f} MB/s" for area in (links, folder, bucket)
}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_no_figure_is_typed_by_hand(path: Path) -> None:
    text = by_hand(path.read_text("utf-8"))
    typed = re.findall(r"\b\d+(?:\.\d+)?x\b|\b\d+(?:\.\d+)? [KMG]i?B/s", text)
    assert set(typed) <= GIVEN, typed


def test_figures_are_never_rounded_in_our_favour() -> None:
    assert figures.ratio(2.189) == "2.18x" and figures.rate(44.88) == "44.8"
    assert figures.seconds(0.3041) == "0.31" and figures.seconds(0.309, up=False) == "0.30"
    assert figures.spread([3.0, 1.001, 2.0]) == "2.00 (1.01 to 3.00)"


def test_a_region_is_written_and_nothing_else() -> None:
    empty = "<!-- figures: keeper -->\n<!-- end of figures -->\n"
    page = f"a\n{empty}b\n{empty}c\n"
    once = figures.filled(page)
    assert figures.filled(once) == once and once.count(figures.keeper()) == 2
    assert [line for line in once.splitlines() if line in ("a", "b", "c")] == ["a", "b", "c"]


# Names of tests

TEST = re.compile(r"(?<![\w/])(?:tests/)?((?:[\w]+/)*test_\w+\.py)(?:::(\w+))?")


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_tests_that_a_page_names_exist(path: Path) -> None:
    for file, name in TEST.findall(path.read_text("utf-8")):
        there = ROOT / "tests" / file
        assert there.is_file(), f"{file} in {name_of(path)}"
        if name:
            tree = ast.parse(there.read_text("utf-8"))
            defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
            assert name in defined, f"{file}::{name} in {name_of(path)}"


# The build


def test_pages_are_adapted_to_the_site() -> None:
    page = (
        "[a](../src/torchrelay/relay.py) [`relay.py`](../src/torchrelay/relay.py) [b](howto.md)\n"
        "```python ranks=2\nx = [y](../z)\n```\n```hex join\n00\n```\n"
    )
    shown = adapted(page, Path())
    assert "a (`src/torchrelay/relay.py`)" in shown and "[b](howto.md)" in shown
    assert "```python\nx = [y](../z)\n```" in shown and "```text\n00\n```" in shown


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    if find_spec("material") is None or find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs-material and mkdocstrings are not installed: the extra `docs`")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_SECONDS,
    )
    assert done.returncode == 0 and "WARNING" not in done.stdout, done.stdout
    assert (tmp_path / "index.html").is_file() and (tmp_path / "guides" / "fsdp2.html").is_file()
