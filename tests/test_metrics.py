"""Spans and metrics as a program's providers receive them, and the page that lists them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import torchrelay as tr
from tests.support.ranks import run_ranks
from torchrelay import errors, metrics
from torchrelay.checkpointer.share_writer import ShareWriter
from torchrelay.metrics import INSTRUMENTS, OPERATIONS, Measurement
from torchrelay.results import Differing, Outcome, Report

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")

import opentelemetry.metrics as metrics_api
from opentelemetry import trace as trace_api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
STATE_BYTES = 400
BACKGROUND = ("save_async", "publish", "stage")


class Point(NamedTuple):
    """A metric of one set of attributes: a sum, and how often a histogram was recorded."""

    attributes: dict[str, Any]
    sum: float
    count: int


class Telemetry:
    """Providers, and what they got."""

    def __init__(self) -> None:
        self._reader, self._spans = InMemoryMetricReader(), InMemorySpanExporter()
        self.meters, self.tracers = MeterProvider([self._reader]), TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))

    @property
    def spans(self) -> list[Any]:
        return list(self._spans.get_finished_spans())

    def span(self, operation: str) -> Any:
        (found,) = [one for one in self.spans if one.name == f"torchrelay.{operation}"]
        return found

    @property
    def names(self) -> dict[str, list[Point]]:
        data = self._reader.get_metrics_data()
        found: dict[str, list[Point]] = {}
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                assert scope.scope.name == "torchrelay"
                for metric in scope.metrics:
                    found[metric.name] = [
                        Point(
                            dict(one.attributes),
                            one.sum if hasattr(one, "sum") else one.value,
                            getattr(one, "count", 0),
                        )
                        for one in metric.data.data_points
                    ]
        return found

    def points(self, instrument: metrics.Instrument, operation: str) -> list[Point]:
        return [
            one
            for one in self.names.get(instrument.name, [])
            if one.attributes["torchrelay.operation"] == operation
        ]

    def phases(self, operation: str) -> set[str]:
        found = self.points(metrics.PHASES, operation)
        return {one.attributes["torchrelay.phase"] for one in found}

    def check_success(
        self,
        operation: str,
        step: int | None,
        route: str = "",
        rank: tuple[int, str] | None = None,
        least: int = STATE_BYTES,
    ) -> None:
        """A call left its span and its metrics, with nothing that the page does not list."""
        span = self.span(operation)
        said = {"torchrelay.operation": operation}
        if rank is not None:
            said |= {"torchrelay.rank": rank[0], "torchrelay.role": rank[1]}
        routed = {**said, "torchrelay.route": route} if route else said
        numbered = {} if step is None else {"torchrelay.step": step}
        assert dict(span.attributes).items() >= {**routed, **numbered}.items()
        (calls,) = self.points(metrics.DURATION, operation)
        assert calls.attributes == routed and calls.count == 1
        assert calls.sum == pytest.approx((span.end_time - span.start_time) / 1e9, abs=0.1)
        (nbytes,) = self.points(metrics.BYTES, operation)
        assert nbytes.attributes == routed
        assert nbytes.sum == span.attributes["torchrelay.bytes"] >= least
        for one in self.points(metrics.PHASES, operation):
            phase = one.attributes["torchrelay.phase"]
            assert one.attributes == {**routed, "torchrelay.phase": phase} and one.count == 1
            assert span.attributes[f"torchrelay.seconds.{phase.replace(' ', '_')}"] == one.sum
        assert self.phases(operation) <= documented_phases()[operation] != set()
        assert not self.points(metrics.FAILURES, operation)
        stalls = self.points(metrics.STALL, operation)
        assert [one.count for one in stalls] == ([1] if operation in BACKGROUND else [])
        if stalls:
            assert stalls[0].attributes == said and 0 < stalls[0].sum <= calls.sum
            assert span.attributes["torchrelay.stall.seconds"] == stalls[0].sum


@pytest.fixture
def telemetry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Telemetry]:
    # A program can set providers once, and this one has many tests.
    made = Telemetry()
    monkeypatch.setattr(metrics_api, "get_meter_provider", lambda: made.meters)
    monkeypatch.setattr(trace_api, "get_tracer_provider", lambda: made.tracers)
    yield made
    made.meters.shutdown()


def state() -> dict[str, torch.Tensor]:
    return {"weights": torch.arange(100, dtype=torch.float32)}


# Calls that succeed


def test_saves_and_a_load(telemetry: Telemetry, tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path, no_dist=True) as checkpointer:
        checkpointer.save(1, state())
        checkpointer.save_async(2, state()).result(60)
        assert checkpointer.load(state()).step == 2
    telemetry.check_success("save", 1, "storage")
    assert telemetry.phases("save") == {"plan", "write", "commit"}
    telemetry.check_success("save_async", 2, "storage")
    assert telemetry.phases("save_async") == {"plan", "stage", "write", "commit"}
    telemetry.check_success("load", 2, "storage")
    assert set(telemetry.names) <= {one.name for one in INSTRUMENTS}


def test_a_publish_and_a_pull(telemetry: Telemetry) -> None:
    with tr.serve(state(), step=7, no_dist=True) as endpoint:
        assert (
            tr.pull(endpoint.url, no_dist=True, options=tr.options.PullOptions(newer_than=6)).step
            == 7
        )
        endpoint._publisher.settle(60)
    telemetry.check_success("publish", 7)
    telemetry.check_success("pull", 7, "mapped")


def test_a_stage_and_a_recovery(telemetry: Telemetry) -> None:
    with tr.Keeper(f"metrics-{os.getpid()}", no_dist=True) as keeper:
        try:
            keeper.stage(3, state()).result(60)
            assert tr.recover(sources=[keeper], no_dist=True).step == 3
        finally:
            keeper.end()
    telemetry.check_success("stage", 3)
    telemetry.check_success("recover", 3)
    assert {"ask", "attempts"} <= telemetry.phases("recover")


def test_a_save_that_a_keeper_stages(telemetry: Telemetry, tmp_path: Path) -> None:
    with tr.Keeper(f"metrics-save-{os.getpid()}", no_dist=True) as keeper:
        try:
            with tr.Checkpointer(tmp_path, no_dist=True, keeper=keeper) as checkpointer:
                checkpointer.save_async(3, state()).result(60)
            keeper._publisher.settle(60)
        finally:
            keeper.end()
    telemetry.check_success("save_async", 3, "storage")
    telemetry.check_success("stage", 3)
    assert telemetry.span("stage").parent == telemetry.span("save_async").context


def transfers(rank: int, group: Any, folder: Path) -> None:
    made = Telemetry()
    metrics_api.set_meter_provider(made.meters)  # as a program does
    trace_api.set_tracer_provider(made.tracers)
    with tr.Relay(group, timeout=60) as relay:
        if rank == 0:
            relay.send(state(), to=1, step=4)
            made.check_success("send", 4, "memory", (0, "sender"))
            assert made.phases("send") == {"capture", "join", "data"}
        else:
            assert relay.recv(0, into=state()).step == 4
            made.check_success("recv", 4, "memory", (1, "receiver"))
    with tr.Checkpointer(folder) as checkpointer:
        checkpointer.save(4, state())
        checkpointer.load(state())
    role = (rank, "member" if rank else "coordinator")
    own = {"w": torch.full((9,), float(rank))}
    assert not tr.compare_ranks(own, replicated="w").equal
    made.check_success("compare_ranks", None, "", role, least=36)
    counted = made.points(metrics.DIFFERING, "compare_ranks")
    assert [one.sum for one in counted] == ([] if rank else [1])
    made.check_success("save", 4, "storage", role, least=0)  # one of them writes
    made.check_success("load", 4, "storage", role)


def test_ranks_and_roles(tmp_path: Path) -> None:
    run_ranks(transfers, 2, tmp_path, timeout=90)


def gathers(rank: int, group: Any) -> None:
    made = Telemetry()
    metrics_api.set_meter_provider(made.meters)
    with tr.Relay(group, timeout=60) as relay:
        if rank < 2:
            relay.send(state(), to=2, step=4)
        else:
            relay.recv([0, 1])
            (nbytes,) = made.points(metrics.BYTES, "recv")
            assert nbytes.attributes["torchrelay.rank"] == 2
            assert made.phases("recv") <= documented_phases()["recv"]


def test_a_state_from_several_ranks(tmp_path: Path) -> None:
    run_ranks(gathers, 3, timeout=90)


# Calls that do not


def failures(telemetry: Telemetry, operation: str) -> list[dict[str, Any]]:
    found = telemetry.points(metrics.FAILURES, operation)
    assert all(one.sum == 1 for one in found)
    return [one.attributes for one in found]


def test_a_failure_is_counted_by_its_type(telemetry: Telemetry, tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path, no_dist=True) as checkpointer:
        with pytest.raises(errors.StepNotFoundError):
            checkpointer.load(state())
        checkpointer.save(1, state())
        with pytest.raises(errors.StepExistsError):
            checkpointer.save(1, state())
    assert [one["error.type"] for one in failures(telemetry, "load")] == ["StepNotFoundError"]
    assert [one["error.type"] for one in failures(telemetry, "save")] == ["StepExistsError"]
    ended = {one.attributes.get("error.type") for one in telemetry.points(metrics.DURATION, "save")}
    assert ended == {None, "StepExistsError"}
    span = telemetry.span("load")
    assert span.status.status_code is trace_api.StatusCode.ERROR
    assert "no step" in span.events[0].attributes["exception.message"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert tr.recover(sources=[empty], no_dist=True) is None  # a first start is no failure
    assert failures(telemetry, "recover") == []
    with pytest.raises(errors.RecoveryError):
        tr.recover(sources=[empty], no_dist=True, min_step=1)
    (failed,) = failures(telemetry, "recover")
    assert failed == {
        "torchrelay.operation": "recover",
        "error.type": "RecoveryError",
        "torchrelay.phase": "recover",
    }


def test_a_save_that_fails_in_the_background(
    telemetry: Telemetry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tr.Checkpointer(tmp_path / "steps", no_dist=True) as checkpointer:

        def refuse(*_: Any) -> Any:
            raise errors.CheckpointError("the disk is full", phase="write", file="x")

        stage = ShareWriter.stage

        def staged(*args: Any) -> Any:
            return stage(*args)._replace(finish=refuse)

        monkeypatch.setattr(ShareWriter, "stage", staged)
        assert checkpointer.save_async(1, state()).exception(60) is not None
        # Raised to the caller, who has no `Pending`.
        monkeypatch.setattr(ShareWriter, "stage", refuse)
        with pytest.raises(errors.CheckpointError):
            checkpointer.save_async(2, state())
    counted = telemetry.points(metrics.FAILURES, "save_async")
    assert [(one.sum, one.attributes["error.type"]) for one in counted] == [(2, "CheckpointError")]
    assert not telemetry.points(metrics.BYTES, "save_async")
    (stalls,) = telemetry.points(metrics.STALL, "save_async")
    assert stalls.count == 1  # the second has raised
    assert len(telemetry.spans) == 2


def test_a_save_that_is_skipped(
    telemetry: Telemetry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tr.Checkpointer(tmp_path, no_dist=True) as checkpointer:
        monkeypatch.setattr(checkpointer._saver, "_is_busy", lambda save: True)
        assert checkpointer.save_async(1, state(), on_busy="skip").skipped
    (skips,) = telemetry.points(metrics.SKIPS, "save_async")
    assert skips.sum == 1
    assert set(telemetry.names) == {metrics.SKIPS.name}
    assert "in progress" in telemetry.span("save_async").attributes["torchrelay.skipped"]


def test_peers_that_a_call_lost_are_counted(telemetry: Telemetry) -> None:
    lost = {1: Outcome(route="tcp"), 2: Outcome("failed", "gone"), 3: Outcome("failed", "late")}
    with Measurement("send", rank=0, role="sender") as measured:
        measured.end(Report(None, 8, {"data": 0.5}, dict(lost)))
    (peers,) = telemetry.points(metrics.LOST_PEERS, "send")
    assert peers.sum == 2 and peers.attributes["torchrelay.role"] == "sender"
    (nbytes,) = telemetry.points(metrics.BYTES, "send")
    assert nbytes.attributes["torchrelay.route"] == "tcp"


def test_the_span_is_a_child_and_the_current_one(telemetry: Telemetry) -> None:
    tracer = telemetry.tracers.get_tracer("program")
    with tracer.start_as_current_span("training") as outer:
        with Measurement("load", 1) as measured:
            inside = trace_api.get_current_span()
            measured.end(Report(1, 0))
        assert trace_api.get_current_span() is outer
    assert inside.get_span_context() == telemetry.span("load").context
    assert telemetry.span("load").parent == outer.get_span_context()


def test_an_outcome_before_the_caller_returns_has_its_stall(telemetry: Telemetry) -> None:
    with Measurement("save_async", 1, background=True) as measured:
        measured.end(Report(1, 8, {"stage": 0.1}))
        measured.end(None, ValueError("later"))
        assert not telemetry.spans
    assert telemetry.span("save_async").attributes["torchrelay.stall.seconds"] > 0
    assert not telemetry.points(metrics.FAILURES, "save_async")


# No harm


class Broken(SpanProcessor):
    """A part of a program's telemetry that raises."""

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        raise RuntimeError("on_start")

    def on_end(self, span: Any) -> None:
        raise RuntimeError("on_end")


