"""The trainer's end of the writer process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest

import msgspec

from torchrelay.deadlines import Deadline
from torchrelay.errors import CheckpointError, StorageTimeoutError
from torchrelay.processes.child_process import END_SECONDS, ChildProcess
from torchrelay.progress import Bar
from torchrelay.stores.writer.file_writer import FileSpec, Placed, Written
from torchrelay.stores.writer.process import Answer, Call

_answers = msgspec.msgpack.Decoder(Answer)
_START_SECONDS = 60.0
PART_BYTES = 64 << 20  # after which progress is reported


class WriterProcess(ChildProcess):
    """A writer process, started when it is first needed and again if it was lost.

    One save at a time uses it. Every request has a deadline; a writer that misses it is ended.
    """

    def __init__(self) -> None:
        super().__init__("torchrelay.stores.writer.process")
        self._lock = threading.Lock()
        self._attached = (0, -1)  # which of its processes has which arena
        self._current: WriterSave | None = None

    def attach(
        self, fds: Sequence[int], each: int, nbytes: int, timeout: float = _START_SECONDS
    ) -> None:
        """Give the writer an arena, unless it is the one it has."""
        self.start()
        arena = self.generation, os.fstat(fds[0]).st_ino
        if self._attached == arena:
            return
        with self._lock:
            self._ask("attach", (each, nbytes), min(timeout, _START_SECONDS), fds)
        self._attached = arena

    def begin(
        self,
        url: str,
        step: int,
        token: str,
        files: Sequence[FileSpec],
        deadline: Deadline,
        bar: Bar,
    ) -> WriterSave:
        """Open the files of a save, in a draft that exists."""
        with self._lock:
            self._current = save = WriterSave(self, files, deadline, bar)
            left = deadline.left()
            self._ask("open", (url, step, token, left, files), left)
            return save

    def ask(self, save: WriterSave, call: Call, timeout: float, *arguments: object) -> Written:
        """A request of a save. A thread of a save that was given up may still run, and must not
        write to the files of the next one."""
        with self._lock:
            if save is not self._current:
                raise CheckpointError("this save was given up", phase=call)
            return self._ask(call, arguments, timeout)

    def _ask(
        self, call: Call, arguments: Sequence[object], timeout: float, fds: Sequence[int] = ()
    ) -> Written:
        try:
            data = self.exchange(msgspec.msgpack.encode((call, arguments)), timeout, fds)
        except BaseException as fault:
            code = self.exit_status
            self.drop()
            if isinstance(fault, TimeoutError):
                raise StorageTimeoutError(
                    "the writer did not finish in time: give a longer timeout", phase=call
                ) from None
            if isinstance(fault, (EOFError, OSError)):
                raise CheckpointError(
                    f"the writer process was lost ({fault or 'closed'}; exit status {code}): the "
                    "next save starts another",
                    phase=call,
                ) from None
            raise
        answer = _answers.decode(data)
        if answer.failure is not None:
            message, where, file = answer.failure
            raise CheckpointError(message, phase=where or call, file=file)
        return Written(answer.digests, answer.copied)


class WriterSave:
    """The files of one save in the writer process."""

    def __init__(
        self, process: WriterProcess, files: Sequence[FileSpec], deadline: Deadline, bar: Bar
    ) -> None:
        self._process, self._files = process, files
        self._deadline, self._bar = deadline, bar

    def write_staged(self, placed: list[Placed]) -> None:
        for part in self._parts(placed):
            self._process.ask(self, "write", self._deadline.left(), part)
            self._bar.add(sum(stop - start for _, start, stop, _ in part))

    def _parts(self, placed: list[Placed]) -> Iterator[list[Placed]]:
        """All at once; or, where progress is shown, in parts that have some of each unfinished
        file, cut at its chunks."""
        if not self._bar.is_shown:
            yield placed
            return
        cuts = []
        for index, start, stop, at in placed:
            chunk = self._files[index].chunk_bytes
            size = max(1, PART_BYTES // len(placed) // chunk) * chunk
            starts = range(start, stop, size)
            cuts.append([(index, n, min(n + size, stop), at + n - start) for n in starts])
        for turn in zip_longest(*cuts):
            yield [piece for piece in turn if piece is not None]

    def finish(self) -> Written:
        """Make the files durable."""
        return self._process.ask(self, "sync", self._deadline.left())

    def abort(self) -> None:
        """Give up the files, if this is still the current save; never raises."""
        with suppress(CheckpointError):
            self._process.ask(self, "abort", END_SECONDS)
