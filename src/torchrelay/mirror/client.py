"""The trainer's end of the process that copies steps to a mirror."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from torchrelay.deadlines import Deadline
from torchrelay.errors import CheckpointError, DamagedError, StepOrderError, StorageTimeoutError
from torchrelay.mirror.process import Call, CopyAnswer, CopyRequest
from torchrelay.processes.child_process import ChildProcess

WAIT_SECONDS = 1.0  # that the process waits for the end of a copy before it answers

_KINDS: dict[str, type[CheckpointError]] = {"damaged": DamagedError, "old": StepOrderError}
_answers = msgspec.msgpack.Decoder(CopyAnswer)


class CopiedFiles(NamedTuple):
    """A step that is in the mirror: the bytes that were written for it, the sizes of its files and
    the metrics of its save."""

    written: int
    sizes: dict[str, int]
    metrics: dict[str, float]


class MirrorProcess(ChildProcess):
    """A process for copies, started when it is first needed and again if it was lost. One thread
    uses it; any thread may `kill` it."""

    def __init__(self) -> None:
        super().__init__("torchrelay.mirror.process")

    def copy(self, request: CopyRequest, timeout: float) -> CopiedFiles | None:
        """Copy a step from one store to another; None if it was removed or replaced meanwhile.

        `StepOrderError` where the other store has newer steps. A copy that brings no byte for
        `timeout` seconds is given up: `StorageTimeoutError`.
        """
        self.start()
        step, target = request.step, request.target
        answer = self._ask("copy", timeout, request, timeout)
        done, deadline = answer.done, Deadline(timeout)
        while not answer.outcome:
            if deadline.passed:
                self.drop()
                raise StorageTimeoutError(
                    f"no byte came to the mirror in {timeout:g} s: see whether it answers at all, "
                    "or give a longer timeout",
                    step=step,
                    phase="mirror",
                    file=target,
                )
            answer = self._ask("wait", timeout, min(WAIT_SECONDS, timeout / 4))
            if answer.done != done:
                done, deadline = answer.done, Deadline(timeout)
        if answer.outcome == "gone":
            return None
        if answer.outcome == "copied":
            return CopiedFiles(answer.written, answer.sizes, answer.metrics)
        message, phase, file = answer.failure
        raise _KINDS.get(answer.outcome, CheckpointError)(
            message, step=step, phase=phase or "mirror", file=file
        )

    def _ask(self, call: Call, timeout: float, *arguments: object) -> CopyAnswer:
        try:
            data = self.exchange(msgspec.msgpack.encode((call, arguments)), timeout)
        except BaseException as fault:
            code = self.exit_status
            self.drop()
            if isinstance(fault, TimeoutError):
                raise StorageTimeoutError(
                    "the process that copies to the mirror does not answer", phase="mirror"
                ) from None
            if isinstance(fault, (EOFError, OSError)):
                raise CheckpointError(
                    f"the process that copies to the mirror was lost ({fault or 'closed'}; exit "
                    f"status {code}): the next copy starts another",
                    phase="mirror",
                ) from None
            raise
        return _answers.decode(data)

    def kill(self) -> None:
        """End the process, from any thread. The files that it has copied stay for the next copy."""
        process = self._process
        if process is not None:
            process.kill()
