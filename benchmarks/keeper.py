"""A keeper beside the disk: `python -m benchmarks.keeper`.

Three questions. How long a worker that was started again takes until its state is landed: from the
keeper, and by `dcp.load` from a disk that is cold and one that is hot, each in a process of its own
whose torch is imported. What it costs to stage every step of a loop while a buddy fetches copies.
Whether anything grows with many stages and many workers that are killed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.harness import Ranks, machine, save

RESULT = Path(__file__).parent / "results" / "keeper.json"
ROOT = Path(__file__).resolve().parent.parent
SECONDS = 600.0
TENSORS = 16
STEP_SECONDS = 0.5
CASES = ["keeper", "dcp.load, cold", "dcp.load, hot"]

_made: dict[str, Any] = {}


def state_of(nbytes: int, value: float) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.full((nbytes // TENSORS // 4,), value + n) for n in range(TENSORS)}


# What processes of their own do, one task each.


def task_keep(job: str, folder: str, nbytes: int) -> dict[str, Any]:
    """Stage a state, and save it as torch does."""
    import torchrelay as tr

    state = state_of(nbytes, 1.0)
    dcp.save(state, checkpoint_id=folder)  # type: ignore[attr-defined]
    with tr.Keeper(job, group=False, lease=SECONDS) as keeper:
        keeper.stage(1, state).wait(SECONDS)
    return {}


def task_recover(job: str, folder: str, nbytes: int, case: str) -> dict[str, Any]:
    """Seconds from here, with torch imported and a model in memory, to the landed state."""
    state = state_of(nbytes, 0.0)
    for path in Path(folder).rglob("*") if case != "keeper" else ():
        if path.is_file():
            with path.open("rb") as file:
                if case == "dcp.load, cold":
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    while file.read(1 << 24):
                        pass
    begun = time.monotonic()
    if case == "keeper":
        import torchrelay as tr

        with tr.Keeper(job, group=False, lease=SECONDS) as keeper:
            tr.recover(into=state, sources=[keeper])
            spent = time.monotonic() - begun
    else:
        dcp.load(state, checkpoint_id=folder)  # type: ignore[attr-defined]
        spent = time.monotonic() - begun
    right = all(bool((state[f"w{n}"] == 1.0 + n).all()) for n in range(TENSORS))
    return {"seconds": spent, "exact": right}


def task_restart(job: str, nbytes: int) -> dict[str, Any]:
    """Come back, stage the next step, and be killed."""
    import torchrelay as tr

    state: dict[str, Any] = {**state_of(nbytes, 0.0), "step": 0}
    keeper = tr.Keeper(job, group=False, lease=SECONDS)
    state = tr.recover(into=state, sources=[keeper]).state
    state["step"] += 1
    keeper.stage(state["step"], state).wait(SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "keep": task_keep,
    "recover": task_recover,
    "restart": task_restart,
}


def task(name: str, *words: Any) -> dict[str, Any]:
    """Run a task in a process of its own; what it found, or nothing if it was killed."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.keeper", "--task", json.dumps([name, *words])],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode == -signal.SIGKILL:
        return {}
    done.check_returncode()
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# The three questions.


def recovery(nbytes: int, laps: int, tell: Callable[[str], None]) -> dict[str, Any]:
    job = f"bench-{os.getpid()}"
    folder = tempfile.mkdtemp(dir=ROOT)  # on the disk of the sources, not in memory
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    exact = dict.fromkeys(CASES, True)
    try:
        task("keep", job, folder, nbytes)
        os.sync()
        for number in range(laps):
            for case in CASES:
                found = task("recover", job, folder, nbytes, case)
                seconds[case].append(found["seconds"])
                exact[case] = exact[case] and found["exact"]
            tell(f"recovery: lap {number + 1} of {laps}")
    finally:
        shutil.rmtree(folder)
        end(name_of(job))
    ours = median(seconds["keeper"])
    return {
        "bytes": nbytes,
        "rows": [
            {
                "case": case,
                "seconds": median(found),
                "keeper_is_faster": median(found) / ours,
                "exact": exact[case],
                "laps": found,
            }
            for case, found in seconds.items()
        ],
    }


