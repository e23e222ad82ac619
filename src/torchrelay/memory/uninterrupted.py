"""Work that an interrupt must not break in two, such as writing new weights over old ones.

Python raises `KeyboardInterrupt`, and whatever else a signal handler raises, between any two lines
of the main thread. So the work is done on another thread, where no handler runs. An exception that
comes up here meanwhile is raised when the work is over.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch

from torchrelay.memory import threads
from torchrelay.memory.gpu.side import in_use

T = TypeVar("T")


def uninterrupted(act: Callable[[], T], hurry: Callable[[], None] = lambda: None) -> T:
    """Return or raise what `act` does, on another thread in the modes of this one. `hurry` is
    called if an exception comes up here meanwhile."""
    results: list[T] = []
    faults: list[BaseException] = []
    begun: list[threads.Running] = []
    context = contextvars.copy_context()
    # The modes that torch keeps per thread and a commit depends on, as this thread has them.
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    device = torch.cuda.device(torch.cuda.current_device()) if in_use() else nullcontext()

    def run() -> None:
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad), device:
                results.append(context.run(act))
        except BaseException as fault:
            faults.append(fault)

    try:
        threads.run(run, "worker", among=begun).wait()
    except BaseException:
        threads.end_all(begun, hurry)
        raise
    if faults:
        raise faults.pop()
    return results.pop()
