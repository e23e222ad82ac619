"""A publisher's end of the process that serves its steps."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from torchrelay.deadlines import Deadline
from torchrelay.endpoint.server import messages as m
from torchrelay.errors import EndpointError
from torchrelay.stores.writer.child_process import ChildProcess

START_SECONDS = 60.0  # that a process may take to start, at most

Kind = TypeVar("Kind")
_answer = msgspec.msgpack.Decoder(m.ServerAnswer)


class ServerLink:
    """Requests to a server process, one at a time, and their answers."""

    def __init__(
        self, process: ChildProcess, answers: msgspec.msgpack.Decoder[Any], noun: str
    ) -> None:
        self.process, self._answers, self._noun = process, answers, noun
        self._lock = threading.Lock()
        self._attached: dict[int, tuple[int, int]] = {}  # by slot: which process has which memory

    @property
    def generation(self) -> int:
        """Which of the processes it is, or connections to it, that followed one another."""
        return self.process.generation

    def start(self, deadline: Deadline) -> bool:
        """Have the process run; whether it had to be started, or was met for the first time."""
        with self._lock:
            started = self.process.start(deadline)
            if started:
                self._attached.clear()
            return started

    def ask(self, request: object, kind: type[Kind], timeout: float) -> Kind:
        """The answer, of a kind; `EndpointError` where the process is gone, refuses or is late."""
        with self._lock:
            return self._checked(self._exchange(msgspec.msgpack.encode(request), timeout), kind)

    def stage(self, request: m.StageSlot, fd: int, timeout: float) -> m.SlotStaged:
        """Have a slot staged; its memory is attached unless the process has it."""
        with self._lock:
            memory = self.process.generation, os.fstat(fd).st_ino
            request.attached = self._attached.get(request.slot) != memory
            fds = [fd] if request.attached else []
            data = self._exchange(msgspec.msgpack.encode(request), timeout, fds)
            found = self._checked(data, m.SlotStaged)
            self._attached[request.slot] = memory
            return found

    def _checked(self, answer: object, kind: type[Kind]) -> Kind:
        if isinstance(answer, m.Refused):
            raise EndpointError(f"{self._noun} refused: {answer.message}")
        if not isinstance(answer, kind):
            self.process.drop()
            raise EndpointError(f"{self._noun} answered something else; the next call restarts it")
        return answer

    def _exchange(self, request: bytes, timeout: float, fds: Sequence[int] = ()) -> object:
        try:
            data = self.process.exchange(request, timeout, fds)
        except BaseException as fault:
            status = self.process.exit_status
            code = "" if status is None else f" (exit status {status})"
            self.process.drop()
            if isinstance(fault, TimeoutError):
                raise EndpointError(
                    f"{self._noun} did not answer in time: give a longer timeout"
                ) from None
            if isinstance(fault, (OSError, EOFError)):
                raise EndpointError(
                    f"{self._noun} was lost{code}: the next call starts it again"
                ) from None
            raise
        return self._answers.decode(data)

    def status(self, timeout: float) -> dict[str, Any]:
        """The server's status, as `/status.json` has it."""
        found: dict[str, Any] = msgspec.json.decode(self.ask(m.Tell(), m.StatusText, timeout).text)
        return found


class ServerProcess:
    """An endpoint's server process. One that was lost is started again, at the port it had."""

    def __init__(self, listen: m.Listen) -> None:
        self.link = ServerLink(
            ChildProcess("torchrelay.endpoint.server.program"), _answer, "the server process"
        )
        self._listen = listen
        self.port = listen.port

    @property
    def pid(self) -> int | None:
        return self.link.process.pid

    def start(self, timeout: float) -> bool:
        """Have it listen, within that many seconds; whether it had to be started."""
        deadline = Deadline(max(0.001, min(timeout, START_SECONDS)))
        if not self.link.start(deadline):
            return False
        self._listen.port = self.port
        try:
            self.port = self.link.ask(self._listen, m.Listening, deadline.left()).port
        except EndpointError as fault:
            self.link.process.drop()
            place = f"{self._listen.host}:{self._listen.port}"
            raise EndpointError(
                f"cannot listen at {place}: {fault.message}. Choose another address"
            ) from fault
        return True