def end(name: Any) -> None:
    from torchrelay.keeper import process
    from torchrelay.keeper.server.messages import End

    process.ask(name, End())
    until = time.monotonic() + SECONDS
    while name in process.KeeperName.all():
        if time.monotonic() > until:
            raise TimeoutError(f"{name} does not end")
        time.sleep(0.01)


def prepare_loop(group: Any, job: str, nbytes: int, rate: float) -> int:
    """Rank 0 has the state; rank 1, on a host that is pretended, has little. Multiplications that
    take the seconds of a step."""
    import torchrelay as tr

    torch.set_num_threads(1)
    rank = dist.get_rank()
    _made["keeper"] = tr.Keeper(job, host="ab"[rank], rate=rate, lease=SECONDS)
    _made["state"] = state_of(nbytes if rank == 0 else TENSORS * 4, 1.0)
    _made["step"] = 0
    _made["batch"] = torch.randn(512, 512)
    return burn(10**9, STEP_SECONDS)


def burn(most: int, seconds: float = float("inf")) -> int:
    begun = time.monotonic()
    for done in range(most):
        if time.monotonic() - begun > seconds:
            return done
        _made["batch"] @ _made["batch"]
    return most


def loop(group: Any, steps: int, work: int, staged: bool) -> tuple[float, list[float], int]:
    """Seconds of a step on average, those that the loop waits for `stage`, and the most bytes that
    this rank's keeper has."""
    rank = dist.get_rank()
    waits: list[float] = []
    most = 0
    dist.barrier(group)
    begun = time.monotonic()
    for _ in range(steps):
        if rank == 0:
            burn(work)
            for tensor in _made["state"].values():
                tensor += 1
        if staged:
            _made["step"] += 1
            now = time.monotonic()
            pending = _made["keeper"].stage(_made["step"], _made["state"])
            waits.append(time.monotonic() - now)
            if pending.skipped is not None:
                raise RuntimeError(pending.skipped)
            if rank == 1:
                most = max(most, _made["keeper"].status()["staged_bytes"])
    spent = (time.monotonic() - begun) / steps
    if staged:
        pending.wait(SECONDS)
        most = max(most, _made["keeper"].status()["staged_bytes"])
    dist.barrier(group)
    return spent, waits, most


def end_loop(group: Any) -> dict[str, Any]:
    copies: dict[str, Any] = _made["keeper"].status()["copies"]
    dist.barrier(group)
    _made["keeper"].end()
    return copies


def staging(
    nbytes: int, steps: int, rounds: int, rate: float, tell: Callable[[str], None]
) -> dict[str, Any]:
    seconds: dict[bool, list[float]] = {False: [], True: []}
    waits: list[float] = []
    most = [0, 0]
    with Ranks(2, parents=True) as ranks:
        work = ranks.run(prepare_loop, f"bench-{os.getpid()}", nbytes, rate)[0]
        ranks.run(loop, 2, work, True)
        for number in range(rounds):
            for staged in (False, True):
                found = ranks.run(loop, steps, work, staged)
                seconds[staged].append(found[0][0])
                waits += found[0][1]
                most = [max(a, one[2]) for a, one in zip(most, found, strict=True)]
            tell(f"staging: round {number + 1} of {rounds}")
        copies = ranks.run(end_loop)[1]
    alone, beside = median(seconds[False]), median(seconds[True])
    return {
        "bytes": nbytes,
        "rate": rate,
        "alone_seconds": alone,
        "staged_seconds": beside,
        "ratio": beside / alone,
        "stage_seconds": median(waits),
        "keeper_bytes": most[0],
        "buddy_bytes": most[1],
        "copied_bytes": copies["fetched_bytes"],
        "copied_step": copies["step"],
        "steps": steps * rounds,
    }


