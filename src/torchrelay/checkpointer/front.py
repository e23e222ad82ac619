"""Durable state: `Checkpointer`."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from torchrelay.checkpointer.keep import Keep, KeepAll
from torchrelay.checkpointer.loading import Loading
from torchrelay.checkpointer.pending import Pending, Saved, logger
from torchrelay.checkpointer.saving import Save, Saver
from torchrelay.checkpointer.signals import SaveOnSignal
from torchrelay.errors import (
    CheckpointError,
    DamagedError,
    ManifestError,
    RelayError,
    StepNotFoundError,
    TornStateError,
    UsageError,
)
from torchrelay.stores.layout import FILE_BYTES
from torchrelay.stores.locate import open_store
from torchrelay.stores.reading import Fetch, everything
from torchrelay.stores.records import Checkpoint, decode
from torchrelay.stores.seam import Store
from torchrelay.transports.assembly import Assembly
from torchrelay.transports.clock import Deadline, Stopwatch

Progress = Callable[[int, int], None]
_MIN_BUDGET = 16 << 20


class Loaded(NamedTuple):
    """What `load` returns: the state, its step, and how it went."""

    state: Any
    step: int
    report: LoadReport


@dataclass(frozen=True)
class LoadReport:
    """`damaged` says why newer steps were passed over."""

    bytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    verified: bool = True
    damaged: dict[int, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()  # stored, not in the destination (strict=False)
    extra: tuple[str, ...] = ()  # in the destination, not stored (strict=False)


class Checkpointer:
    """Steps of a job's state in a directory or a bucket (`s3://`, `gs://`, `az://`).

    Ranks of `group` (by default all, where torch.distributed is initialized) save one state
    together: each makes the same calls in the same order. Without a group a process is on its own.

    - `keep` says which steps stay; older ones are removed after a new one is committed.
    - `planner`: a `SavePlanner` and / or a `LoadPlanner` of torch, to be used in place of the
      default ones. They see the state as a flat dict of tensors by name.
    - `timeout` bounds each call, and an asynchronous save to its commit.
    - `on_busy`: what `save_async` does while another save is being written: "wait" or "skip".
    - `memory_budget` bounds the staged copy of `save_async` in bytes; without, it is one copy.
    - `stage="device"` keeps a spare copy of GPU tensors in GPU memory, so that `save_async` waits
      for that copy alone.
    - `save_on_signal`: a function that returns (step, state); on SIGTERM that is saved, after the
      save under way, and then the signal does what it would have done.
    - `file_bytes`: how large a data file may get before tensors go to another; None: any size.

    A context manager; `close` ends the writer process and frees the arena.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        group: Any = None,
        keep: Keep | None = None,
        planner: SavePlanner | LoadPlanner | Iterable[SavePlanner | LoadPlanner] | None = None,
        timeout: float = 1800.0,
        on_busy: Literal["wait", "skip"] = "wait",
        memory_budget: int | None = None,
        stage: Literal["host", "device"] = "host",
        save_on_signal: Callable[[], tuple[int, Any]] | None = None,
        signals: tuple[signal.Signals, ...] = (signal.SIGTERM,),
        file_bytes: int | None = FILE_BYTES,
    ) -> None:
        Deadline(timeout)
        if on_busy not in ("wait", "skip"):
            raise UsageError(f"on_busy is 'wait' or 'skip', not {on_busy!r}")
        if stage not in ("host", "device"):
            raise UsageError(f"stage is 'host' or 'device', not {stage!r}")
        if memory_budget is not None and memory_budget < _MIN_BUDGET:
            raise UsageError(f"memory_budget is at least {_MIN_BUDGET} bytes, not {memory_budget}")
        if file_bytes is not None and file_bytes < 1:
            raise UsageError(f"file_bytes is a positive number or None, not {file_bytes}")
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self._timeout = timeout
        self._on_busy = on_busy
        self._keep = keep or KeepAll()
        self._store: Store = open_store(root, timeout=timeout)
        self._all = Assembly(group, _channel(self._store.url))
        save_planner, self._load_planner = _planners(planner)
        from torchrelay import __version__

        self._saver = Saver(
            self._store,
            self._all,
            planner=save_planner,
            memory_budget=memory_budget,
            file_bytes=file_bytes,
            stage=stage,
            version=__version__,
        )
        self._pending: Pending | None = None
        self._closed = False
        self._calls = threading.RLock()
        self._good: set[int] = set()
        if self._all.coordinates:
            for name in self._store.clean():
                logger.info("removed %s, left behind by a writer that is gone", name)
        self._signal = SaveOnSignal(signals, self._last_save) if save_on_signal else None
        self._on_signal = save_on_signal

    @property
    def url(self) -> str:
        """Where the steps are."""
        return self._store.url

    # Saving.

    def save(
        self, step: int, state: object, *, overwrite: bool = False, timeout: float | None = None
    ) -> Saved:
        """Write a state; returns when the step is committed on the medium.

        A step is never overwritten unless `overwrite=True`, which writes beside it and swaps. Where
        any rank fails, every rank raises, with the rank and file at fault, and nothing of the step
        remains.
        """
        with self._calls:
            save = self._new_save(step, overwrite, timeout)
            self._settle(save)
            saved = self._saver.save(save, state)
            self._prune()
            return saved

    def save_async(
        self,
        step: int,
        state: object,
        *,
        overwrite: bool = False,
        timeout: float | None = None,
        on_busy: Literal["wait", "skip"] | None = None,
    ) -> Pending:
        """Stage a state and return; a process beside this one writes it.

        The state may change as soon as this returns. A failure that nobody learned of from the
        `Pending` is logged, and raised by the next call or by `close`.
        """
        with self._calls:
            save = self._new_save(step, overwrite, timeout)
            if (on_busy or self._on_busy) == "skip" and self._busy(save):
                return Pending(step, skipped=True)
            self._settle(save)
            pending = Pending(step)
            self._saver.save_async(save, state, pending, self._prune)
            self._pending = pending
            return pending

    def prepare(self, state: object) -> int:
        """Allocate and touch the memory that `save_async` of such a state needs, and start the
        writer process, so that the first save is as short as the later ones. Returns the bytes
        that this rank will write. All ranks call it together."""
        with self._calls:
            save = self._new_save(0, False, None)
            self._settle(save)
            return self._saver.prepare(save, state)

    def wait(self, timeout: float | None = None) -> None:
        """Until no save is under way; raises what went wrong with the last one."""
        if self._pending is not None:
            self._pending.result(timeout)

    def _new_save(self, step: int, overwrite: bool, timeout: float | None) -> Save:
        if self._closed:
            raise UsageError("this checkpointer is closed")
        if type(step) is not int or step < 0:
            raise UsageError(f"a step is a number from 0 on, not {step!r}")
        deadline = Deadline(self._timeout if timeout is None else timeout)
        return Save(step, overwrite, self._all.call(), deadline)

    def _busy(self, save: Save) -> bool:
        """Whether any rank still writes; all ranks come to the same answer."""
        mine = b"busy" if self._pending is not None and not self._pending.done() else b""
        heard = save.call.round(
            "begin", lambda: mine, lambda said: [max(said)] * len(said), save.deadline
        )
        return heard == b"busy"

    def _settle(self, save: Save) -> None:
        """Wait for the save under way, and raise its failure if nobody has seen it."""

        def mine() -> bytes:
            if self._pending is not None:
                self._pending.settle(save.deadline.left())
            return b""

        save.call.at("waiting for the save before")
        save.call.round("begin", mine, lambda said: said, save.deadline)

    def _last_save(self) -> None:
        assert self._on_signal is not None
        with suppress(RelayError, TimeoutError):  # it is logged; the last state still counts
            self.wait(self._timeout)
        step, state = self._on_signal()
        if step not in self._store.steps():
            self.save(step, state)

    # Loading.

    def load(
        self,
        into: object = None,
        *,
        step: int | None = None,
        strict: bool = True,
        only: str | Iterable[str] = (),
        verify: bool = True,
        atomic: bool = True,
        device: torch.device | str | None = None,
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> Loaded:
        """Read a step: into the caller's tensors, or as a new state (`into=None`).

        Without `step` it is the newest that verifies: one that is damaged is warned about and
        passed over. Distributed tensors are cut anew for the mesh and placements of `into`,
        whatever they were when saved; without `into` they come whole, on `device`.

        With `atomic`, every digest is checked before anything is written, so `into` is old or
        new. `atomic=False` reads once instead of twice and raises `TornStateError` if it cannot
        finish. `verify=False` checks no digests. `only` has patterns of dotted paths ("model.*").
        """
        patterns = (only,) if isinstance(only, str) else tuple(only)
        with self._calls:
            if self._closed:
                raise UsageError("this checkpointer is closed")
            self._raise_untold()
            call = self._all.call()
            deadline = Deadline(self._timeout if timeout is None else timeout)
            candidates = self._candidates(call, step, deadline)
            damaged: dict[int, str] = {}
            torn: RelayError | None = None
            for candidate in candidates:
                watch = Stopwatch()
                try:
                    loading = self._check(
                        call, candidate, deadline, watch,
                        check=verify and atomic and into is not None,
                        into=into, strict=strict, only=patterns, progress=progress,
                        device=None if device is None else torch.device(device),
                    )  # fmt: skip
                except (DamagedError, ManifestError) as fault:
                    if step is not None:
                        raise
                    damaged[candidate] = str(fault)
                    self._warn(candidate, fault)
                    continue
                try:
                    with watch("land"):
                        self._round(call, "land", lambda: loading.land(verify=verify), deadline)  # noqa: B023
                except RelayError as fault:
                    damaged[candidate] = str(fault)
                    if into is not None:
                        torn = fault
                    if step is not None or not isinstance(fault, DamagedError):
                        break
                    self._warn(candidate, fault)
                    continue
                with watch("commit"):
                    landed = loading.commit()
                report = LoadReport(
                    loading.nbytes, dict(watch.seconds), verify, damaged,
                    tuple(landed.missing), tuple(landed.extra),
                )  # fmt: skip
                return Loaded(landed.state, candidate, report)
            if torn is not None:
                raise TornStateError(
                    f"the destination is part old, part new, load again: {torn}",
                    step=torn.step,
                    phase="land",
                ) from torn
            if damaged and step is not None:
                raise CheckpointError(damaged[step], step=step)
            raise StepNotFoundError(
                f"no step that verifies in {self.url}"
                + "".join(f"\n  step {n}: {problem}" for n, problem in damaged.items()),
                step=step,
            )

    def _candidates(self, call: Any, step: int | None, deadline: Deadline) -> list[int]:
        def decide(said: list[bytes]) -> list[bytes]:
            asked = {msgspec.msgpack.decode(data) for data in said}
            if len(asked) > 1:
                raise UsageError(f"ranks ask for different steps: {sorted(map(str, asked))}")
            steps = sorted(self._store.steps(), reverse=True)
            if step is not None:
                if step not in steps:
                    shown = ", ".join(map(str, steps[:8])) or "none"
                    raise StepNotFoundError(
                        f"no step {step} in {self.url}; there: {shown}", step=step
                    )
                steps = [step]
            return [msgspec.msgpack.encode(steps)] * len(said)

        mine = msgspec.msgpack.encode(step)
        found: list[int] = msgspec.msgpack.decode(
            call.round("find", lambda: mine, decide, deadline)
        )
        return found

    def _check(
        self, call: Any, step: int, deadline: Deadline, watch: Stopwatch, *,
        check: bool, progress: Progress | None, **wanted: Any,
    ) -> Loading:  # fmt: skip
        made: list[Loading] = []

        def mine() -> None:
            with watch("plan"):
                record = self._record(step)
                bar = _Bar(progress)
                loading = Loading(
                    self._store,
                    record,
                    rank=self._all.rank,
                    world=self._all.world,
                    planner=self._load_planner,
                    coordinator=self._all.coordinates,
                    progress=bar.add,
                    **wanted,
                )
                bar.total = loading.nbytes * (2 if check else 1)
                made.append(loading)
            if check:
                with watch("verify"):
                    loading.check()

        self._round(call, "verify", mine, deadline)
        return made[0]

    def _round(self, call: Any, phase: str, act: Callable[[], None], deadline: Deadline) -> None:
        def mine() -> bytes:
            act()
            return b""

        call.at(phase)
        call.round(phase, mine, lambda said: said, deadline)

    def _warn(self, step: int, fault: Exception) -> None:
        text = f"step {step} in {self.url} is damaged and is passed over: {fault}"
        logger.warning(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)

    # Looking after what is there.

    def steps(self) -> list[int]:
        """Committed steps, in ascending order. Says nothing about their bytes: see `verify`."""
        return self._store.steps()

    def latest(self) -> int | None:
        """The newest committed step whose commit record and file sizes hold."""
        for step in reversed(self._store.steps()):
            if self._holds(step):
                return step
        return None

    def record(self, step: int) -> Checkpoint:
        """The commit record of a step: what is in it and where. `DamagedError` if it is not whole."""
        return self._record(step)

    def verify(self, step: int | None = None, *, progress: Progress | None = None) -> int:
        """Read every byte of a step (the newest, by default) and check every digest.

        Returns the step; `DamagedError` or `ManifestError` says what is wrong with it.
        """
        if step is None:
            steps = self._store.steps()
            if not steps:
                raise StepNotFoundError(f"no step in {self.url}")
            step = steps[-1]
        record = self._record(step)
        bar = _Bar(progress, record.nbytes)
        Fetch(self._store, record, everything(record), progress=bar.add).check()
        return step

    def delete(self, step: int) -> None:
        """Remove a step. One rank does it."""
        self._good.discard(step)
        try:
            self._store.delete(step)
        except FileNotFoundError:
            raise StepNotFoundError(f"no step {step} in {self.url}", step=step) from None
        except OSError as fault:
            raise CheckpointError(f"cannot delete: {fault}", step=step, file=self.url) from fault

    def _record(self, step: int) -> Checkpoint:
        file = f"{self.url}/step-{step}/manifest.json"
        try:
            data = self._store.manifest(step)
        except FileNotFoundError:
            raise StepNotFoundError(f"no step {step} in {self.url}", step=step) from None
        except OSError as fault:
            raise DamagedError(f"cannot be read: {fault}", step=step, file=file) from fault
        try:
            record = decode(data)
        except ManifestError as fault:
            raise DamagedError(
                f"manifest.json: {fault.message}", step=step, phase="verify", file=file
            ) from fault
        if record.step != step:
            raise DamagedError(f"manifest.json is that of step {record.step}", step=step, file=file)
        return record

    def _holds(self, step: int) -> bool:
        """Whether the commit record is whole and the files have the sizes it says."""
        try:
            record, sizes = self._record(step), self._store.sizes(step)
        except (RelayError, OSError):
            return False
        return all(sizes.get(file.name) == file.nbytes for file in record.files)

    def _prune(self) -> None:
        """Remove what the policy does not want, once something newer is safe. Never fails."""
        if not self._all.coordinates or isinstance(self._keep, KeepAll):
            return
        try:
            steps = self._store.steps()
            self._good = {step for step in steps if step in self._good or self._holds(step)}
            good = sorted(self._good)
            wanted = self._keep.wanted(good) | set(good[-1:])
            for step in good:
                if step not in wanted:
                    self.delete(step)
        except (RelayError, OSError) as fault:
            logger.warning("old steps could not be removed: %s", fault)

    # The end.

    def _raise_untold(self) -> None:
        if self._pending is not None and (fault := self._pending.untold()) is not None:
            raise fault

    def close(self) -> None:
        """Wait for the save under way, end the writer process, free the arena.

        Raises the failure of an asynchronous save that nobody has learned of.
        """
        with self._calls:
            if self._closed:
                return
            self._closed = True
            try:
                if self._pending is not None:
                    self._pending.settle(self._timeout)
            finally:
                if self._signal is not None:
                    self._signal.remove()
                self._saver.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, fault: object, trace: object) -> None:
        if kind is None:
            self.close()
            return
        with suppress(Exception):  # the block's own error is the one to show; this one is logged
            self.close()


