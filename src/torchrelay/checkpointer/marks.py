"""What becomes of a step whose replicas differ: `Checkpointer(replicas=)`.

| replicas= | parameters or optimizer states differ              | buffers alone differ     |
|-----------|----------------------------------------------------|--------------------------|
| "warn"    | the step is saved and marked, rank 0 warns         | in `Report.differing`    |
| "raise"   | every rank raises `ReplicaError`, nothing is saved | in `Report.differing`    |
| "keep"    | in `Report.differing`                              | in `Report.differing`    |

Buffers may be of a rank: a codebook, an observer of value ranges. A restart takes a marked step
only if there is no other.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal, TypeAlias

from torchrelay.record.schema import ReplicaMark
from torchrelay.results import Differing, replica_error

OnReplicas: TypeAlias = Literal["warn", "raise", "keep"]
RECORDED = 16  # tensors that a mark has by path


def mark_of(
    differing: Sequence[Differing], count: int, step: int, replicas: OnReplicas
) -> ReplicaMark | None:
    """The mark of a step in which `count` replicas differ, buffers last. Raises `ReplicaError`
    where it must not be saved."""
    wrong = tuple([one for one in differing if one.kind != "buffer"])
    if not wrong or replicas == "keep":
        return None
    number = count - (len(differing) - len(wrong))
    if replicas == "raise":
        fault = replica_error(wrong, number)
        fault.step, fault.phase = step, "plan"
        raise fault
    return ReplicaMark(number, tuple([(one.path, one.ranks) for one in wrong[:RECORDED]]))


def warn_of_mark(mark: ReplicaMark, step: int) -> None:
    text = f"step {step} is saved and marked, a restart prefers an earlier one: {mark}"
    warnings.warn(text, RuntimeWarning, stacklevel=6)