class BrokenMeters:
    def get_meter(self, *_: Any) -> Any:
        raise RuntimeError("get_meter")


def test_histograms_are_made_for_seconds(telemetry: Telemetry) -> None:
    measure()
    data = telemetry._reader.get_metrics_data()
    assert data is not None
    bounds = {
        metric.name: point.explicit_bounds
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        for point in metric.data.data_points
        if hasattr(point, "explicit_bounds")
    }
    assert set(bounds) == {metrics.DURATION.name, metrics.PHASES.name}
    assert set(bounds.values()) == {metrics.SECONDS}


def test_telemetry_that_raises_fails_no_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracers = TracerProvider()
    tracers.add_span_processor(Broken())
    monkeypatch.setattr(trace_api, "get_tracer_provider", lambda: tracers)
    monkeypatch.setattr(metrics_api, "get_meter_provider", BrokenMeters)
    with tr.Checkpointer(tmp_path, no_dist=True) as checkpointer:
        checkpointer.save(1, state())
        report = checkpointer.save_async(2, state()).result(60)
        assert report is not None and report.step == 2
        assert torch.equal(checkpointer.load().state["weights"], state()["weights"])
        with pytest.raises(errors.StepNotFoundError):
            checkpointer.load(step=9)
    assert {"on_start", "get_meter"} <= set(re.findall(r"RuntimeError\('(\w+)'\)", caplog.text))


