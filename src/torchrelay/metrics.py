"""Spans and metrics of every call, for OpenTelemetry: docs/metrics.md lists them.

Nothing is imported here. A program that wants telemetry has imported OpenTelemetry's API to set a
provider; in every other program a call costs two lookups in `sys.modules`.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from torchrelay.results import Report
from torchrelay.version import __version__

logger = logging.getLogger("torchrelay")

OPERATION, PHASE, ROUTE = "torchrelay.operation", "torchrelay.phase", "torchrelay.route"
RANK, ROLE, ERROR = "torchrelay.rank", "torchrelay.role", "error.type"
OPERATIONS = (
    *("send", "recv", "save", "save_async", "mirror", "load"),
    *("publish", "stage", "pull", "recover", "compare_ranks"),
)

# OpenTelemetry's default boundaries are made for milliseconds.
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Instrument(NamedTuple):
    """A metric: every measurement has the operation, and rank and role where they are known."""

    kind: Literal["histogram", "counter"]
    name: str
    unit: str
    more: tuple[str, ...]  # attributes besides those
    description: str


DURATION = Instrument(
    "histogram", "torchrelay.call.duration", "s", (ROUTE, ERROR), "Calls, from begin to end"
)
PHASES = Instrument(
    "histogram", "torchrelay.phase.duration", "s", (PHASE, ROUTE), "Phases of calls that succeeded"
)
STALL = Instrument(
    "histogram", "torchrelay.stall.duration", "s", (), "How long the caller of a save waited"
)
BYTES = Instrument("counter", "torchrelay.bytes", "By", (ROUTE,), "Bytes of states that were moved")
FAILURES = Instrument("counter", "torchrelay.failures", "{call}", (ERROR, PHASE), "Failed calls")
SKIPS = Instrument("counter", "torchrelay.skips", "{call}", (), "Saves and publishes skipped")
LOST_PEERS = Instrument(
    "counter", "torchrelay.peers.failed", "{peer}", (), "Peers lost by calls that succeeded"
)
DIFFERING = Instrument(
    "counter", "torchrelay.replicas.differing", "{tensor}", (), "Replicas found to differ"
)
INSTRUMENTS = (DURATION, PHASES, STALL, BYTES, FAILURES, SKIPS, LOST_PEERS, DIFFERING)


class _Ended(NamedTuple):
    report: Report | None = None
    fault: BaseException | None = None
    skipped: str | None = None


class Measurement:
    """One call of the library. Within it, its span is the current one.

    `end` is called once the outcome is known: inside, or, with `background=True`, also later and on
    another thread. Then the time inside is the stall. An exception that leaves is a failure. No
    method raises: telemetry that fails is logged, and the call continues.
    """

    def __init__(
        self,
        operation: str,
        step: int | None = None,
        *,
        rank: int | None = None,
        role: str | None = None,
        background: bool = False,
    ) -> None:
        self._operation, self._step, self._background = operation, step, background
        known = {OPERATION: operation, RANK: rank, ROLE: role}
        self._known = {name: value for name, value in known.items() if value is not None}
        self._outcome: _Ended | None = None
        self._inside, self._lock = True, threading.Lock()
        self._span: Any = None
        self._current: Any = None  # while the span is the current one

    def __enter__(self) -> Measurement:
        self._begun = time.monotonic()
        if (api := sys.modules.get("opentelemetry.trace")) is not None:
            _safely(self._begin_span, api)
        return self

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        stall = time.monotonic() - self._begun
        if self._current is not None:
            _safely(self._current.__exit__, None, None, None)
            self._current = None
        skipped = self._outcome is not None and self._outcome.skipped is not None
        if self._background and fault is None and not skipped:
            _safely(self._add_stall, stall)
        with self._lock:  # from here on another thread may end the span
            self._inside = False
            if self._outcome is None and fault is not None:
                self._outcome = _Ended(fault=fault)
            outcome = self._outcome
        if outcome is not None:
            _safely(self._finish, outcome)

    def end(
        self,
        report: Report | None,
        fault: BaseException | None = None,
        skipped: str | None = None,
    ) -> None:
        """The outcome: a report, a failure, or why the call did nothing. Only the first counts."""
        with self._lock:
            if self._outcome is not None:
                return
            self._outcome = outcome = _Ended(report, fault, skipped)
            if self._inside:
                return  # the stall is not known yet
        _safely(self._finish, outcome)

    def _begin_span(self, api: Any) -> None:
        attributes = dict(self._known)
        if self._step is not None:
            attributes["torchrelay.step"] = self._step
        tracer = _tracer(api.get_tracer_provider())
        span = tracer.start_span(f"torchrelay.{self._operation}", attributes=attributes)
        if not span.is_recording():
            return  # no provider, or a sampler that does not want it
        self._span = span
        current = api.use_span(span, record_exception=False, set_status_on_exception=False)
        current.__enter__()
        self._current = current

    def _add_stall(self, seconds: float) -> None:
        if self._span is not None:
            self._span.set_attribute("torchrelay.stall.seconds", seconds)
        if (api := sys.modules.get("opentelemetry.metrics")) is not None:
            _recorders(api.get_meter_provider())[STALL](seconds, self._known)

    def _finish(self, outcome: _Ended) -> None:
        seconds = time.monotonic() - self._begun
        self._outcome = _Ended()  # a failure leads to frames, and these to states
        if (api := sys.modules.get("opentelemetry.metrics")) is not None:
            _safely(self._measure, api, outcome, seconds)
        if self._span is not None:
            _safely(self._end_span, self._span, outcome)

    def _measure(self, api: Any, outcome: _Ended, seconds: float) -> None:
        record = _recorders(api.get_meter_provider())
        report, fault, known = outcome.report, outcome.fault, self._known
        if outcome.skipped is not None:
            record[SKIPS](1, known)
        elif fault is not None:
            failed = {**known, ERROR: type(fault).__name__}
            record[DURATION](seconds, failed)
            phase = getattr(fault, "phase", None)
            record[FAILURES](1, failed if phase is None else {**failed, PHASE: str(phase)})
        elif report is not None:
            routed = {**known, ROUTE: route} if (route := report.route) else known
            record[DURATION](seconds, routed)
            record[BYTES](report.bytes, routed)
            for phase, spent in report.seconds.items():
                record[PHASES](spent, {**routed, PHASE: phase})
            if lost := report.failed:
                record[LOST_PEERS](len(lost), known)
            if report.differing and known.get(ROLE) != "member":  # all ranks have the same ones
                record[DIFFERING](len(report.differing), known)

    def _end_span(self, span: Any, outcome: _Ended) -> None:
        report, fault = outcome.report, outcome.fault
        try:
            if outcome.skipped is not None:
                span.set_attribute("torchrelay.skipped", outcome.skipped)
            if report is not None:
                span.set_attributes(_facts(report))
            if fault is not None:
                api = sys.modules["opentelemetry.trace"]
                span.set_attribute(ERROR, type(fault).__name__)
                span.record_exception(fault)
                span.set_status(api.Status(api.StatusCode.ERROR, str(fault)))
        finally:
            span.end()


def _facts(report: Report) -> dict[str, Any]:
    """The attributes of a span that succeeded."""
    known: dict[str, Any] = {
        "torchrelay.step": report.step,
        "torchrelay.bytes": report.bytes,
        ROUTE: report.route,
    }
    found = {name: value for name, value in known.items() if value not in (None, "")}
    for phase, seconds in report.seconds.items():
        found[f"torchrelay.seconds.{phase.replace(' ', '_')}"] = seconds
    return found


@lru_cache(maxsize=1)  # a program has one provider
def _tracer(provider: Any) -> Any:
    return provider.get_tracer("torchrelay", __version__)


@lru_cache(maxsize=1)
def _recorders(provider: Any) -> dict[Instrument, Callable[..., None]]:
    """For each instrument the method that records a value."""
    meter, made = provider.get_meter("torchrelay", __version__), {}
    for one in INSTRUMENTS:
        about: dict[str, Any] = {"unit": one.unit, "description": one.description}
        if one.kind == "histogram":
            about["explicit_bucket_boundaries_advisory"] = SECONDS
            made[one] = meter.create_histogram(one.name, **about).record
        else:
            made[one] = meter.create_counter(one.name, **about).add
    return made


def _safely(act: Callable[..., object], *args: object) -> None:
    try:
        act(*args)
    except Exception as fault:
        logger.warning("telemetry failed, the call continues: %r", fault)
