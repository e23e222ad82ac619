"""What processes of their own do for `benchmarks.keeper`, one task each.

They import torch and nothing of torchrelay before a clock runs: what a worker that was started
again has to import counts, whichever library it comes back by.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 600.0
TENSORS = 16
KEEPER, PEER, COLD, HOT = "keeper", "live peer", "dcp.load, cold", "dcp.load, hot"


def state_of(nbytes: int, value: float) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.full((nbytes // TENSORS // 4,), value + n) for n in range(TENSORS)}


def is_exact(state: dict[str, torch.Tensor]) -> bool:
    return all(bool((state[f"w{n}"] == 1.0 + n).all()) for n in range(TENSORS))


def keep(job: str, folder: str, nbytes: int) -> dict[str, Any]:
    """Stage a state, and save it as torch does."""
    import torch.distributed.checkpoint as dcp

    import torchrelay as tr

    state = state_of(nbytes, 1.0)
    dcp.save(state, checkpoint_id=folder)  # type: ignore[attr-defined]
    with tr.Keeper(
        job, no_dist=True, options=tr.options.KeeperOptions(lease_seconds=SECONDS)
    ) as keeper:
        keeper.stage(1, state).result(SECONDS)
    return {}


def share(nbytes: int) -> dict[str, Any]:
    """Be a live peer until the end of the input."""
    import torchrelay as tr

    with tr.serve(state_of(nbytes, 1.0), step=1, no_dist=True) as endpoint:
        print(endpoint.url, flush=True)
        sys.stdin.read()
    return {}


def recover(case: str, place: str, nbytes: int) -> dict[str, Any]:
    """Seconds from here, with torch imported and a model in memory, to the landed state; the part
    of them that is left when everything is imported; and seconds of the processor."""
    state = state_of(nbytes, 0.0)
    for path in Path(place).rglob("*") if case in (COLD, HOT) else ():
        if path.is_file():
            with path.open("rb") as file:
                if case == COLD:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    while file.read(1 << 24):
                        pass
    begun, used = time.monotonic(), time.process_time()
    if case in (COLD, HOT):
        import torch.distributed.checkpoint as dcp

        imported = time.monotonic()
        dcp.load(state, checkpoint_id=place)  # type: ignore[attr-defined]
        landed = time.monotonic()
    else:
        import torchrelay as tr

        _ = tr.Keeper, tr.recover
        imported = time.monotonic()
        if case == PEER:
            tr.recover(into=state, sources=[place])
            landed = time.monotonic()
        else:
            with tr.Keeper(
                place, no_dist=True, options=tr.options.KeeperOptions(lease_seconds=SECONDS)
            ) as keeper:
                tr.recover(into=state, sources=[keeper])
                landed = time.monotonic()
    return {
        "seconds": landed - begun,
        "imported": landed - imported,
        "processor": time.process_time() - used,
        "exact": is_exact(state),
    }


def restart(job: str, nbytes: int) -> dict[str, Any]:
    """Come back, stage the next step, and be killed."""
    import torchrelay as tr

    state: dict[str, Any] = {**state_of(nbytes, 0.0), "step": 0}
    keeper = tr.Keeper(job, no_dist=True, options=tr.options.KeeperOptions(lease_seconds=SECONDS))
    state = tr.recover(into=state, sources=[keeper]).state
    state["step"] += 1
    keeper.stage(state["step"], state).result(SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "keep": keep,
    "share": share,
    "recover": recover,
    "restart": restart,
}


class Tasks:
    """Runs tasks. Modules are compiled once, as those of an installed package are."""

    def __init__(self) -> None:
        self._environment = {**os.environ}
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def _command(self, name: str, words: tuple[Any, ...]) -> dict[str, Any]:
        return {
            "args": [sys.executable, "-m", __spec__.name, json.dumps([name, *words])],
            "cwd": ROOT,
            "env": self._environment,
            "stdout": subprocess.PIPE,
            "text": True,
        }

    def run(self, name: str, *words: Any) -> dict[str, Any]:
        """What a task found, or nothing if it was killed."""
        done = subprocess.run(**self._command(name, words), timeout=SECONDS, check=False)
        if done.returncode == -signal.SIGKILL:
            return {}
        done.check_returncode()
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    @contextmanager
    def live_peer(self, nbytes: int) -> Iterator[str]:
        """The URL of a process that serves the state meanwhile."""
        peer = subprocess.Popen(**self._command("share", (nbytes,)), stdin=subprocess.PIPE)
        try:
            assert peer.stdout is not None
            yield peer.stdout.readline().strip()
            peer.communicate("", timeout=SECONDS)
        finally:
            peer.kill()
            peer.wait(SECONDS)


def main() -> None:
    name, *words = json.loads(sys.argv[1])
    print(json.dumps(TASKS[name](*words)))


if __name__ == "__main__":
    main()
