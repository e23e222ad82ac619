"""The last save of a job that is told to end by a signal: when it is made, and of what."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import msgspec

from torchrelay.checkpointer.saves.signals import SaveOnSignal
from torchrelay.checkpointer.saves.stopping import Stopping
from torchrelay.deadlines import Deadline
from torchrelay.errors import CheckpointError, RelayError, UsageError
from torchrelay.transports.group.assembly import Assembly


class Job(Protocol):
    """What a last save needs of a `Checkpointer`."""

    def wait(self, timeout: float | None = None) -> None: ...
    def steps(self) -> list[int]: ...
    def save(self, step: int, state: object) -> object: ...


class LastSave:
    """Makes the last save of a job, once: at once in a process on its own, at the call that the
    ranks of a group agree on. Without a function that gives the state it never comes to that."""

    def __init__(
        self,
        job: Job,
        assembly: Assembly,
        state: Callable[[], tuple[int, Any]] | None,
        signals: tuple[signal.Signals, ...],
        timeout: float,
    ) -> None:
        self._all = assembly
        self._state = state
        self._timeout = timeout
        self.stopped = False
        self._signal: SaveOnSignal | None = None
        self._stopping: Stopping | None = None
        if state is None:
            return  # and refers to no job, which is freed when nobody else does
        if not callable(state):
            raise UsageError(f"save_on_signal is a function of no arguments, not {state!r}")
        self._job = job
        alone = assembly.world == 1
        self._signal = SaveOnSignal(signals, self._save, at_once=alone)
        if not alone:
            self._stopping = Stopping(assembly.board("stop"), assembly.world)

    def held(self) -> AbstractContextManager[None]:
        """Within: a signal interrupts nothing."""
        return nullcontext() if self._signal is None else self._signal.held()

    @property
    def asked(self) -> bool:
        """Whether this rank has a signal that all ranks are to answer together."""
        return self._stopping is not None and self._signal is not None and self._signal.came

    def tick(self) -> bool:
        """Whether the ranks have stopped, at this tick or before."""
        if self._stopping is not None and not self.stopped:
            asks, agreed = self.asked, False
            try:
                agreed = self._stopping.tick(asks)
            except CheckpointError:
                if asks:
                    raise
            with self.after(agreed):
                pass
        return self.stopped

    @contextmanager
    def after(self, agreed: bool) -> Iterator[None]:
        """After the block, however it ends: the last save, if all ranks agreed on it there."""
        try:
            yield
        finally:
            if agreed and self._signal is not None and not self.stopped:
                self._signal.answer()

    def _save(self) -> None:
        self.stopped = True
        with suppress(RelayError, TimeoutError):  # it is logged; the last state still counts
            self._job.wait(self._timeout)
        found: list[tuple[int, Any]] = []

        def mine() -> bytes:
            assert self._state is not None
            found.append(self._state())
            return msgspec.msgpack.encode(found[0][0])

        def decide(said: list[bytes]) -> list[bytes]:
            step = agreed_step([msgspec.msgpack.decode(data, type=int) for data in said])
            return [msgspec.msgpack.encode(step in self._job.steps())] * len(said)

        call = self._all.call()
        call.at("asking for the last state")
        there = call.round("last", mine, decide, Deadline(self._timeout))
        if msgspec.msgpack.decode(there, type=bool):
            call.farewell()
        else:
            self._job.save(*found[0])

    def close(self) -> None:
        """Answer no more signals. One that came does what it did before."""
        if self._signal is not None:
            self._signal.let_go()

    def forsake(self) -> None:
        """In a child of a fork: put back the handlers that were there."""
        if self._signal is not None:
            self._signal.remove()


def agreed_step(steps: list[int]) -> int:
    """The step that all ranks name."""
    if len(set(steps)) > 1:
        raise UsageError(f"ranks name different steps: {sorted(set(steps))}", step=steps[0])
    return steps[0]
