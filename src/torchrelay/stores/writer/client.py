"""The trainer's end of the writer process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from torchrelay.errors import CheckpointError, StorageTimeoutError
from torchrelay.stores.writer import process as p
from torchrelay.stores.writer.companion import END_SECONDS, Companion
from torchrelay.stores.writer.ranges import FileSpec

_START_SECONDS = 60.0


class WriterProcess:
    """A writer process, started when it is first needed and again if it was lost.

    One save at a time uses it; the caller sees to that. Every request has a deadline, in seconds
    from now; a writer that does not keep it is ended.
    """

    def __init__(self) -> None:
        self._writer = Companion("torchrelay.stores.writer.process")
        self._lock = threading.Lock()
        self._attached = (0, -1)  # which of its processes has which arena
        self._save = 0

    @property
    def pid(self) -> int | None:
        return self._writer.pid

    def start(self) -> None:
        self._writer.start()

    def attach(
        self, fds: Sequence[int], each: int, nbytes: int, timeout: float = _START_SECONDS
    ) -> None:
        """Show the writer an arena, unless it is the one it has."""
        self.start()
        arena = self._writer.generation, os.fstat(fds[0]).st_ino
        if self._attached == arena:
            return
        with self._lock:
            self._ask(p.Attach(each, nbytes), min(timeout, _START_SECONDS), "attach", fds)
        self._attached = arena

    def begin(
        self, url: str, step: int, token: str, files: Sequence[FileSpec], timeout: float
    ) -> int:
        """Open the files of a save. Returns a number that stands for this save from here on."""
        records = [tuple(file) for file in files]
        with self._lock:
            self._save += 1
            self._ask(p.Begin(url, step, token, timeout, records), timeout, "open")  # type: ignore[arg-type]
            return self._save

    def write(self, save: int, ranges: list[tuple[int, int, int, int]], timeout: float) -> None:
        with self._current(save, "write"):
            self._ask(p.Write(ranges), timeout, "write")

    def finish(self, save: int, timeout: float) -> list[bytes]:
        with self._current(save, "sync"):
            return self._ask(p.Finish(), timeout, "sync").digests

    def abort(self, save: int) -> None:
        """Give up the files of a save, if it is still the one under way; never raises."""
        with suppress(CheckpointError), self._current(save, "abort"):
            self._ask(p.Abandon(), END_SECONDS, "abort")

    @contextmanager
    def _current(self, save: int, phase: str) -> Iterator[None]:
        """Within: the writer is at this save. A save that was given up may still have a thread
        that would go on with it, in the files of the next one."""
        with self._lock:
            if save != self._save:
                raise CheckpointError("this save was given up", phase=phase)
            yield

    def _ask(
        self, request: p.Request, timeout: float, phase: str, fds: Sequence[int] = ()
    ) -> p.Finished:
        try:
            data = self._writer.exchange(msgspec.msgpack.encode(request), timeout, fds)
        except BaseException as fault:
            code = self._writer.exit_status
            self._writer.drop()
            if isinstance(fault, TimeoutError):
                raise StorageTimeoutError(
                    "the writer did not finish in time", phase=phase
                ) from None
            if isinstance(fault, (EOFError, OSError)):
                raise CheckpointError(
                    f"the writer process was lost ({fault or 'closed'}; exit status {code})",
                    phase=phase,
                ) from None
            raise
        answer = p.answer_of(data)
        if isinstance(answer, p.Failed):
            raise CheckpointError(answer.message, phase=answer.phase or phase, file=answer.file)
        return answer

    def forsake(self) -> None:
        """In a child of a fork: let go of what is the parent's, which stays as it is."""
        self._writer.forsake()

    def close(self) -> None:
        """End the process; it is idle, or its work is given up."""
        self._writer.close()
