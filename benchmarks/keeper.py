"""A keeper beside the disk: `python -m benchmarks.keeper`.

Three questions. How long a worker that was started again takes until its state is landed: from the
keeper, from a live peer of this host, and by `dcp.load` from a disk that is cold and one that is
hot, each in a process of its own whose torch is imported; beside them torch's PGTransport between
two processes whose group is ready. What it costs to stage every step of a loop while a buddy
fetches copies. Whether anything grows with many stages and many workers that are killed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.harness import Ranks, machine, save
from benchmarks.keeper_tasks import (
    COLD,
    HOT,
    KEEPER,
    PEER,
    ROOT,
    SECONDS,
    TENSORS,
    Tasks,
    is_exact,
    state_of,
)

RESULT = Path(__file__).parent / "results" / "keeper.json"
STOCK = "PGTransport"
CASES = [KEEPER, PEER, COLD, HOT]
PARTS = ("recovery", "staging", "growth")

_made: dict[str, Any] = {}


# The three questions.


def recovery(nbytes: int, laps: int, tell: Callable[[str], None]) -> dict[str, Any]:
    job = f"bench-{os.getpid()}"
    folder = tempfile.mkdtemp(dir=ROOT)  # on the disk of the sources, not in memory
    seconds: dict[str, list[float]] = {case: [] for case in [*CASES, STOCK]}
    imported: dict[str, list[float]] = {case: [] for case in [*CASES, STOCK]}
    processor: dict[str, list[float]] = {case: [] for case in [*CASES, STOCK]}
    exact = dict.fromkeys(seconds, True)
    first = int(laps > 1)  # it compiles modules, and fetches memory that this guest has not had yet

    def note(case: str, found: dict[str, Any], lap: int) -> None:
        exact[case] = exact[case] and found["exact"]
        if lap >= first:
            seconds[case].append(found["seconds"])
            imported[case].append(found["imported"])
            processor[case].append(found["processor"])

    tasks = Tasks()
    try:
        with tasks.live_peer(nbytes) as url, Ranks(2, parents=True) as ranks:
            tasks.run("keep", job, folder, nbytes)
            os.sync()
            places = {KEEPER: job, PEER: url, COLD: folder, HOT: folder}
            ranks.run(prepare_stock, nbytes)
            for lap in range(laps + first):
                for case in CASES:
                    note(case, tasks.run("recover", case, places[case], nbytes), lap)
                note(STOCK, by_both(ranks.run(by_stock)), lap)
                tell(f"recovery: lap {lap + 1} of {laps + first}")
    finally:
        shutil.rmtree(folder)
        end(name_of(job))
    ours = median(seconds[KEEPER]), median(imported[KEEPER])
    return {
        "bytes": nbytes,
        "rows": [
            {
                "case": case,
                "seconds": median(seconds[case]),
                "seconds_imported": median(imported[case]),
                "processor_seconds": median(processor[case]),
                "keeper_is_faster": median(seconds[case]) / ours[0],
                "keeper_is_faster_imported": median(imported[case]) / ours[1],
                "exact": exact[case],
                "laps": seconds[case],
                "laps_imported": imported[case],
            }
            for case in seconds
        ],
    }


def prepare_stock(group: Any, nbytes: int) -> None:
    _made["model"] = state_of(nbytes, 1.0 if dist.get_rank() == 0 else 0.0)


def by_both(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What the receiver found, with the processor seconds of the sender too."""
    return found[1] | {"processor": sum(one["processor"] for one in found)}


def by_stock(group: Any) -> dict[str, Any]:
    """Seconds that torch's transport takes to put rank 0's state into rank 1's."""
    from torch.distributed.checkpoint._pg_transport import PGTransport

    model, rank = _made["model"], dist.get_rank()
    if rank:
        for tensor in model.values():
            tensor.zero_()
    limit, cpu = timedelta(seconds=SECONDS), torch.device("cpu")
    stock = PGTransport(dist.group.WORLD, limit, cpu, lambda: model)  # type: ignore[arg-type]
    dist.barrier(group)
    begun, used = time.monotonic(), time.process_time()
    if rank:
        stock.recv_checkpoint(0)
    else:
        stock.send_checkpoint([1], model)
    spent, used = time.monotonic() - begun, time.process_time() - used
    dist.barrier(group)
    return {"seconds": spent, "imported": spent, "processor": used, "exact": is_exact(model)}


def end(name: Any) -> None:
    from torchrelay.keeper import process
    from torchrelay.keeper.server.messages import End

    process.ask(name, End())
    until = time.monotonic() + SECONDS
    while name in process.KeeperName.all():
        if time.monotonic() > until:
            raise TimeoutError(f"{name} does not end")
        time.sleep(0.01)


