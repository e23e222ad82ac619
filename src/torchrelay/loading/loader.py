"""Which step is loaded, and the rounds in which all ranks load it.

find      all ranks learn which steps the source has
verify    each rank opens the step, plans its reads, and checks digests if that comes first
tell      objects get their new state; where one refuses, all have their old state again
land      the caller's tensors are written
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from torchrelay.arguments import items_of
from torchrelay.coordination.call import Call, returned
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.deadlines import Deadline, Stopwatch
from torchrelay.errors import (
    DamagedError,
    ManifestError,
    MismatchError,
    RelayError,
    StepNotFoundError,
    UsageError,
)
from torchrelay.landing.commit.landing import Landed
from torchrelay.landing.options import LandingOptions, checked_device
from torchrelay.landing.workspace import Workspace
from torchrelay.loading.rank_load import RankLoad
from torchrelay.loading.search import (
    AttemptProgress,
    Look,
    StepLook,
    StepSearch,
    check_unmarked,
    compare,
    unseen,
)
from torchrelay.loading.selection import add_savers, check_include
from torchrelay.memory.bounded import bounded
from torchrelay.memory.pool import CheckedWorkspace
from torchrelay.memory.uninterrupted import uninterrupted
from torchrelay.progress import Bar, ProgressCallback
from torchrelay.results import Attempt, Loaded, Outcome, Report
from torchrelay.sources.source import Opened, Source
from torchrelay.sources.subtree import Subtree
from torchrelay.steps import check_step

LOOK_SECONDS = 0.1  # before another look for the newest step
VISIBLE_SECONDS = 10.0  # that a network file system may take to show a step that rank 0 sees
PAUSES = (0.05, 1.0)  # seconds between two looks for it: first, and after a long wait

# The digest of a step when it was opened and now, and the source, as a rank names it.
_look = msgspec.msgpack.Decoder(tuple[bytes, bytes | None, str])


@dataclass
class LoadRequest:
    """The arguments of a load, as the caller gave them."""

    into: object = None
    step: int | None = None
    strict: bool = True
    key: str | None = None
    include: str | Iterable[str] = ()
    verify: bool = True
    atomic: bool = True
    device: torch.device | str | None = None
    progress: ProgressCallback | None = None

    def __post_init__(self) -> None:
        if self.step is not None:
            self.step = check_step(self.step)
        if self.key is not None and not isinstance(self.key, str):
            raise UsageError(f"key is a dotted path, not {self.key!r}")
        self.patterns = tuple(items_of("include", self.include, str, "a pattern"))
        self.place = checked_device(self.device)

    @property
    def checked_first(self) -> bool:
        """Whether all digests are checked before the first byte is landed."""
        return self.verify and self.atomic and self.into is not None


class Loader:
    """Loads steps of a source, for the ranks of a coordinator.

    `in_memory`: the bytes of a step are in memory of this host when it is landed, where reads do
    not hang; some loads find that themselves. So a landing that has begun ends: neither the
    deadline nor an interrupt of the caller breaks it off, and the interrupt is raised afterwards.
    """

    def __init__(
        self,
        source: Source,
        ranks: Coordinator,
        workspace: Workspace | None = None,
        *,
        in_memory: bool = False,
    ) -> None:
        self._in_memory = in_memory
        self._source = source
        self._ranks = ranks
        # Without its own, memory comes from torch, and is compared with what is free.
        self._workspace = workspace or CheckedWorkspace()  # what new tensors are allocated with
        self.damaged: set[int] = set()  # steps that were skipped because of their bytes

    def load(self, call: Call, request: LoadRequest, deadline: Deadline) -> Loaded:
        """The requested step, or the newest that verifies.

        Every rank learns of damage that any of them finds, so all of them turn to the next step
        together.
        """
        self.damaged = set()
        search, visibility = StepSearch(self._source.name, request.step), Visibility()
        search.listed(self._find(call, request.step, deadline))
        while True:
            with closing(_Attempt(search.next(), takes_marked=search.takes_marked)) as attempt:
                try:
                    landed = self._try(call, attempt, request, deadline)
                except RelayError as fault:
                    if search.is_marked(fault, attempt.progress):
                        search.pass_over(attempt.step, fault)
                        self._warn_of_mark(attempt.step, fault)
                        continue
                    if not search.is_doubtful(fault, attempt.progress):
                        search.fail(fault)
                    look = self._look_again(call, attempt, visibility, deadline)
                    if look is Look.SAME:
                        search.skip(attempt.step, fault)
                        self._warn(attempt.step, fault)
                    else:
                        search.listed(self._find(call, request.step, deadline))
                    continue
                return self._loaded(attempt, landed, search, request)

    def _try(
        self, call: Call, attempt: _Attempt, request: LoadRequest, deadline: Deadline
    ) -> Landed:
        load = self._plan(call, attempt, request, deadline)
        return self._land(call, load, request.verify, deadline, attempt.watch)

    def _loaded(
        self, attempt: _Attempt, landed: Landed, search: StepSearch, request: LoadRequest
    ) -> Loaded:
        load, name = attempt.load, self._source.name
        assert load is not None
        passed = {**search.skipped, **search.marked}
        if passed.pop(attempt.step, None) is not None:
            text = f"no step in {name} has equal replicas: step {attempt.step} is taken, the newest"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        report = Report(
            attempt.step,
            load.nbytes,
            dict(attempt.watch.seconds),
            {name: Outcome(route="storage", bytes=load.nbytes)},
            tuple([Attempt(name, number, why) for number, why in passed.items()]),
            tuple(landed.extra),
            tuple(landed.missing),
            request.verify and load.compared,
            load.instead,
        )
        return Loaded(landed.state, attempt.step, report)

    def check(self, call: Call, request: LoadRequest, deadline: Deadline) -> int:
        """Plan the newest step on every rank, and read nothing; its number. Raises as `load` does
        where the state does not fit."""

        def act() -> bytes:
            with closing(self._source.open(step, deadline)) as opened:
                below = opened if request.key is None else Subtree(opened, request.key)
                self._planned(below, request, Bar(None))
            return b""

        while True:
            step = max(self._find(call, request.step, deadline))
            try:
                call.round("plan", act, returned, deadline)
                return step
            except StepNotFoundError:  # it was replaced meanwhile
                if request.step is not None or deadline.early() < LOOK_SECONDS:
                    raise
                time.sleep(LOOK_SECONDS)

    def _find(self, call: Call, step: int | None, deadline: Deadline) -> list[int]:
        """The steps to try, the best first; the same on every rank."""

        def decide(messages: list[bytes]) -> list[bytes]:
            wanted = {msgspec.msgpack.decode(data) for data in messages}
            if len(wanted) > 1:
                raise UsageError(
                    f"ranks ask for different steps: {sorted(map(str, wanted))}; ask for the same"
                )
            steps = sorted(self._source.steps(deadline), reverse=True)
            if step is not None and step not in steps:
                shown = ", ".join(map(str, steps[:8])) or "none"
                raise StepNotFoundError(
                    f"no step {step} in {self._source.name}; existing steps: {shown}", step=step
                )
            return [msgspec.msgpack.encode(steps if step is None else [step])] * len(messages)

        mine = msgspec.msgpack.encode(step)
        answer = call.round("find", lambda: mine, decide, deadline)
        return msgspec.msgpack.decode(answer, type=list[int])

    def _look_again(
        self, call: Call, attempt: _Attempt, visibility: Visibility, deadline: Deadline
    ) -> Look:
        """All ranks look at a step that could not be loaded: one that was removed or replaced is
        not damaged. Pauses where a rank does not see yet what the coordinator sees;
        `CheckpointError` if it does not for long."""
        if deadline.passed:
            return Look.SAME
        step, name = attempt.step, self._source.name

        def mine() -> bytes:
            now = self._digest_now(step, deadline)
            return msgspec.msgpack.encode((attempt.digest, now, name))

        def decide(messages: list[bytes]) -> list[bytes]:
            found = [_look.decode(data) for data in messages]
            look, blind = compare([StepLook(opened, now) for opened, now, _ in found])
            if look is Look.UNSEEN and not visibility.lasts(deadline):
                raise unseen(name, step, blind, found[blind][2])
            return [look.name.encode()] * len(messages)

        look = Look[call.round("look again", mine, decide, deadline).decode()]
        if look is Look.UNSEEN:
            visibility.pause()
        return look

    def _digest_now(self, step: int, deadline: Deadline) -> bytes | None:
        """The digest of a step's record; empty if it is damaged, None if it does not exist."""
        try:
            with closing(self._source.open(step, deadline)) as opened:
                return opened.digest
        except DamagedError:
            return b""
        except StepNotFoundError:
            return None

    def _plan(
        self, call: Call, attempt: _Attempt, request: LoadRequest, deadline: Deadline
    ) -> RankLoad:
        """Plan the reads of this rank, and check all of them if that comes first."""
        step, watch = attempt.step, attempt.watch

        def act() -> bytes:
            bar = Bar(request.progress)
            with watch("plan"):
                attempt.opened = opened = self._source.open(step, deadline)
                if not attempt.takes_marked:
                    check_unmarked(opened.record, self._source.name)
                if request.key is not None:
                    opened = Subtree(opened, request.key)
                load = self._planned(opened, request, bar)
            attempt.made = load
            files, left = opened.files, load.left
            load.within = lambda read: bounded(
                read, deadline.early(), "read the step", file=files.url, left=left
            )
            twice = request.checked_first and not files.costly_reads
            bar.total = load.nbytes * (2 if twice else 1)
            if files.fetches_ahead:
                with watch("fetch"):
                    files.prepare(load.wanted())
            with watch("verify"):
                if request.checked_first:
                    # It reads into memory of its own, so it can be left behind.
                    bounded(load.check, deadline.early(), "read the step", file=files.url)
                load.make(verify=request.verify)
            return opened.digest

        def decide(digests: list[bytes]) -> list[bytes]:
            if len(set(digests)) > 1:
                raise StepNotFoundError(
                    "the step was replaced while it was opened: load again", step=step
                )
            return digests

        call.at("verifying")
        call.round("verify", partial(_in_free_memory, act, step), decide, deadline)
        assert attempt.made is not None
        attempt.load = attempt.made
        return attempt.load

    def _planned(self, opened: Opened, request: LoadRequest, bar: Bar) -> RankLoad:
        check_include(opened.record, request.patterns)
        # Bytes that are costly to read are read once, into memory of their own.
        staged = request.checked_first and opened.files.costly_reads
        rank = self._ranks.rank
        options = LandingOptions(
            request.strict, request.atomic, request.place, rank=rank, unstaged=not staged
        )
        try:
            return RankLoad(
                opened.files,
                opened.record,
                request.into,
                options,
                world=self._ranks.world,
                include=request.patterns,
                progress=bar.add,
                workspace=self._workspace,
            )
        except MismatchError as fault:
            add_savers(fault, opened.record, rank)
            raise
        except ManifestError as fault:
            raise DamagedError(
                f"the record contradicts itself: {fault.message}",
                step=opened.record.step,
                phase="verify",
                file=opened.files.url,
            ) from fault

    def _land(
        self, call: Call, load: RankLoad, verify: bool, deadline: Deadline, watch: Stopwatch
    ) -> Landed:
        """Objects first: where one refuses, on any rank, all have their old state again."""

        in_memory = self._in_memory or load.in_memory
        if in_memory:
            load.within = lambda read: read()

        def together(phase: str, act: Callable[[], None]) -> None:
            whole = in_memory and phase == "land"
            call.at(phase)
            call.together(phase, partial(uninterrupted, act) if whole else act, deadline)

        return load.end(verify=verify, together=together, watch=watch, unbroken=uninterrupted)

    def _warn_of_mark(self, step: int, fault: RelayError) -> None:
        """A step is passed over."""
        text = f"{fault.message}. An earlier step is tried; load(step={step}) takes this one"
        warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _warn(self, step: int, fault: RelayError) -> None:
        """A step is skipped."""
        if isinstance(fault, DamagedError):
            self.damaged.add(step)
        text = f"step {step} in {self._source.name} is damaged or gone, and is skipped: {fault}"
        warnings.warn(text, RuntimeWarning, stacklevel=4)