class State:
    """Something that a failed call had in its frames."""


def test_a_failed_call_keeps_no_state(telemetry: Telemetry) -> None:
    """An exception leads to frames, and frames lead to states."""
    made: list[weakref.ref[State]] = []

    def fail() -> None:
        state = State()
        made.append(weakref.ref(state))
        raise ValueError("x")

    measured = Measurement("load")
    try:
        with measured:
            fail()
    except ValueError:
        assert made[0]() is not None
    assert made[0]() is None
    assert [one["error.type"] for one in failures(telemetry, "load")] == ["ValueError"]


WITHOUT = """
import sys, torch
{before}
import torchrelay as tr
with tr.Checkpointer(sys.argv[1], no_dist=True) as checkpointer:
    checkpointer.save(1, {{"a": torch.ones(4)}})
    checkpointer.save_async(2, {{"a": torch.ones(4)}}).result(60)
    assert checkpointer.load().step == 2
print([name for name in sys.modules if name.split(".")[0] == "opentelemetry" and sys.modules[name]])
"""


@pytest.mark.parametrize("before", ["", "sys.modules['opentelemetry'] = None"])
def test_without_opentelemetry_nothing_is_imported(tmp_path: Path, before: str) -> None:
    script = WITHOUT.format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def seconds_of(act: Callable[[], None]) -> float:
    begun = time.thread_time()
    for _ in range(500):
        act()
    return (time.thread_time() - begun) / 500


