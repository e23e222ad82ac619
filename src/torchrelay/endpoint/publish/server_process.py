"""A publisher's end of the process that serves its steps."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from torchrelay.deadlines import Deadline
from torchrelay.endpoint.address import Address
from torchrelay.endpoint.server import messages as m
from torchrelay.errors import EndpointError
from torchrelay.processes.child_process import ChildProcess

START_SECONDS = 60.0  # that a process may take to start, at most

Kind = TypeVar("Kind")
_answer = msgspec.msgpack.Decoder(m.ServerAnswer)


class RequestRefusedError(EndpointError):
    """The process runs, and does not do what it was asked to do."""


class ServerProcess:
    """A server process: requests, one at a time, and their answers. One that was lost is started
    again, at the port it had. A keeper overrides `_begin`, and the methods from `report` on, which
    have what differs in a publish."""

    operation = "publish"  # its name in metrics
    on_devices = True  # whether it lends memory of GPUs

    def __init__(
        self,
        listen: m.Listen,
        process: ChildProcess | None = None,
        answers: msgspec.msgpack.Decoder[Any] = _answer,
        noun: str = "the server process",
    ) -> None:
        self.process = process or ChildProcess("torchrelay.endpoint.server.program")
        self._listen, self._answers, self._noun = listen, answers, noun
        self.port = listen.port
        self._lock = threading.Lock()
        self._attached: dict[int, tuple[int, int]] = {}  # by slot: which process has which memory

    @property
    def url(self) -> str:
        """Where others read from it."""
        return Address(self._listen.host, self.port).url(tls=bool(self._listen.certfile))

    def start(self, timeout: float) -> bool:
        """Have it serve, within that many seconds; whether it is a new one."""
        deadline = Deadline(max(0.001, min(timeout, START_SECONDS)))
        if not self._launch(deadline):
            return False
        self._begin(deadline)
        return True

    def _launch(self, deadline: Deadline) -> bool:
        """Have the process run; whether it had to be started, or was met for the first time."""
        with self._lock:
            return self.process.start(deadline)

    def _begin(self, deadline: Deadline) -> None:
        """Have a process that was just met serve."""
        self._listen.port = self.port
        try:
            self.port = self.ask(self._listen, m.Listening, deadline.left()).port
        except EndpointError as fault:
            self.process.drop()
            place = f"{self._listen.host}:{self.port}"
            raise EndpointError(
                f"cannot listen at {place}: {fault.message}. Choose another address"
            ) from fault

    def stage(self, request: m.StageSlot, fd: int, timeout: float) -> m.SlotStaged:
        """Have a slot staged; its memory is attached unless the process has it."""
        memory = self.process.generation, os.fstat(fd).st_ino
        request.attached = self._attached.get(request.slot) != memory
        found = self.ask(request, m.SlotStaged, timeout, [fd] if request.attached else [])
        self._attached[request.slot] = memory
        return found

    def ask(
        self, request: object, kind: type[Kind], timeout: float, fds: Sequence[int] = ()
    ) -> Kind:
        """The answer, of a kind; `EndpointError` where the process is gone, refuses or is late."""
        with self._lock:
            try:
                data = self.process.exchange(msgspec.msgpack.encode(request), timeout, fds)
            except BaseException as fault:
                status = self.process.exit_status
                code = "" if status is None else f" (exit status {status})"
                self.process.drop()
                if isinstance(fault, TimeoutError):
                    text = f"{self._noun} did not answer in time: give a longer timeout"
                    raise EndpointError(text) from None
                if isinstance(fault, (OSError, EOFError)):
                    text = f"{self._noun} was lost{code}: the next call starts it again"
                    raise EndpointError(text) from None
                raise
            answer = self._answers.decode(data)
            if isinstance(answer, m.Refused):
                raise RequestRefusedError(f"{self._noun} refused: {answer.message}")
            if not isinstance(answer, kind):
                self.process.drop()
                text = f"{self._noun} answered something else; the next call restarts it"
                raise EndpointError(text)
            return answer

    # A publish of several ranks.

    def report(self, deadline: Deadline) -> bytes:
        """This rank's server reports to the coordinator before a step."""
        return b""

    def choose(
        self, reports: list[bytes], parts: list[int], urls: list[str], step: int
    ) -> tuple[bytes, str]:
        """The coordinator's: a decision for all servers, and why the step is skipped, if it is.
        Raises where the servers can never take parts of these sizes."""
        return b"", ""

    def meet(self, urls: list[str], deadline: Deadline) -> None:
        """The URLs of all ranks' servers; called where they have changed."""

    def listing(self, urls: list[str]) -> set[int]:
        """The ranks whose servers list the step, and name the others."""
        return {0}  # the coordinator's
