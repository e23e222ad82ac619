"""The trainer's end of the server process."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from contextlib import suppress
from importlib.util import find_spec
from typing import TypeVar

import msgspec

from torchrelay.endpoint.server import messages as m
from torchrelay.errors import EndpointError, UsageError
from torchrelay.stores.writer.frames import receive_frame, send_frame
from torchrelay.stores.writer.launch import launch

_START_SECONDS = 60.0
_END_SECONDS = 5.0
_KILL_SECONDS = 0.5

Kind = TypeVar("Kind")
_answer = msgspec.msgpack.Decoder(m.ServerAnswer)


class ServerProcess:
    """A server process. One that was lost is started again, at the port it had."""

    def __init__(self, listen: m.Listen) -> None:
        if find_spec("aiohttp") is None:
            raise UsageError("serving needs aiohttp: pip install 'torchrelay[serve]'")
        self._listen = listen
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._lock = threading.Lock()
        self._attached: dict[int, int] = {}
        self.port = listen.port
        self.restarts = -1

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> bool:
        """Have it run; whether it had to be started."""
        with self._lock:
            if (
                self._link is not None
                and self._process is not None
                and self._process.poll() is None
            ):
                return False
            self._drop()
            self._process, self._link = launch("torchrelay.endpoint.server.program")
            self._listen.port = self.port
            answer = self._ask(self._listen, _START_SECONDS)
            if not isinstance(answer, m.Listening):
                self._drop()
                why = answer.message if isinstance(answer, m.Refused) else "no answer to that"
                raise EndpointError(
                    f"cannot listen at {self._listen.host}:{self._listen.port}: {why}"
                )
            self.port = answer.port
            self.restarts += 1
            return True

    def attach(self, slot: int, fd: int, nbytes: int, timeout: float) -> None:
        """Show it the arena of a slot, unless it has it."""
        inode = os.fstat(fd).st_ino
        with self._lock:
            if self._attached.get(slot) == inode:
                return
            self._checked(m.AttachSlot(slot, nbytes), m.Obeyed, timeout, fd)
            self._attached[slot] = inode

    def ask(self, request: m.ServerRequest, kind: type[Kind], timeout: float) -> Kind:
        """Its answer, of a kind; `EndpointError` where it is gone, refuses or takes too long."""
        with self._lock:
            return self._checked(request, kind, timeout)

    def _checked(
        self, request: m.ServerRequest, kind: type[Kind], timeout: float, fd: int = -1
    ) -> Kind:
        answer = self._ask(request, timeout, fd)
        if isinstance(answer, m.Refused):
            raise EndpointError(f"the server process refused: {answer.message}")
        if not isinstance(answer, kind):
            self._drop()
            raise EndpointError("the server process answered something else")
        return answer

    def _ask(self, request: m.ServerRequest, timeout: float, fd: int = -1) -> m.ServerAnswer:
        link = self._link
        if link is None:
            raise EndpointError("the server process is gone")
        link.settimeout(max(timeout, 0.001))
        try:
            send_frame(link, msgspec.msgpack.encode(request))
            if fd >= 0:
                socket.send_fds(link, [b"a"], [fd])
            answer: m.ServerAnswer = _answer.decode(receive_frame(link))
        except BaseException as fault:
            code = None if self._process is None else self._process.poll()
            self._drop()  # its answer would be taken for that to the next request
            if isinstance(fault, TimeoutError):
                raise EndpointError("the server process did not answer in time") from None
            if isinstance(fault, (OSError, EOFError)):
                raise EndpointError(f"the server process was lost (exit status {code})") from None
            raise
        return answer

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        self._end(0)

    def _end(self, seconds: float) -> None:
        if self._process is not None:
            for patience in (seconds, _KILL_SECONDS):
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(patience)
                    break
                self._process.kill()
            self._process = None
        self._attached = {}

    def forsake(self) -> None:
        """In a child of a fork: let go of what is the parent's, which stays as it is."""
        if self._link is not None:
            self._link.close()
            self._link = None
        self._process = None

    def close(self) -> None:
        if self._link is not None:
            with suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)
            self._link.close()
            self._link = None
        self._end(_END_SECONDS)