def measure() -> None:
    with Measurement("save", 1, rank=0, role="coordinator") as measured:
        measured.end(Report(1, 8, {"plan": 0.1, "write": 0.1}, {"x": Outcome(route="storage")}))


@pytest.mark.parametrize("absent", [True, False], ids=["absent", "no provider"])
def test_a_call_that_nobody_measures_costs_microseconds(
    monkeypatch: pytest.MonkeyPatch, absent: bool
) -> None:
    if absent:
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
        monkeypatch.delitem(sys.modules, "opentelemetry.metrics")
    # It took 5 and 20 microseconds. The best of several runs, because the machine is in use.
    assert min(seconds_of(measure) for _ in range(20)) < (50e-6 if absent else 200e-6)


# The page


def rows_of(heading: str) -> list[list[str]]:
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def documented_phases() -> dict[str, set[str]]:
    return {words(row[0])[0]: set(words(row[2])) for row in rows_of("Operations and phases")}


def test_the_page_lists_the_instruments() -> None:
    always = ["torchrelay.operation", "torchrelay.rank", "torchrelay.role"]
    listed = {
        words(name)[0]: (kind, words(unit)[0], words(attributes))
        for name, kind, unit, attributes, *_ in rows_of("Instruments")
    }
    assert listed == {one.name: (one.kind, one.unit, [*always, *one.more]) for one in INSTRUMENTS}


def test_the_page_lists_the_operations() -> None:
    assert list(documented_phases()) == list(OPERATIONS)
    stalls = [words(row[0])[0] for row in rows_of("Operations and phases") if "stall" in row[3]]
    assert sorted(stalls) == sorted(BACKGROUND)


def test_prometheus_names_are_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.prometheus")
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import REGISTRY, generate_latest

    meters = MeterProvider([PrometheusMetricReader()])
    monkeypatch.setattr(metrics_api, "get_meter_provider", lambda: meters)
    measure()
    with Measurement("save_async", background=True) as measured:
        measured.end(None, ValueError("x"))
    with Measurement("publish") as measured:
        measured.end(None, skipped="busy")
    with Measurement("send") as measured:
        measured.end(Report(None, 8, {}, {1: Outcome("failed", "gone")}))
    with Measurement("compare_ranks") as measured:
        measured.end(Report(None, 8, differing=(Differing("w", "parameter", (1,)),)))
    text = generate_latest(REGISTRY).decode()
    meters.shutdown()
    exported = set(re.findall(r"^# TYPE (torchrelay_\w+) (?:histogram|counter)", text, re.M))
    assert exported == {words(row[4])[0] for row in rows_of("Instruments")}
    assert 'torchrelay_operation="save"' in text and 'error_type="ValueError"' in text
