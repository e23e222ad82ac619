"""A live state pulled over HTTP, beside torchft's HTTPTransport: `python -m benchmarks.endpoint`.

Two processes: one has the state, the other takes it, in turn by each way, into new tensors as
torchft does and into the ones it has. A process that has pulled before has memory from then; a
`first` pull is one without. Then a trainer's step time, alone and while four readers that are
throttled to 100 MB/s in all pull what it publishes.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import torchrelay as tr
from benchmarks.harness import Ranks, machine, save
from torchrelay.endpoint import pull as pulls
from torchrelay.endpoint.front import Endpoint
from torchrelay.memory.pool import Pool

RESULT = Path(__file__).parent / "results" / "endpoint.json"
LIMIT = timedelta(seconds=120)
STOCK = "torchft HTTPTransport"
CASES = [STOCK, "pull, TCP", "pull, TCP, in place", "pull, TCP, not atomic"]
CASES += ["pull, mapped", "pull, mapped, in place", "pull, TCP, first"]
READERS, RATE = 4, 25_000_000  # bytes a second of each

_made: dict[str, Any] = {}


def _transport() -> Any:
    """torchft's, or where it has no wheel its Python files: the transport needs nothing else."""
    try:
        importlib.import_module("torchft.http")
    except ImportError:
        package = types.ModuleType("torchft")
        package.__path__ = [str(Path(sys.prefix) / "torchft-src" / "torchft")]
        sys.modules["torchft"] = package
    module = importlib.import_module("torchft.checkpointing.http_transport")
    return module.HTTPTransport(timeout=LIMIT, num_chunks=0)


def prepare(group: Any, tensors: int, numel: int) -> tuple[str, str, int]:
    """Rank 0 serves a state both ways; URL and address, and the bytes of the state."""
    rank = dist.get_rank()
    state = {
        f"w{n}": torch.full((numel,), float(n + 1 if rank == 0 else 0)) for n in range(tensors)
    }
    _made["state"] = state
    if "endpoint" in _made:
        _made.pop("endpoint").close()
    if rank:
        return "", "", 0
    _made["endpoint"] = tr.serve(state, step=1, no_dist=True)
    transport = _made.setdefault("transport", _transport())
    transport.send_checkpoint([1], 1, state, LIMIT)
    return _made["endpoint"].url, transport.metadata(), tensors * numel * 4


def lap(group: Any, case: str, url: str, address: str) -> tuple[float, bool]:
    """Seconds that rank 1 takes, and whether it has the right values."""
    if dist.get_rank() == 0:
        dist.barrier(group)
        return 0.0, True
    atomic = "not atomic" not in case
    into = _made["state"] if "in place" in case or not atomic else None
    for tensor in _made["state"].values() if into else ():
        tensor.zero_()
    kept = pulls._pool
    if "first" in case:
        pulls._pool = lambda process: Pool(0)  # type: ignore[assignment]
    begun = time.monotonic()
    if case == STOCK:
        transport = _made.setdefault("transport", _transport())
        got = transport.recv_checkpoint(0, address, 1, LIMIT)
    else:
        how = tr.options.PullOptions(atomic=atomic, same_host="mapped" in case)
        got = tr.pull(url, into=into, no_dist=True, options=how).state
    spent = time.monotonic() - begun
    pulls._pool = kept
    right = all(bool((got[f"w{n}"] == n + 1).all()) for n in range(len(got)))
    dist.barrier(group)
    return spent, right


def compare(size: tuple[int, int], laps: int, tell: Callable[[str], None]) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    exact = dict.fromkeys(CASES, True)
    with Ranks(2, parents=True) as ranks:
        url, address, nbytes = ranks.run(prepare, *size)[0]
        for number in range(laps + 1):
            for case in CASES:
                found = ranks.run(lap, case, url, address)
                exact[case] = exact[case] and all(right for _, right in found)
                if number:
                    seconds[case].append(found[1][0])
            tell(f"{size[0]} tensors: lap {number} of {laps}")
    stock = median(seconds[STOCK])
    rows = [
        {
            "case": case,
            "seconds": median(laps_of),
            "against_torchft": stock / median(laps_of),
            "exact": exact[case],
            "laps": laps_of,
        }
        for case, laps_of in seconds.items()
    ]
    return {"tensors": size[0], "bytes": nbytes, "rows": rows}


