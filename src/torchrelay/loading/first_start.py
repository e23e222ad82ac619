"""Whether a source has a step, as all ranks of a call see it: otherwise it is a first start.

The listing of the coordinator decides. Where another rank sees a step that the coordinator does
not, the coordinator's file system lags, and a job that began at step 0 would train on top of it.
"""

from __future__ import annotations

from torchrelay.coordination.call import Call
from torchrelay.deadlines import Deadline
from torchrelay.errors import CheckpointError, RelayError
from torchrelay.loading.loader import Visibility
from torchrelay.sources.source import Source

_SEEN, _OVERDUE = b"seen", b"late"


def has_steps(source: Source, rank: int, call: Call, deadline: Deadline) -> bool:
    """The same on every rank. Raises on all ranks if the coordinator cannot list the steps, and
    `CheckpointError` if it does not see for long what another rank sees."""
    overdue = Visibility()

    def mine() -> bytes:
        try:
            return _SEEN if source.steps(deadline) else b""
        except RelayError:
            if rank == 0:
                raise
            return b""  # its own listing decides nothing: it may lag

    def decide(answers: list[bytes]) -> list[bytes]:
        other = next((number for number, one in enumerate(answers) if one), 0)
        if answers[0] or not other:
            return [answers[0]] * len(answers)
        if not overdue.lasts(deadline):
            raise CheckpointError(
                f"rank {other} sees steps in {source.name}, and rank 0 does not: is it on a shared "
                "file system?",
                rank=0,
                phase="look",
                file=source.name,
            )
        return [_OVERDUE] * len(answers)

    while (found := call.round("look", mine, decide, deadline)) == _OVERDUE:
        overdue.pause()
    return found == _SEEN
