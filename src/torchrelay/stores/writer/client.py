"""The trainer's end of the writer process."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from torchrelay.errors import CheckpointError, StorageTimeoutError
from torchrelay.stores.writer import process as p
from torchrelay.stores.writer.launch import launch
from torchrelay.stores.writer.ranges import FileSpec

_START_SECONDS = 60.0
_END_SECONDS = 5.0
_KILL_SECONDS = 0.5


class WriterProcess:
    """A writer process, started when it is first needed and again if it was lost.

    One save at a time uses it; the caller sees to that. Every request has a deadline, in seconds
    from now; a writer that does not keep it is ended.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._lock = threading.Lock()
        self._attached = -1
        self._save = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        if self._link is not None and self._process is not None and self._process.poll() is None:
            return
        self._drop()
        self._process, self._link = launch("torchrelay.stores.writer.process")

    def attach(
        self, fds: Sequence[int], each: int, nbytes: int, timeout: float = _START_SECONDS
    ) -> None:
        """Show the writer an arena, unless it is the one it has."""
        self.start()
        inode = os.fstat(fds[0]).st_ino
        if self._attached == inode:
            return
        with self._lock:
            self._ask(p.Attach(each, nbytes), min(timeout, _START_SECONDS), "attach", fds)
        self._attached = inode

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
            self._ask(p.Abandon(), _END_SECONDS, "abort")

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
        link = self._linked(timeout)
        try:
            p.send(link, request)
            if fds:
                socket.send_fds(link, [b"a"], list(fds))
            return self._answer(link, phase)
        except CheckpointError:
            raise
        except OSError as fault:
            self._drop()
            raise CheckpointError(f"the writer process is gone: {fault}", phase=phase) from None
        except BaseException:
            self._drop()  # its answer would be taken for that to the next request
            raise

    def _linked(self, timeout: float) -> socket.socket:
        if self._link is None:
            raise CheckpointError("the writer process is gone", phase="write")
        self._link.settimeout(max(timeout, 0.001))
        return self._link

    def _answer(self, link: socket.socket, phase: str) -> p.Finished:
        try:
            answer = p.receive_answer(link)
        except TimeoutError:
            self._drop()
            raise StorageTimeoutError("the writer did not finish in time", phase=phase) from None
        except (EOFError, OSError) as fault:
            code = None if self._process is None else self._process.poll()
            self._drop()
            raise CheckpointError(
                f"the writer process was lost ({fault or 'closed'}; exit status {code})",
                phase=phase,
            ) from None
        if isinstance(answer, p.Failed):
            raise CheckpointError(answer.message, phase=answer.phase or phase, file=answer.file)
        return answer

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        self._end(0)

    def _end(self, seconds: float) -> None:
        """Wait so long for the process to leave, then kill it. One that hangs in a system call dies
        when that returns, which nobody waits for."""
        if self._process is not None:
            for patience in (seconds, _KILL_SECONDS):
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(patience)
                    break
                self._process.kill()
            self._process = None
        self._attached = -1

    def forsake(self) -> None:
        """In a child of a fork: let go of what is the parent's, which stays as it is."""
        if self._link is not None:
            self._link.close()  # of this process's end alone: the parent's stays connected
            self._link = None
        self._process = None

    def close(self) -> None:
        """End the process; it is idle, or its work is given up."""
        if self._link is not None:
            # For everybody who has this end, children of a fork too: it reads the end of file.
            with suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)
            self._link.close()
            self._link = None
        self._end(_END_SECONDS)