class _Bar:
    """Bytes done of all, for the caller's progress function."""

    def __init__(self, show: Progress | None, total: int = 0) -> None:
        self._show = show
        self._lock = threading.Lock()
        self._done = 0
        self.total = total

    def add(self, nbytes: int) -> None:
        if self._show is not None:
            with self._lock:
                self._done += nbytes
                self._show(min(self._done, self.total), self.total)


_channels: dict[str, int] = {}


def _channel(url: str) -> str:
    """A name that all ranks' checkpointers of one place share, and no others."""
    _channels[url] = _channels.get(url, 0) + 1
    return f"{xxhash.xxh3_64_hexdigest(url.encode())}/{_channels[url]}"


def _planners(
    given: SavePlanner | LoadPlanner | Iterable[SavePlanner | LoadPlanner] | None,
) -> tuple[SavePlanner | None, LoadPlanner | None]:
    several = () if given is None else given
    if isinstance(several, (SavePlanner, LoadPlanner)):
        several = (several,)
    save: SavePlanner | None = None
    load: LoadPlanner | None = None
    for planner in several:
        if isinstance(planner, SavePlanner) and save is None:
            save = planner
        elif isinstance(planner, LoadPlanner) and load is None:
            load = planner
        else:
            raise UsageError(f"planner takes a SavePlanner and a LoadPlanner, not {planner!r}")
    return save, load
