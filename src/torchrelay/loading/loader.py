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
from torchrelay.coordination.call import Call
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.deadlines import Deadline, Stopwatch
from torchrelay.errors import (
    CheckpointError,
    DamagedError,
    ManifestError,
    MismatchError,
    RelayError,
    StepNotFoundError,
    TornStateError,
    UsageError,
)
from torchrelay.landing.commit.landing import TORN, Landed
from torchrelay.landing.options import LandingOptions, checked_device
from torchrelay.landing.workspace import Workspace
from torchrelay.loading.rank_load import RankLoad
from torchrelay.loading.selection import add_savers, check_include
from torchrelay.memory.bounded import bounded
from torchrelay.memory.pool import CheckedWorkspace
from torchrelay.memory.uninterrupted import uninterrupted
from torchrelay.progress import Bar, ProgressCallback
from torchrelay.results import Attempt, Loaded, Outcome, Report
from torchrelay.sources.seam import Opened, Source
from torchrelay.sources.subtree import Subtree
from torchrelay.steps import check_step

LOOK_SECONDS = 0.1  # before another look for the newest step
VISIBLE_SECONDS = 10.0  # that a network file system may take to show a step that rank 0 sees
PAUSES = (0.05, 1.0)  # seconds between two looks for it: first, and after a long wait
_MOVED, _UNSEEN = b"moved", b"unseen"


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
        self._opened: Opened | None = None  # the step that is being loaded
        self._skipped: dict[int, str] = {}  # with the reasons
        self.damaged: set[int] = set()  # steps that were skipped because of their bytes

    def load(self, call: Call, request: LoadRequest, deadline: Deadline) -> Loaded:
        """The requested step, or the newest that verifies.

        Every rank learns of damage that any of them finds, so all of them turn to the next step
        together.
        """
        self._skipped, self.damaged = {}, set()
        try:
            return self._load(call, request, deadline)
        finally:
            self._close()

    def _load(self, call: Call, request: LoadRequest, deadline: Deadline) -> Loaded:
        torn: RelayError | None = None
        unseen = Wait()
        todo = self._find(call, request.step, deadline)
        while todo:
            step = todo.pop(0)
            watch = Stopwatch()
            load: RankLoad | None = None
            try:
                load = self._plan(call, step, request, deadline, watch)
                landed = self._land(call, load, request.verify, deadline, watch)
            except RelayError as fault:
                touched = load is not None and load.touched
                torn = fault if touched else torn
                skips = (DamagedError,) if load else (DamagedError, StepNotFoundError)
                if isinstance(fault, skips) and self._has_moved(call, step, unseen, deadline):
                    todo = [
                        found
                        for found in self._find(call, request.step, deadline)
                        if found not in self._skipped
                    ]
                    continue
                if request.step is not None or not isinstance(fault, skips):
                    if torn is None or isinstance(fault, TornStateError):
                        raise
                    break
                self._skip(step, fault)
                continue
            name = self._source.name
            report = Report(
                step,
                load.nbytes,
                dict(watch.seconds),
                {name: Outcome(route="storage", bytes=load.nbytes)},
                tuple([Attempt(name, number, why) for number, why in self._skipped.items()]),
                tuple(landed.extra),
                tuple(landed.missing),
                request.verify,
                load.instead,
            )
            return Loaded(landed.state, step, report)
        if torn is not None:
            raise TornStateError(f"{TORN}: {torn}", step=torn.step, phase="land") from torn
        raise StepNotFoundError(
            f"no step that verifies in {self._source.name}"
            + "".join(f"\n  step {step}: {problem}" for step, problem in self._skipped.items())
        )

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
                call.round("plan", act, lambda said: said, deadline)
                return step
            except StepNotFoundError:  # it was replaced meanwhile
                if request.step is not None or deadline.early() < LOOK_SECONDS:
                    raise
                time.sleep(LOOK_SECONDS)

    def _find(self, call: Call, step: int | None, deadline: Deadline) -> list[int]:
        """The steps to try, the best first; the same on every rank."""

        def decide(said: list[bytes]) -> list[bytes]:
            asked = {msgspec.msgpack.decode(data) for data in said}
            if len(asked) > 1:
                raise UsageError(
                    f"ranks ask for different steps: {sorted(map(str, asked))}; ask for the same"
                )
            steps = sorted(self._source.steps(deadline), reverse=True)
            if step is not None and step not in steps:
                shown = ", ".join(map(str, steps[:8])) or "none"
                raise StepNotFoundError(
                    f"no step {step} in {self._source.name}; existing steps: {shown}", step=step
                )
            return [msgspec.msgpack.encode(steps if step is None else [step])] * len(said)

        mine = msgspec.msgpack.encode(step)
        heard = call.round("find", lambda: mine, decide, deadline)
        return msgspec.msgpack.decode(heard, type=list[int])

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _has_moved(self, call: Call, step: int, unseen: Wait, deadline: Deadline) -> bool:
        """Whether a step that could not be loaded was removed, or replaced by another save: then it
        is not damaged. The same, after a pause, if a rank does not see yet what the coordinator
        sees; `CheckpointError` if it does not for long."""
        if deadline.passed:
            return False
        seen = b"" if self._opened is None else self._opened.digest
        name = self._source.name

        def mine() -> bytes:
            return msgspec.msgpack.encode((seen, self._look(step, deadline), name))

        def decide(said: list[bytes]) -> list[bytes]:
            found = [
                msgspec.msgpack.decode(data, type=tuple[bytes, bytes | None, str]) for data in said
            ]
            there = found[0][1]
            blind = next((rank for rank, (_, now, _) in enumerate(found) if now is None), None)
            if there is not None and blind is not None:
                if unseen.lasts(deadline):
                    return [_UNSEEN] * len(said)
                raise CheckpointError(
                    f"rank {blind} does not see {name}/step-{step}, as rank 0 does: is it on a "
                    f"shared file system? Rank {blind} has {found[blind][2]}",
                    rank=blind,
                    step=step,
                )
            moved = there is None or any(before != there for before, _, _ in found)
            return [_MOVED if moved else b""] * len(said)

        found = call.round("look again", mine, decide, deadline)
        if found == _UNSEEN:
            unseen.pause()
        return bool(found)

    def _look(self, step: int, deadline: Deadline) -> bytes | None:
        """The digest of a step's record; empty if it is damaged, None if it does not exist."""
        try:
            with closing(self._source.open(step, deadline)) as opened:
                return opened.digest
        except DamagedError:
            return b""
        except StepNotFoundError:
            return None

    def _plan(
        self, call: Call, step: int, request: LoadRequest, deadline: Deadline, watch: Stopwatch
    ) -> RankLoad:
        """Plan the reads of this rank, and check all of them if that comes first."""
        made: list[RankLoad] = []
        self._close()

        def act() -> bytes:
            bar = Bar(request.progress)
            with watch("plan"):
                self._opened = opened = self._source.open(step, deadline)
                if request.key is not None:
                    opened = Subtree(opened, request.key)
                load = self._planned(opened, request, bar)
            made.append(load)
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

        def decide(said: list[bytes]) -> list[bytes]:
            if len(set(said)) > 1:
                raise StepNotFoundError(
                    "the step was replaced while it was opened: load again", step=step
                )
            return said

        call.at("verifying")
        call.round("verify", partial(_in_free_memory, act, step), decide, deadline)
        return made[0]

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

    def _skip(self, step: int, fault: RelayError) -> None:
        self._skipped[step] = str(fault)
        if isinstance(fault, DamagedError):
            self.damaged.add(step)
        text = f"step {step} in {self._source.name} is damaged or gone, and is skipped: {fault}"
        warnings.warn(text, RuntimeWarning, stacklevel=5)


class Wait:
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
