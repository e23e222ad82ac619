"""Calls that an exception out of nowhere cannot break.

Python runs signal handlers between any two lines of the main thread, and what they raise
(`KeyboardInterrupt` is one) comes up there. A transfer that is torn open at any line would leave
its peers waiting, or half of the weights written. So it runs on a thread of its own, where no
handler runs, and the thread that made the call does nothing but wait.
"""

from __future__ import annotations

import contextvars
import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TypeVar

import torch

from torchrelay.deadlines import LOOK_UP, Deadline
from torchrelay.memory import threads
from torchrelay.memory.gpu.side import in_use

T = TypeVar("T")


def shielded(deadline: Deadline, act: Callable[[], T]) -> T:
    """Do `act` on another thread, in the modes of this one; return or raise what it does.

    An exception that comes up here meanwhile cancels `deadline`, on which `act` parts from its
    peers as it does when time is up. The exception is raised once `act` is over: nothing is read
    or written on behalf of a call after its end.
    """
    ended: list[tuple[T | None, BaseException | None]] = []
    # Of the kinds of locks this one cannot be left in disorder by an exception in its code.
    woken: queue.SimpleQueue[None] = queue.SimpleQueue()
    claim = threading.Lock()  # of whoever is first: the thread that acts, or a caller that gave up
    modes, context = _modes_here(), contextvars.copy_context()

    def run() -> None:
        if not claim.acquire(blocking=False):
            return
        try:
            with modes():
                ended.append((context.run(act), None))
        except BaseException as fault:
            _clear(fault)
            ended.append((None, fault))
        woken.put(None)

    try:
        threads.run(run, "call")
        while not ended:
            with suppress(queue.Empty):
                woken.get(timeout=LOOK_UP)
    except BaseException as cause:
        _give_up(deadline, cause, claim, ended, woken)
        ended.clear()
        raise
    result, fault = ended.pop()
    if fault is not None:
        try:
            raise fault
        finally:
            del fault, result  # the traceback leads here: no cycle may keep the state alive
    return result  # type: ignore[return-value]


def _give_up(
    deadline: Deadline,
    cause: BaseException,
    claim: threading.Lock,
    ended: list[tuple[T | None, BaseException | None]],
    woken: queue.SimpleQueue[None],
) -> None:
    """Return when the call is over. A second exception does not change that."""
    try:
        deadline.cancel(cause)
        if claim.acquire(blocking=False):
            return  # it had not begun, and never will
        while not ended:
            with suppress(queue.Empty):
                woken.get(timeout=LOOK_UP)
    except BaseException:
        _give_up(deadline, cause, claim, ended, woken)


def _clear(fault: BaseException) -> None:
    """Empty the library's frames that an exception leads to. They are over, and would keep the
    state alive: for as long as the exception, or for good where it came by one of their variables.
    """
    seen: set[BaseException | None] = {None}
    faults: list[BaseException | None] = [fault]
    while faults:
        one = faults.pop()
        if one in seen or one is None:
            continue
        seen.add(one)
        faults += [one.__cause__, one.__context__]
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if frame.f_globals.get("__name__", "").startswith("torchrelay."):
                with suppress(RuntimeError):  # of a frame that still runs
                    frame.clear()


def _modes_here() -> Callable[[], AbstractContextManager[None]]:
    """What torch knows of a thread and a transfer depends on, as it is for this one."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    device = torch.cuda.current_device() if in_use() else None

    @contextmanager
    def modes() -> Iterator[None]:
        on_device = nullcontext() if device is None else torch.cuda.device(device)
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), on_device:
            yield

    return modes