def prepare_loop(group: Any, job: str, nbytes: int, rate: float, steps: int, seconds: float) -> int:
    """Rank 0 has the state; rank 1, on a host that is pretended, has little. Multiplications that
    take the seconds of a step."""
    import torchrelay as tr

    torch.set_num_threads(1)
    rank = dist.get_rank()
    _made["keeper"] = tr.Keeper(
        f"{job}@{'ab'[rank]}",
        options=tr.options.KeeperOptions(
            copy_bytes_per_second=rate, steps=steps, lease_seconds=SECONDS
        ),
    )
    _made["state"] = state_of(nbytes if rank == 0 else TENSORS * 4, 1.0)
    _made["step"] = 0
    _made["batch"] = torch.randn(512, 512)
    return burn(10**9, seconds)


def burn(most: int, seconds: float = float("inf")) -> int:
    begun = time.monotonic()
    for done in range(most):
        if time.monotonic() - begun > seconds:
            return done
        _made["batch"] @ _made["batch"]
    return most


def loop(group: Any, steps: int, work: int, staged: bool) -> tuple[float, list[float], int]:
    """Seconds of a step on average, those that the loop waits for `stage`, and how many steps were
    staged."""
    rank = dist.get_rank()
    waits: list[float] = []
    kept = 0
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
            kept += pending.skipped is None
    spent = (time.monotonic() - begun) / steps
    if staged:
        pending.result(SECONDS)
    dist.barrier(group)
    return spent, waits, kept


def rest(group: Any) -> None:
    """Wait until this rank's keeper has its copies: a round has to do with its own alone."""
    until = time.monotonic() + SECONDS
    while _made["keeper"].status()["copies"]["copying"] is not None:
        if time.monotonic() > until:
            raise TimeoutError("copies do not end")
        time.sleep(0.05)


def end_loop(group: Any) -> dict[str, Any]:
    facts: dict[str, Any] = _made["keeper"].status()
    dist.barrier(group)
    _made["keeper"].end()
    return facts


class LoopSize(NamedTuple):
    """How large a state is staged how often, with steps of how many seconds."""

    nbytes: int
    steps: int
    rounds: int
    rate: float
    step_seconds: float


def staging(size: LoopSize, tell: Callable[[str], None]) -> dict[str, Any]:
    """With as many steps in memory as a keeper has by default, and with as many as it takes for
    every step to be staged while another is copied."""
    with Ranks(2, parents=True) as ranks:
        return {"rows": [staged_loop(ranks, size, most, tell) for most in (2, 4)]}


def staged_loop(
    ranks: Ranks, size: LoopSize, most: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    nbytes, steps, rounds, rate, step_seconds = size
    seconds: dict[bool, list[float]] = {False: [], True: []}
    waits: list[float] = []
    kept = 0
    job = f"bench-{os.getpid()}-{most}"
    work = ranks.run(prepare_loop, job, nbytes, rate, most, step_seconds)[0]
    alone = ranks.run(loop, 4, work, False)[0][0]  # with the state's change, and the machine's
    work = max(1, round(work * step_seconds / alone))
    ranks.run(loop, 2, work, True)
    for number in range(rounds):
        for staged in (False, True):
            ranks.run(rest)
            found = ranks.run(loop, steps, work, staged)
            seconds[staged].append(found[0][0])
            waits += found[0][1]
            kept += found[0][2]
        tell(f"staging, {most} steps in memory: round {number + 1} of {rounds}")
    own, buddy = ranks.run(end_loop)
    alone, beside = median(seconds[False]), median(seconds[True])
    return {
        "bytes": nbytes,
        "rate": rate,
        "steps_in_memory": most,
        "alone_seconds": alone,
        "staged_seconds": beside,
        "ratio": beside / alone,
        "stage_seconds": median(waits),
        "keeper_bytes": own["most_bytes"],
        "buddy_bytes": buddy["most_bytes"],
        "copied_bytes": buddy["copies"]["fetched_bytes"],
        "copied_step": buddy["copies"]["step"],
        "steps": steps * rounds,
        "staged": kept,
    }


def held(job: str, pid: int) -> dict[str, int]:
    """What a keeper has, and what there is of keepers of its job and of shared memory."""
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
        "keepers": sum(name.job == job for name in process.KeeperName.all()),
        "shm_entries": shm_entries(),
    }


def shm_entries() -> int:
    """Names in shared memory that are this library's."""
    return len(list(Path("/dev/shm").glob("*torchrelay*")))


