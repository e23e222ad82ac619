"""Shared fixtures: pools of real ranks, a bucket, and one hypothesis profile for every machine."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.ranks import RankPool
from tests.support.s3 import moto_server, s3  # noqa: F401
from tests.support.skips import OPTION, reason_of, summary, unexpected

# Whoever asks for GPUs while modules are imported asks the driver's management library: a process
# that has asked CUDA itself can fork no children that use a GPU.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("ci")

# A shell's background jobs ignore Ctrl-C, and what they start as well: tests that send it need it.
if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files whose tests take longest begin first: no worker is left alone with one of them at the end.
LONGEST = (
    "faults/test_chaos",
    "cli/test_demo",
    "integrations/",
    "examples/",
    "benchmarks/",
    "docs/",
    "conformance/",
    "keeper/",
    "endpoint/",
    "faults/",
    "transports/",
)


def _turn(item: pytest.Item) -> int:
    where = item.nodeid.removeprefix("tests/")
    return next((n for n, name in enumerate(LONGEST) if where.startswith(name)), len(LONGEST))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)
    for item in items:
        if isinstance(item, pytest.Function) and "rounds" in vars(item.module):
            item.add_marker("rounds")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, action="store_true", help="fail if a test is skipped that CI can run")


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    wrong = unexpected(reporter.stats.get("skipped", [])) if reporter is not None else []
    if wrong and session.config.getoption(OPTION) and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section("skipped, by reason")
        for line in summary(skipped):
            terminalreporter.write_line(line)
    if terminalreporter.config.getoption(OPTION):
        for report in unexpected(skipped):
            terminalreporter.write_line(f"NOT EXPECTED: {report.nodeid}: {reason_of(report)}")


def pytest_collection() -> None:
    """Nothing that is imported while tests are collected is garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """A collection during a test looks at what the tests made, not at all that they imported."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool2() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool3() -> Iterator[RankPool]:
    with RankPool(3, forks=True) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4() -> Iterator[RankPool]:
    with RankPool(4, forks=True) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool8() -> Iterator[RankPool]:
    with RankPool(8, forks=True) as pool:
        yield pool
