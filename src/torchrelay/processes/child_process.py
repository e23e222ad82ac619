"""A child process without torch: started when it is needed, sent requests over a socket, ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torchrelay.deadlines import Deadline
from torchrelay.processes.frames import exchange
from torchrelay.shortage import raise_shortage

NICE = 5  # the trainer's threads go first
END_SECONDS = 5.0
_KILL_SECONDS = 0.5


class ChildProcess:
    """Runs `serve` of a module. One thread at a time sends a request.

    `generation` counts the processes: a new one knows nothing that the one before was sent.
    """

    def __init__(self, program: str) -> None:
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self.generation = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def exit_status(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def start(self, deadline: Deadline | None = None) -> bool:
        """Have it run; returns True if it had to be started. The first request waits for it."""
        if self._link is not None and self._process is not None and self._process.poll() is None:
            return False
        self.drop()
        self._process, self._link = launch(self._program)
        self.generation += 1
        return True

    def exchange(self, request: bytes, timeout: float, fds: Sequence[int] = ()) -> bytes:
        """Its answer; see `frames.exchange`. After a failure the caller calls `drop`."""
        return exchange(self._link, request, timeout, fds)

    def drop(self) -> None:
        """End it at once."""
        self._disconnect()
        self._end(0)

    def _disconnect(self) -> None:
        """Close this process's end alone: that of a process which was forked stays connected."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _end(self, seconds: float) -> None:
        """Wait this long for the process to exit, then kill it. One that hangs in a system call
        dies when that returns."""
        if self._process is not None:
            for patience in (seconds, _KILL_SECONDS):
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(patience)
                    break
                self._process.kill()
            self._process = None

    def detach_after_fork(self) -> None:
        """In a child of a fork: forget the process, which stays the parent's."""
        self._disconnect()
        self._process = None

    def close(self) -> None:
        """End the process; it is idle, or its work was given up."""
        if self._link is not None:
            # For all processes that have this end, also forks: the child reads the end of file.
            with suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)
        self._disconnect()
        self._end(END_SECONDS)


@contextmanager
def trainer_at(link: int) -> Iterator[socket.socket]:
    """In a process that was launched: the socket to the trainer, by its descriptor. The process
    ends with the trainer, which may have been sent the same signals."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(NICE)
    with socket.socket(fileno=link) as end:
        yield end


def launch(program: str, *, mute: bool = False) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run `serve` of a module of this package in an isolated interpreter; our end of the socket.

    `mute`: it has no output, so that a reader of this process's output does not wait for it.
    """
    try:
        return _launched(program, subprocess.DEVNULL if mute else None)
    except OSError as fault:
        raise_shortage(fault, "start a process")
        raise


def _launched(program: str, output: int | None) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        package = Path(__file__).resolve().parents[1]
        start = str(Path(__file__).with_name("start.py"))
        paths = [str(Path(path).absolute()) for path in sys.path if path]
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", start, str(theirs.fileno()), str(package), program, *paths],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a Ctrl-C in the trainer's terminal is not for it
            )
        except BaseException:
            ours.close()
            raise
    return process, ours