def train(seconds: float, endpoint: Endpoint, state: dict[str, torch.Tensor], step: int) -> Any:
    """Step times of a small training that publishes every 20 steps, and the last step."""
    weight = torch.randn(384, 384, requires_grad=True)
    batch = torch.randn(256, 384)
    times = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begun = time.perf_counter()
        for _ in range(8):
            loss = (batch @ weight).tanh().square().mean()
            loss.backward()
            with torch.no_grad():
                weight -= 0.01 * weight.grad
                weight.grad = None
        step += 1
        if step % 20 == 0:
            endpoint.publish(state, step=step)
        else:
            times.append(time.perf_counter() - begun)
    return times, step


def trainer(nbytes: int, seconds: float, rounds: int, tell: Callable[[str], None]) -> Any:
    """Step time alone and beside readers, in turns; its median, and the ratio."""
    torch.set_num_threads(1)
    state = {"w": torch.ones(nbytes // 4)}
    times: dict[str, list[float]] = {"alone": [], "read": []}
    ratios: list[float] = []
    stop = Path(f"/tmp/torchrelay-bench-{os.getpid()}")
    with tr.serve(state, step=0, no_dist=True) as endpoint:
        _, step = train(seconds / 2, endpoint, state, 0)
        for number in range(rounds):
            alone, step = train(seconds, endpoint, state, step)
            times["alone"] += alone
            loop = f"while [ ! -e {stop} ]; do curl -s --limit-rate {RATE} -o /dev/null "
            loop += f"{endpoint.url}/model.safetensors || exit 1; done"
            readers = [subprocess.Popen(["sh", "-c", loop]) for _ in range(READERS)]
            try:
                sent = endpoint.status()["sent_bytes"]
                found, step = train(seconds, endpoint, state, step)
                times["read"] += found
                ratios.append(round(median(found) / median(alone), 3))
                sent = endpoint.status()["sent_bytes"] - sent
            finally:
                stop.touch()
                for reader in readers:
                    reader.terminate()
                    reader.wait(30)
                stop.unlink()
            tell(f"trainer: round {number + 1} of {rounds}, {sent / seconds / 1e6:.0f} MB/s read")
        status = endpoint.status()
    by_itself, read = median(times["alone"]), median(times["read"])
    shown = [one for one in status["publishes"] if one["skipped"] is None]
    return {
        "alone_seconds": by_itself,
        "read_seconds": read,
        "ratio": read / by_itself,
        "rounds": ratios,
        "readers": READERS,
        "published": len(shown),
        "skipped": len(status["publishes"]) - len(shown),
        "steps": {name: len(found) for name, found in times.items()},
    }


def run(small: bool, laps: int, tell: Callable[[str], None]) -> dict[str, Any]:
    sizes = [(3, 1000), (40, 16)] if small else [(12, 25_000_000), (4000, 1024)]
    states = [compare(size, laps, tell) for size in sizes]
    training = trainer(*((1 << 20, 0.5, 1) if small else (200 << 20, 6.0, 3)), tell)
    return {"machine": machine(), "states": states, "trainer": training}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endpoint", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes: a test, not a figure")
    parser.add_argument("--laps", type=int, default=5, help="that count, of each")
    parser.add_argument("--out", type=Path, help="result file; by default a full run has one")
    options = parser.parse_args()
    result = run(options.small, options.laps, lambda text: print(text, file=sys.stderr))
    for state in result["states"]:
        print(f"{state['tensors']} tensors, {state['bytes'] / 1e6:.0f} MB")
        for row in state["rows"]:
            ratio = f"{row['against_torchft']:6.2f}x of torchft"
            print(f"  {row['case']:24s} {row['seconds']:8.3f} s {ratio}")
    step = result["trainer"]
    print(f"trainer, which publishes every 20 steps, {step['published']} times in all")
    for name in ("alone", "read"):
        count, middle = step["steps"][name], 1e3 * step[f"{name}_seconds"]
        what = "alone" if name == "alone" else f"{READERS} readers, {RATE / 1e6:.0f} MB/s each"
        print(f"  {what:24s} {middle:8.2f} ms a step, median of {count}")
    print(f"  {step['ratio']:.3f}x of alone, by round {step['rounds']}")
    save(result, options.out or (None if options.small else RESULT))
    return 0 if all(row["exact"] for state in result["states"] for row in state["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
