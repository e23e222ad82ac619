"""A run that only expects some skips fails for others; every run lists the reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.mark.skip(reason="no GPU here: {gpu}")
def test_kernel(): ...

def test_other():
    {other}
"""


@pytest.mark.parametrize(
    ("other", "option", "status"),
    [
        ("pytest.skip('nothing to see')", "--only-expected-skips", 1),
        ("pytest.skip('nothing to see')", "-q", 0),
        ("pytest.importorskip('ray', reason='ray is not installed', exc_type=Exception)",
         "--only-expected-skips", 0),
        ("pass", "--only-expected-skips", 0),
    ],
)  # fmt: skip
def test_skips(pytester: pytest.Pytester, other: str, option: str, status: int) -> None:
    root = Path(__file__).resolve().parents[2]
    pytester.makeconftest(
        f"import sys; sys.path.insert(0, {str(root)!r})\n"
        "from tests.conftest import "
        "pytest_addoption, pytest_sessionfinish, pytest_terminal_summary  # noqa"
    )
    pytester.makepyfile(TESTS.format(gpu="it runs where one is", other=other))
    done = pytester.runpytest_subprocess(option, "-p", "no:cacheprovider", timeout=100)
    assert done.ret == status
    done.stdout.fnmatch_lines(["*skipped, by reason*", "*1 no GPU here: it runs where one is"])
    if status:
        done.stdout.fnmatch_lines(["NOT EXPECTED: *test_other: nothing to see"])