class _Attempt:
    """One attempt to load a step on this rank, until `close`. `load`: its plan, once all ranks have
    one."""

    def __init__(self, step: int, *, takes_marked: bool) -> None:
        self.step, self.takes_marked, self.watch = step, takes_marked, Stopwatch()
        self.opened: Opened | None = None
        self.made: RankLoad | None = None  # the plan of this rank
        self.load: RankLoad | None = None

    @property
    def digest(self) -> bytes:
        return b"" if self.opened is None else self.opened.digest

    @property
    def progress(self) -> AttemptProgress:
        return AttemptProgress(self.load is not None, self.load is not None and self.load.touched)

    def close(self) -> None:
        if self.opened is not None:
            self.opened.close()


class Visibility:
    """Looks for a step that some rank does not see yet."""

    def __init__(self) -> None:
        self._end: float | None = None
        self._pause, self._longest = PAUSES

    def lasts(self, deadline: Deadline) -> bool:
        """Whether another look is worth it."""
        now = time.monotonic()
        if self._end is None:
            self._end = now + VISIBLE_SECONDS
        return now < self._end and deadline.early() > 2 * self._pause

    def pause(self) -> None:
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, self._longest)


def _in_free_memory(act: Callable[[], bytes], step: int) -> bytes:
    """The result of `act`; `MismatchError` where the memory of this host does not suffice."""
    try:
        return act()
    except MemoryError as fault:
        raise MismatchError(
            f"the state does not fit into the memory of this host: {fault}. Free memory, load on "
            "more ranks, or a part of it with include=",
            step=step,
            phase="verify",
        ) from fault
