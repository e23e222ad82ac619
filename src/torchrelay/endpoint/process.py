"""The trainer's end of the server process."""

from __future__ import annotations

import os
import threading
from importlib.util import find_spec
from typing import TypeVar

import msgspec

from torchrelay.endpoint.server import messages as m
from torchrelay.errors import EndpointError, UsageError
from torchrelay.stores.writer.companion import Companion

_START_SECONDS = 60.0

Kind = TypeVar("Kind")
_answer = msgspec.msgpack.Decoder(m.ServerAnswer)


class ServerProcess:
    """A server process. One that was lost is started again, at the port it had."""

    def __init__(self, listen: m.Listen) -> None:
        if find_spec("aiohttp") is None:
            raise UsageError("serving needs aiohttp: pip install 'torchrelay[serve]'")
        self._listen = listen
        self._server = Companion("torchrelay.endpoint.server.program")
        self._lock = threading.Lock()
        self._attached: dict[int, tuple[int, int]] = {}  # by slot, which process has which arena
        self.port = listen.port
        self.restarts = -1

    @property
    def pid(self) -> int | None:
        return self._server.pid

    def start(self) -> bool:
        """Have it run; whether it had to be started."""
        with self._lock:
            if not self._server.start():
                return False
            self._listen.port = self.port
            answer = self._ask(self._listen, _START_SECONDS)
            if not isinstance(answer, m.Listening):
                self._server.drop()
                why = answer.message if isinstance(answer, m.Refused) else "no answer to that"
                raise EndpointError(
                    f"cannot listen at {self._listen.host}:{self._listen.port}: {why}"
                )
            self.port = answer.port
            self.restarts += 1
            return True

    def attach(self, slot: int, fd: int, nbytes: int, timeout: float) -> None:
        """Show it the arena of a slot, unless it has it."""
        with self._lock:
            arena = self._server.generation, os.fstat(fd).st_ino
            if self._attached.get(slot) == arena:
                return
            self._checked(m.AttachSlot(slot, nbytes), m.Obeyed, timeout, fd)
            self._attached[slot] = arena

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
            self._server.drop()
            raise EndpointError("the server process answered something else")
        return answer

    def _ask(self, request: m.ServerRequest, timeout: float, fd: int = -1) -> m.ServerAnswer:
        try:
            data = self._server.exchange(
                msgspec.msgpack.encode(request), timeout, [fd] if fd >= 0 else ()
            )
        except BaseException as fault:
            code = self._server.exit_status
            self._server.drop()
            if isinstance(fault, TimeoutError):
                raise EndpointError("the server process did not answer in time") from None
            if isinstance(fault, (OSError, EOFError)):
                raise EndpointError(f"the server process was lost (exit status {code})") from None
            raise
        answer: m.ServerAnswer = _answer.decode(data)
        return answer

    def forsake(self) -> None:
        """In a child of a fork: let go of what is the parent's, which stays as it is."""
        self._server.forsake()

    def close(self) -> None:
        self._server.close()
