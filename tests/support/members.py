"""Processes that outlive process groups: each quorum gives them other ranks.

with Members(3) as (a, b, c):
    a.begin(fn, 1)        # fn(here, 1) in that process; `here` is its own from call to call
    b.end()               # what the function returned
    a.kill()
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.forks import servers, take_environment

CALL_SECONDS = 60.0


class MemberFailed(Exception):
    """A function raised in its process, or the process has ended; the text says what happened."""


class Member:
    """One process, which runs one function at a time."""

    def __init__(self) -> None:
        self._conn, theirs = servers.Pipe(duplex=True)
        self.process = servers.Process(target=_serve, args=(theirs, dict(os.environ)), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, fn: Callable[..., Any], *args: Any) -> None:
        self._conn.send_bytes(pickle.dumps((fn, args)))

    def end(self, seconds: float = CALL_SECONDS) -> Any:
        """The result of the function that was begun; `MemberFailed` if it has none."""
        if not self._conn.poll(seconds):
            raise MemberFailed(f"process {self.process.pid} did not answer in {seconds:.0f} s")
        try:
            good, value = pickle.loads(self._conn.recv_bytes())
        except (EOFError, OSError) as fault:
            raise MemberFailed(f"process {self.process.pid} has ended") from fault
        if not good:
            raise MemberFailed(value)
        return value

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        self.begin(fn, *args)
        return self.end()

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.process.kill()
        self.process.join(10)
        self._conn.close()


class Members(ExitStack):
    """Some of them, killed at the end."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._members: list[Member] = []
        try:
            for _ in range(count):
                self.another()
        except BaseException:
            self.close()
            raise

    def another(self) -> Member:
        member = Member()
        self.callback(member.kill)
        self._members.append(member)
        return member

    def __enter__(self) -> list[Member]:  # type: ignore[override]
        return list(self._members)


def _serve(conn: Connection, environment: dict[str, str]) -> None:
    take_environment(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    here = SimpleNamespace()
    while True:
        try:
            fn, args = pickle.loads(conn.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer = (True, fn(here, *args))
        except BaseException:
            print(text := traceback.format_exc(), file=sys.stderr, flush=True)
            answer = (False, text)
        conn.send_bytes(pickle.dumps(answer))
