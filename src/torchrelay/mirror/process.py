"""The process that copies steps to a mirror, outside the trainer's interpreter.

`start` runs it as a program with the descriptor of a socket; messages are those of the writer
process. It is another one than that, so no save waits for a copy. It imports no torch, and ends
when the trainer's end of the socket closes, in the middle of a copy, too: the next one continues.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import closing, suppress
from typing import Any, Literal, NamedTuple

import msgspec

from torchrelay.errors import DamagedError, RelayError, StepNotFoundError, StepOrderError
from torchrelay.mirror.step_copy import CopiedStep, copy_step, copy_token, discard_copy, presence
from torchrelay.processes.child_process import trainer_at
from torchrelay.processes.frames import receive_frame, send_frame
from torchrelay.progress import Progress
from torchrelay.stores.locate import open_store
from torchrelay.stores.opening import OpenedStep, open_step
from torchrelay.stores.retry import storage_faults
from torchrelay.stores.store import Store

REQUEST_SECONDS = 300.0  # of one request to a service, with its retries
MORE_NICE = 5  # than the writer process: saves go first

Call = Literal["copy", "wait"]
Outcome = Literal["", "copied", "gone", "damaged", "old", "failed"]


class CopyRequest(NamedTuple):
    """A step to copy, and the URLs of both stores. `ignored`: steps of the target that are known to
    be damaged."""

    source: str
    target: str
    step: int
    ignored: list[int]


class CopyAnswer(msgspec.Struct, array_like=True):
    """How far a copy is. `outcome`: empty while it is in progress; "gone" if the step was removed
    or replaced meanwhile, "old" if the target has newer ones. `sizes`, `metrics`: of the step, once
    it is copied. `failure`: message, phase and file of an error."""

    done: int = 0
    outcome: Outcome = ""
    written: int = 0
    sizes: dict[str, int] = {}
    metrics: dict[str, float] = {}
    failure: tuple[str, str | None, str | None] = ("", None, None)


_requests = msgspec.msgpack.Decoder(tuple[Call, list[Any]])


class _Copier:
    """Its public methods are the calls. Each is answered at once, or within the time it takes."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._over = threading.Event()
        self._answer = CopyAnswer()
        self._left: tuple[Store, int, str] | None = None  # what the last copy left, by its token
        self._cleaned = False

    def serve(self) -> None:
        with suppress(EOFError, ConnectionError):
            while True:
                call, arguments = _requests.decode(receive_frame(self._link))
                answer = getattr(self, call)(*arguments)
                send_frame(self._link, msgspec.msgpack.encode(answer))

    def copy(self, request: list[Any], timeout: float) -> CopyAnswer:
        """Begin a copy, on a thread: the process may end before it does."""
        self._over.clear()
        self._answer = CopyAnswer()
        act = threading.Thread(target=self._run, args=(CopyRequest(*request), timeout), daemon=True)
        act.start()
        return self._answer

    def wait(self, seconds: float) -> CopyAnswer:
        """How far the copy is, when it is over or the time has passed."""
        self._over.wait(seconds)
        return self._answer

    def _run(self, request: CopyRequest, timeout: float) -> None:
        answer = self._answer
        try:
            seconds = min(timeout, REQUEST_SECONDS)
            source = open_store(request.source, timeout=seconds)
            self._copy(source, open_store(request.target, timeout=seconds), request, answer)
            answer.outcome = "copied"
        except StepNotFoundError:
            answer.outcome = "gone"
        except RelayError as fault:
            answer.failure = (fault.message, fault.phase, getattr(fault, "file", None))
            kinds: dict[type, Outcome] = {DamagedError: "damaged", StepOrderError: "old"}
            answer.outcome = kinds.get(type(fault), "failed")
        except Exception as fault:
            answer.failure = (f"{type(fault).__name__}: {fault}", None, None)
            answer.outcome = "failed"
        finally:
            self._over.set()

    def _copy(self, source: Store, target: Store, request: CopyRequest, answer: CopyAnswer) -> None:
        """Copy a step, unless it is there already."""
        step = request.step
        with closing(open_step(source, step)) as opened:
            record = opened.record
            try:
                answer.written = self._written(opened, target, request.ignored, answer).written
            except RelayError:
                if _is_other(source, step, opened):
                    raise StepNotFoundError("it was removed or replaced", step=step) from None
                if not presence(opened, target).whole:  # else another process has copied it
                    raise
            answer.sizes = {file.name: file.nbytes for file in record.volumes}
            answer.metrics = dict(record.saved.metrics)
        if not self._cleaned:
            with suppress(OSError, RelayError):
                target.clean()
                self._cleaned = True

    def _written(
        self, opened: OpenedStep, target: Store, ignored: list[int], answer: CopyAnswer
    ) -> CopiedStep:
        step = opened.record.step
        assert step is not None
        found = presence(opened, target)
        if found.whole:
            return CopiedStep()
        if not found.replaces:
            _check_order(target, step, ignored)
        token = copy_token(opened, found.replaces)
        self._discard_older(step, token)
        self._left = (target, step, token)

        def show(progress: Progress) -> None:
            answer.done = progress.done

        copied = copy_step(opened, target, show, token=token, overwrite=bool(found.replaces))
        self._left = None
        return copied

    def _discard_older(self, step: int, token: str) -> None:
        """Remove what the copy of another step has left: that one is not continued."""
        left, self._left = self._left, None
        if left is not None and left[1:] != (step, token):
            with suppress(OSError, RelayError):
                discard_copy(*left)


def _check_order(target: Store, step: int, ignored: list[int]) -> None:
    """`StepOrderError` where a store has a newer step that is intact: a restart would take that."""
    with storage_faults("list the steps", target.url):
        newer = [one for one in target.listing() if one > step and one not in ignored]
    for one in reversed(newer):
        with suppress(DamagedError, StepNotFoundError), closing(open_step(target, one)) as opened:
            with storage_faults("look at a step", target.url):
                holds = opened.holds()
            if holds:
                raise StepOrderError(
                    f"step {step} is below the newest of the mirror, {one}, which a restart would "
                    "take: give each run its own mirror, or rm the newer steps there",
                    step=step,
                    file=target.url,
                )


def _is_other(source: Store, step: int, opened: OpenedStep) -> bool:
    """Whether a step was removed, or replaced by another save, since it was opened."""
    try:
        with closing(open_step(source, step)) as now:
            return now.digest != opened.digest
    except StepNotFoundError:
        return True
    except RelayError:
        return False


def serve(link: int) -> None:
    """Answer on a socket, given by its descriptor, until its other end closes."""
    with trainer_at(link) as end:
        with suppress(OSError):
            os.nice(MORE_NICE)
        _Copier(end).serve()