def held(pid: int) -> dict[str, int]:
    """What a keeper has, and what there is of keepers and shared memory."""
    from torchrelay.keeper import process

    facts = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("RssAnon", "RssShmem"):
            facts[name] = int(rest.split()[0]) << 10
        elif name == "Threads":
            facts[name] = int(rest)
    return {
        "anonymous_bytes": facts["RssAnon"],
        "shared_bytes": facts["RssShmem"],
        "threads": facts["Threads"],
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "keepers": len(process.KeeperName.all()),
        "shm_entries": len(list(Path("/dev/shm").iterdir())),
    }


def growth(nbytes: int, stages: int, restarts: int, tell: Callable[[str], None]) -> Any:
    """After a tenth of the stages and restarts, and after all of them."""
    import torchrelay as tr

    job = f"growth-{os.getpid()}"
    shm = len(list(Path("/dev/shm").iterdir()))
    state: dict[str, Any] = {**state_of(nbytes, 1.0), "step": 0}
    keeper = tr.Keeper(job, group=False, lease=SECONDS)
    pid = keeper.pid
    assert pid is not None
    found: dict[str, dict[str, int]] = {}
    for number in range(1, stages + 1):
        state["step"] = number
        keeper.stage(number, state).wait(SECONDS)
        if number in (max(1, stages // 10), stages):
            found[f"{number} stages"] = held(pid)
    tell(f"growth: {stages} stages")
    keeper.close()
    for number in range(1, restarts + 1):
        task("restart", job, nbytes)
        if number in (max(1, restarts // 10), restarts):
            found[f"{number} restarts"] = held(pid)
            tell(f"growth: {number} restarts")
    with tr.Keeper(job, group=False, lease=SECONDS) as last:
        got = tr.recover(into=state, sources=[last])
        exact = got.step == stages + restarts and last.pid == pid
    end(name_of(job))
    left = len(list(Path("/dev/shm").iterdir())) - shm
    return {"bytes": nbytes, "held": found, "exact": exact, "left_in_shm": left}


def name_of(job: str) -> Any:
    from torchrelay.keeper import process

    return process.KeeperName.of(job, None)


def run(small: bool, laps: int, tell: Callable[[str], None]) -> dict[str, Any]:
    return {
        "machine": machine(),
        "recovery": recovery(1 << 20 if small else 1 << 30, 1 if small else laps, tell),
        "staging": staging(*((1 << 20, 3, 1, 50e6) if small else (500 << 20, 40, 3, 200e6)), tell),
        "growth": growth(*((1 << 16, 20, 1) if small else (1 << 20, 1000, 100)), tell),
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['recovery']['bytes'] / 1e6:.0f} MB, from process start to landed state")
    for row in result["recovery"]["rows"]:
        print(f"  {row['case']:16s} {row['seconds']:8.3f} s {row['keeper_is_faster']:6.2f}x")
    loop_of = result["staging"]
    print(
        f"every step of {loop_of['alone_seconds']:.2f} s staged, {loop_of['bytes'] / 1e6:.0f} MB: "
        f"{loop_of['ratio']:.3f}x of alone, {loop_of['stage_seconds']:.3f} s in stage"
    )
    print(
        f"  keeper {loop_of['keeper_bytes'] / 1e6:.0f} MB, its buddy's "
        f"{loop_of['buddy_bytes'] / 1e6:.0f} MB, copied {loop_of['copied_bytes'] / 1e6:.0f} MB "
        f"at {loop_of['rate'] / 1e6:.0f} MB/s at most"
    )
    for when, facts in result["growth"]["held"].items():
        told = ", ".join(f"{name} {value}" for name, value in facts.items())
        print(f"  after {when:14s} {told}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.keeper", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes: a test, not a figure")
    parser.add_argument("--laps", type=int, default=5, help="of each way back")
    parser.add_argument("--out", type=Path, help="result file; by default a full run has one")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task is not None:
        name, *words = json.loads(options.task)
        print(json.dumps(TASKS[name](*words)))
        return 0
    result = run(options.small, options.laps, lambda text: print(text, file=sys.stderr))
    show(result)
    save(result, options.out or (None if options.small else RESULT))
    right = all(row["exact"] for row in result["recovery"]["rows"]) and result["growth"]["exact"]
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
