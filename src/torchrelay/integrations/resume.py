"""Which step a framework takes, agreed on by all ranks: for those that need its number before they
build what is loaded. All others call `Checkpointer.restore`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import msgspec

from torchrelay.checkpointer.front import Checkpointer
from torchrelay.checkpointer.keep import KeepBest
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.deadlines import Deadline
from torchrelay.errors import DamagedError

logger = logging.getLogger("torchrelay")


def step_to_resume(checkpointer: Checkpointer, timeout: float = 1800.0) -> int | None:
    """The newest step whose every byte verifies, the same on all ranks; None at the first start.

    Frameworks take their position from a step before they load its tensors, so a step that turns
    out to be damaged while it is loaded would be too late to skip. Rank 0 reads all of it here.
    """
    return _agreed(checkpointer, lambda: _newest(checkpointer), timeout)


def newest_step(checkpointer: Checkpointer, timeout: float = 1800.0) -> int | None:
    """The newest committed step as rank 0 sees it, the same on all ranks; None at the first start.

    For frameworks that take their position from the step as it is loaded. Reads none of its bytes.
    """
    return _agreed(checkpointer, lambda: max(checkpointer.steps(), default=None), timeout)


def best_step(checkpointer: Checkpointer, best: KeepBest, timeout: float = 1800.0) -> int | None:
    """The best step as rank 0 sees it, the same on all ranks; None if no step has the metric."""

    def choose() -> int | None:
        steps = [step for step in checkpointer.steps() if checkpointer.holds(step)]
        metrics = {step: checkpointer.record(step).saved.metrics for step in steps}
        return next(iter(replace(best, k=1).wanted_with(steps, metrics)), None)

    return _agreed(checkpointer, choose, timeout)


def _agreed(
    checkpointer: Checkpointer, choose: Callable[[], int | None], timeout: float
) -> int | None:
    ranks = Coordinator.of(None, "resume", checkpointer.url)

    def decide(answer: list[bytes]) -> list[bytes]:
        return [msgspec.msgpack.encode(choose())] * len(answer)

    answer = ranks.call("choose a step").round("choose", bytes, decide, Deadline(timeout))
    return msgspec.msgpack.decode(answer, type=int | None)


def _newest(checkpointer: Checkpointer) -> int | None:
    damaged: DamagedError | None = None
    for step in reversed(checkpointer.steps()):
        try:
            return checkpointer.verify(step)
        except DamagedError as fault:
            logger.warning("step %d of %s is skipped: %s", step, checkpointer.url, fault)
            damaged = damaged or fault
    if damaged is not None:
        raise damaged  # there are steps, and none can be used: this is not a first start
    return None
