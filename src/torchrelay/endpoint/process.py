"""The trainer's end of the server process."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

import msgspec

from torchrelay.deadlines import Deadline
from torchrelay.endpoint.server import messages as m
from torchrelay.errors import EndpointError, UsageError
from torchrelay.stores.writer.companion import Companion

START_SECONDS = 60.0  # that it may take to start, at most

Kind = TypeVar("Kind")
_answer = msgspec.msgpack.Decoder(m.ServerAnswer)


class OtherProcess(Protocol):
    """How another process is reached: `Companion` says what each of these does."""

    generation: int

    @property
    def pid(self) -> int | None: ...
    @property
    def exit_status(self) -> int | None: ...
    def start(self, deadline: Deadline | None = None) -> bool: ...
    def exchange(self, request: bytes, timeout: float, fds: Sequence[int] = ()) -> bytes: ...
    def drop(self) -> None: ...
    def forsake(self) -> None: ...
    def close(self) -> None: ...


class StepProcess:
    """A process that serves steps which are staged here, as whoever stages them sees it.

    What is said to it when it was started is for those who know which process it is: see `start`.
    """

    noun = "the server process"

    def __init__(self, process: OtherProcess, answers: msgspec.msgpack.Decoder[Any]) -> None:
        self._process = process
        self._answers = answers
        self._lock = threading.Lock()
        self._attached: dict[int, tuple[int, int]] = {}  # by slot, which process has which arena

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def generation(self) -> int:
        """Which of the processes it is, or connections to it, that there were one after another."""
        return self._process.generation

    def start(self, timeout: float) -> bool:
        """Have it run, in so many seconds; whether it had to be started, or was met for the first
        time."""
        deadline = Deadline(max(0.001, min(timeout, START_SECONDS)))
        with self._lock:
            if not self._process.start(deadline):
                return False
            self._attached.clear()
            self._greet(deadline)
            return True

    def _greet(self, deadline: Deadline) -> None:
        raise NotImplementedError

    def attach(self, slot: int, fd: int, nbytes: int, timeout: float) -> None:
        """Show it the arena of a slot, unless it has it."""
        with self._lock:
            arena = self._process.generation, os.fstat(fd).st_ino
            if self._attached.get(slot) == arena:
                return
            self._checked(m.AttachSlot(slot, nbytes), m.Obeyed, timeout, fd)
            self._attached[slot] = arena

    def ask(self, request: object, kind: type[Kind], timeout: float) -> Kind:
        """Its answer, of a kind; `EndpointError` where it is gone, refuses or takes too long."""
        with self._lock:
            return self._checked(request, kind, timeout)

    def forward(self, request: bytes, kind: type[Kind], timeout: float) -> Kind:
        """The same for a request that another process has encoded."""
        with self._lock:
            return self._kind(self._exchange(request, timeout), kind)

    def _checked(self, request: object, kind: type[Kind], timeout: float, fd: int = -1) -> Kind:
        return self._kind(self._ask(request, timeout, fd), kind)

    def _kind(self, answer: object, kind: type[Kind]) -> Kind:
        if isinstance(answer, m.Refused):
            raise EndpointError(f"{self.noun} refused: {answer.message}")
        if not isinstance(answer, kind):
            self._process.drop()
            raise EndpointError(f"{self.noun} answered something else")
        return answer

    def _ask(self, request: object, timeout: float, fd: int = -1) -> object:
        return self._exchange(msgspec.msgpack.encode(request), timeout, fd)

    def _exchange(self, request: bytes, timeout: float, fd: int = -1) -> object:
        try:
            data = self._process.exchange(request, timeout, [fd] if fd >= 0 else ())
        except BaseException as fault:
            status = self._process.exit_status
            code = "" if status is None else f" (exit status {status})"
            self._process.drop()
            if isinstance(fault, TimeoutError):
                raise EndpointError(f"{self.noun} did not answer in time") from None
            if isinstance(fault, (OSError, EOFError)):
                raise EndpointError(f"{self.noun} was lost{code}") from None
            raise
        return self._answers.decode(data)

    def status(self, timeout: float) -> dict[str, Any]:
        """What goes on there, as `/status.json` has it."""
        found: dict[str, Any] = msgspec.json.decode(self.ask(m.Tell(), m.StatusText, timeout).text)
        return found

    def forsake(self) -> None:
        """In a child of a fork: let go of what is the parent's, which stays as it is."""
        self._process.forsake()

    def close(self) -> None:
        self._process.close()


class ServerProcess(StepProcess):
    """A server process. One that was lost is started again, at the port it had."""

    def __init__(self, listen: m.Listen) -> None:
        check_aiohttp()
        super().__init__(Companion("torchrelay.endpoint.server.program"), _answer)
        self._listen = listen
        self.port = listen.port

    def _greet(self, deadline: Deadline) -> None:
        self._listen.port = self.port
        answer = self._ask(self._listen, deadline.left())
        if not isinstance(answer, m.Listening):
            self._process.drop()
            why = answer.message if isinstance(answer, m.Refused) else "no answer to that"
            raise EndpointError(f"cannot listen at {self._listen.host}:{self._listen.port}: {why}")
        self.port = answer.port


def check_aiohttp() -> None:
    if find_spec("aiohttp") is None:
        raise UsageError("serving needs aiohttp: pip install 'torchrelay[serve]'")
