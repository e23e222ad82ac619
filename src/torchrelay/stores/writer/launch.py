"""Launches a child process without torch, with a socket between it and the trainer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NICE = 5  # the trainer's threads go first


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
    output = subprocess.DEVNULL if mute else None
    ours, theirs = socket.socketpair()
    with theirs:
        package = Path(__file__).resolve().parents[2]
        start = str(package / "stores" / "writer" / "start.py")
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
