"""A save, a kill and a recovery in the place that the check was given.

A child process saves one step, begins a second one, and is killed in the middle of it. Afterwards
a recovery must find the first step, exact, and only that.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import torch

from torchrelay.check.report import Finding
from torchrelay.checkpointer.front import Checkpointer
from torchrelay.errors import RelayError
from torchrelay.progress import Progress
from torchrelay.recovery.front import recover

AREA = "recovery"
NBYTES = 32 << 20
SECONDS = 40.0
_KILLED = "killed here"


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {f"layer {n}": torch.full((NBYTES // 32,), float(step + n)) for n in range(8)}


def probe(place: str) -> list[Finding]:
    """Save, kill and recover below a folder or a bucket's URL."""
    root = f"{place.rstrip('/')}/torchrelay-check-{os.urandom(6).hex()}"
    try:
        return [_probe(place, root)]
    finally:
        _remove(root)


def _probe(place: str, root: str) -> Finding:
    subject = f"save, kill, recover in {place}"
    command = [sys.executable, "-m", "torchrelay.check.survival", root]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(
            AREA, subject, "problem", f"a save took over {SECONDS:.0f} s", "is it in reach?"
        )
    if _KILLED not in child.stdout or child.returncode != -signal.SIGKILL:
        last = (child.stderr.strip().splitlines() or ["it ended early"])[-1]
        return Finding(AREA, subject, "problem", f"the save failed: {last}", "mend what it names")
    into = state_of(0)
    try:
        found = recover(into=into, sources=[root], no_dist=True, timeout=SECONDS)
    except RelayError as fault:
        remedy = "do not rely on this place until this row is ok"
        return Finding(AREA, subject, "problem", f"nothing was recovered: {fault}", remedy)
    expected = state_of(1)
    exact = all(torch.equal(into[name], expected[name]) for name in expected)
    step = None if found is None else found.step
    if step != 1 or not exact:
        shown = f"step {step}, {'exact' if exact else 'with other values'}"
        remedy = "do not rely on this place until this row is ok"
        return Finding(AREA, subject, "problem", f"expected step 1, found {shown}", remedy)
    return Finding(
        AREA, subject, "ok", "a save killed halfway left step 1, and it was recovered exactly"
    )


def _remove(root: str) -> None:
    """Take away what the check wrote, committed or not."""
    if "://" not in root:
        shutil.rmtree(root, ignore_errors=True)
        return
    with suppress(OSError, RelayError):
        from torchrelay.stores.objects.bucket import Bucket

        bucket = Bucket(root, timeout=SECONDS)
        bucket.remove([one.path for one in bucket.objects()])


def _save_and_die(root: str) -> None:
    """In the child: save step 1, and die when part of step 2 is written."""
    with Checkpointer(root, no_dist=True, timeout=SECONDS) as checkpointer:
        checkpointer.save(1, state_of(1))

        def die(progress: Progress) -> None:
            if progress.done * 4 > progress.total:
                print(_KILLED, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

        checkpointer.save(2, state_of(2), progress=die)


if __name__ == "__main__":
    _save_and_die(sys.argv[1])