def growth(nbytes: int, stages: int, restarts: int, tell: Callable[[str], None]) -> Any:
    """After a tenth of the stages and restarts, and after all of them."""
    import torchrelay as tr

    job = f"growth-{os.getpid()}"
    state: dict[str, Any] = {**state_of(nbytes, 1.0), "step": 0}
    keeper = tr.Keeper(job, no_dist=True, options=tr.options.KeeperOptions(lease_seconds=SECONDS))
    pid = keeper.pid
    assert pid is not None
    found: dict[str, dict[str, int]] = {}
    for number in range(1, stages + 1):
        state["step"] = number
        keeper.stage(number, state).result(SECONDS)
        if number in (max(1, stages // 10), stages):
            found[f"{number} stages"] = held(job, pid)
    tell(f"growth: {stages} stages")
    keeper.close()
    for number in range(1, restarts + 1):
        Tasks().run("restart", job, nbytes)
        if number in (max(1, restarts // 10), restarts):
            found[f"{number} restarts"] = held(job, pid)
            tell(f"growth: {number} restarts")
    with tr.Keeper(
        job, no_dist=True, options=tr.options.KeeperOptions(lease_seconds=SECONDS)
    ) as last:
        got = tr.recover(into=state, sources=[last])
        exact = got.step == stages + restarts and last.pid == pid
    end(name_of(job))
    return {"bytes": nbytes, "held": found, "exact": exact, "left_in_shm": shm_entries()}


def name_of(job: str) -> Any:
    from torchrelay.keeper import process

    return process.KeeperName.of(job)


def run(small: bool, laps: int, parts: list[str], tell: Callable[[str], None]) -> dict[str, Any]:
    ways: dict[str, Callable[[], Any]] = {
        "recovery": lambda: recovery(1 << 20 if small else 1 << 30, 1 if small else laps, tell),
        "staging": lambda: staging(
            LoopSize(*((1 << 20, 3, 1, 50e6, 0.05) if small else (500 << 20, 40, 3, 200e6, 0.5))),
            tell,
        ),
        "growth": lambda: growth(*((1 << 16, 20, 1) if small else (1 << 20, 1000, 100)), tell),
    }
    return {"machine": machine(), **{part: ways[part]() for part in parts}}


def show(result: dict[str, Any]) -> None:
    if "recovery" in result:
        print(f"{result['recovery']['bytes'] / 1e6:.0f} MB; with imports, and without:")
        for row in result["recovery"]["rows"]:
            print(
                f"  {row['case']:16s} {row['seconds']:8.3f} s {row['keeper_is_faster']:6.2f}x"
                f" {row['seconds_imported']:8.3f} s {row['keeper_is_faster_imported']:6.2f}x"
                f" {row['processor_seconds']:8.3f} s of the processor"
            )
    if "staging" in result:
        for row in result["staging"]["rows"]:
            size = row["bytes"]
            print(
                f"{row['staged']} of {row['steps']} steps of {row['alone_seconds']:.2f} s staged, "
                f"{size / 1e6:.0f} MB: {row['ratio']:.3f}x of alone, "
                f"{row['stage_seconds']:.3f} s in stage"
            )
            print(
                f"  {row['steps_in_memory']} steps at most: keeper {row['keeper_bytes'] / size:.2f}"
                f"x of the state, its buddy's copies {row['buddy_bytes'] / size:.2f}x, copied "
                f"{row['copied_bytes'] / 1e6:.0f} MB at {row['rate'] / 1e6:.0f} MB/s at most"
            )
    if "growth" in result:
        for when, facts in result["growth"]["held"].items():
            told = ", ".join(f"{name} {value}" for name, value in facts.items())
            print(f"  after {when:14s} {told}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.keeper", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes: a test, not a figure")
    parser.add_argument("--laps", type=int, default=7, help="of each way back, beside the first")
    parser.add_argument("--only", choices=PARTS, help="one question; the file keeps the others")
    parser.add_argument("--out", type=Path, help="result file; by default a full run has one")
    options = parser.parse_args()
    parts = [options.only] if options.only else list(PARTS)
    result = run(options.small, options.laps, parts, lambda text: print(text, file=sys.stderr))
    show(result)
    out = options.out or (None if options.small else RESULT)
    kept = json.loads(out.read_text()) if options.only and out and out.exists() else {}
    save(kept | result, out)
    found = result.get("recovery", {"rows": []})["rows"], result.get("growth", {"exact": True})
    return 0 if all(row["exact"] for row in found[0]) and found[1]["exact"] else 1


if __name__ == "__main__":
    sys.exit(main())
