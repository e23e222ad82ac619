"""Which step is loaded, and the rounds in which all ranks load it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import torch

from torchrelay.checkpointer.loading import Loading
from torchrelay.checkpointer.selection import check_only
from torchrelay.deadlines import Deadline, Stopwatch
from torchrelay.errors import (
    DamagedError,
    RelayError,
    StepNotFoundError,
    TornStateError,
    UsageError,
)
from torchrelay.items import items_of
from torchrelay.landing.commit.ending import TORN
from torchrelay.landing.places import Landed
from torchrelay.landing.terms import Terms, checked_device
from torchrelay.landing.workspace import Workspace
from torchrelay.memory.bounded import bounded
from torchrelay.progress import Bar, ProgressCallback
from torchrelay.sources.seam import Opened
from torchrelay.stores.retry import Retry
from torchrelay.transports.group.assembly import Assembly, Call

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlanner

    from torchrelay.checkpointer.loading import Planned


@dataclass(frozen=True)
class LoadReport:
    """How a load went. `damaged` says why newer steps were passed over."""

    bytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    verified: bool = True
    damaged: dict[int, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()  # stored, not in the destination (strict=False)
    extra: tuple[str, ...] = ()  # in the destination, not stored (strict=False)
    instead: dict[str, str] = field(default_factory=dict)  # why a faster way was not taken


class Loaded(NamedTuple):
    """What `load` returns: the state, its step, and how it went."""

    state: Any
    step: int
    report: LoadReport


class Wanted(NamedTuple):
    """What the caller of a load asks for."""

    into: object
    step: int | None
    strict: bool
    only: tuple[str, ...]
    verify: bool
    atomic: bool
    device: torch.device | None
    progress: ProgressCallback | None

    @classmethod
    def of(
        cls,
        into: object,
        step: int | None,
        *,
        strict: bool,
        only: str | Iterable[str] = (),
        verify: bool = True,
        atomic: bool,
        device: torch.device | str | None,
        progress: ProgressCallback | None,
    ) -> Wanted:
        """The same, as a caller says it."""
        patterns = tuple(items_of("only", only, str, "a pattern"))
        where = checked_device(device)
        return cls(into, step, strict, patterns, verify, atomic, where, progress)

    @property
    def checked_first(self) -> bool:
        """Whether all digests are checked before the first byte is landed."""
        return self.verify and self.atomic and self.into is not None


def patience(deadline: Deadline) -> Retry:
    """What cannot be read is tried again until there is just the time left to tell all ranks."""
    spare = min(2.0, deadline.seconds / 3)
    return Retry(lambda: deadline.left() - spare)


class Shelf(Protocol):
    """Where a loader finds steps."""

    @property
    def url(self) -> str: ...
    def steps(self, patience: Retry = ...) -> list[int]: ...
    def open(self, step: int, patience: Retry = ...) -> Opened: ...
    def note_damaged(self, step: int) -> None: ...


class Loader:
    """Loads for the ranks of an assembly."""

    def __init__(
        self,
        shelf: Shelf,
        assembly: Assembly,
        planner: LoadPlanner | None,
        means: Workspace | None = None,
    ) -> None:
        self._shelf = shelf
        self._all = assembly
        self._planner = planner
        self._means = means  # what new tensors are made with
        self._held: Opened | None = None  # the step that is being loaded

    def load(self, call: Call, wanted: Wanted, deadline: Deadline) -> Loaded:
        """The step asked for, or the newest that verifies.

        Every rank hears of damage that any of them finds, so all of them pass to the next step
        together.
        """
        try:
            return self._load(call, wanted, deadline)
        finally:
            self._close()

    def _load(self, call: Call, wanted: Wanted, deadline: Deadline) -> Loaded:
        damaged: dict[int, str] = {}
        torn: RelayError | None = None
        todo = self._candidates(call, wanted.step, deadline)
        while todo:
            step = todo.pop(0)
            watch = Stopwatch()
            try:
                loading = self._plan(call, step, wanted, deadline, watch)
            except (DamagedError, StepNotFoundError) as fault:
                if self._has_moved(call, step, deadline):
                    todo = self._others(call, wanted.step, damaged, deadline)
                    continue
                if wanted.step is not None:
                    raise
                self._pass_over(step, fault, damaged)
                continue
            try:
                landed = self._land(call, loading, wanted, deadline, watch)
            except RelayError as fault:
                torn = fault if loading.touched else torn
                if isinstance(fault, DamagedError) and self._has_moved(call, step, deadline):
                    todo = self._others(call, wanted.step, damaged, deadline)
                    continue
                if wanted.step is not None or not isinstance(fault, DamagedError):
                    if torn is None or isinstance(fault, TornStateError):
                        raise
                    break
                self._pass_over(step, fault, damaged)
                continue
            report = LoadReport(
                loading.nbytes,
                dict(watch.seconds),
                wanted.verify,
                damaged,
                tuple(landed.missing),
                tuple(landed.extra),
                loading.instead,
            )
            return Loaded(landed.state, step, report)
        if torn is not None:
            raise TornStateError(
                f"{TORN}: {torn}",
                step=torn.step,
                phase="land",
            ) from torn
        raise StepNotFoundError(
            f"no step that verifies in {self._shelf.url}"
            + "".join(f"\n  step {step}: {problem}" for step, problem in damaged.items())
        )

    def _candidates(self, call: Call, step: int | None, deadline: Deadline) -> list[int]:
        """The steps to try, the best first; the same on every rank."""

        def decide(said: list[bytes]) -> list[bytes]:
            asked = {msgspec.msgpack.decode(data) for data in said}
            if len(asked) > 1:
                raise UsageError(f"ranks ask for different steps: {sorted(map(str, asked))}")
            listed = bounded(
                lambda: self._shelf.steps(patience(deadline)),
                deadline.early(),
                "list the steps",
                file=self._shelf.url,
            )
            steps = sorted(listed, reverse=True)
            if step is not None and step not in steps:
                shown = ", ".join(map(str, steps[:8])) or "none"
                raise StepNotFoundError(
                    f"no step {step} in {self._shelf.url}; there: {shown}", step=step
                )
            return [msgspec.msgpack.encode(steps if step is None else [step])] * len(said)

        mine = msgspec.msgpack.encode(step)
        heard = call.round("find", lambda: mine, decide, deadline)
        found: list[int] = msgspec.msgpack.decode(heard)
        return found

    def _close(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    def _others(
        self, call: Call, step: int | None, damaged: dict[int, str], deadline: Deadline
    ) -> list[int]:
        """The steps that are there, but for those that were found damaged."""
        return [found for found in self._candidates(call, step, deadline) if found not in damaged]

    def _has_moved(self, call: Call, step: int, deadline: Deadline) -> bool:
        """Whether a step that could not be loaded is gone, or another save has its place: then it
        is no damage, and there is a step to load."""
        seen = b"" if self._held is None else self._held.digest

        def decide(said: list[bytes]) -> list[bytes]:
            try:
                with closing(self._shelf.open(step, patience(deadline))) as held:
                    there = held.digest
            except DamagedError:
                there = b""
            except StepNotFoundError:
                return [b"moved"] * len(said)
            moved = any(digest != there for digest in said)
            return [b"moved" if moved else b""] * len(said)

        if deadline.passed:
            return False
        return bool(call.round("look again", lambda: seen, decide, deadline))

    def _plan(
        self, call: Call, step: int, wanted: Wanted, deadline: Deadline, watch: Stopwatch
    ) -> Loading:
        """Work out what this rank reads, and look at all of it if that is asked for."""
        made: list[Loading] = []
        self._close()

        def act() -> bytes:
            bar = Bar(wanted.progress)
            with watch("plan"):
                self._held = held = bounded(
                    lambda: self._shelf.open(step, patience(deadline)),
                    deadline.early(),
                    "open the step",
                    file=self._shelf.url,
                )
                check_only(held.record, wanted.only)
                # What is costly to read is read once, to memory of its own.
                once = held.files.costly_reads and self._planner is None
                staged = wanted.checked_first and once
                terms = Terms(wanted.strict, wanted.atomic, staged, wanted.device, self._all.rank)
                loading = Loading(
                    held.files,
                    held.record,
                    wanted.into,
                    terms,
                    world=self._all.world,
                    only=wanted.only,
                    planned=self._planned(),
                    progress=bar.add,
                    means=self._means,
                )
            left = loading.left
            loading.within = lambda read: bounded(
                read, deadline.early(), "read the step", file=held.files.url, left=left
            )
            twice = wanted.checked_first and not once
            bar.total = loading.nbytes * (2 if twice else 1)
            made.append(loading)
            with watch("verify"):
                loading.compare_twins()
                if wanted.checked_first:
                    # It reads into memory of its own, so it can be left behind.
                    bounded(loading.check, deadline.early(), "read the step", file=held.files.url)
                loading.make(verify=wanted.verify)
            return held.digest

        def decide(said: list[bytes]) -> list[bytes]:
            if len(set(said)) > 1:
                raise StepNotFoundError("the step was replaced while it was opened", step=step)
            return said

        call.at("verify")
        call.round("verify", act, decide, deadline)
        return made[0]

    def _planned(self) -> Planned | None:
        """How the user's planner is asked, if there is one."""
        if self._planner is None:
            return None
        from torchrelay.checkpointer.planners import PlannedReads

        return partial(PlannedReads, self._planner, self._all.coordinates)

    def _land(
        self, call: Call, loading: Loading, wanted: Wanted, deadline: Deadline, watch: Stopwatch
    ) -> Landed:
        """Objects first: where one refuses, on any rank, all have their old state again."""
        return loading.end(
            verify=wanted.verify,
            together=lambda phase, act: _together(call, phase, act, deadline),
            watch=watch,
        )

    def _pass_over(self, step: int, fault: RelayError, damaged: dict[int, str]) -> None:
        damaged[step] = str(fault)
        if isinstance(fault, DamagedError):
            self._shelf.note_damaged(step)
        text = f"step {step} in {self._shelf.url} is damaged or gone, and is passed over: {fault}"
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def _together(call: Call, phase: str, act: Callable[[], None], deadline: Deadline) -> None:
    """Do something on every rank; whatever fails on one is raised on all."""

    def mine() -> bytes:
        act()
        return b""

    call.at(phase)
    call.round(phase, mine, lambda said: said, deadline)
