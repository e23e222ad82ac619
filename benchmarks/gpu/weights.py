"""Weights from a trainer to a worker on one GPU: `python -m benchmarks.gpu.weights [--small]`.

Two processes on one GPU, 8 GB of bf16 in 320 tensors; 2 % of the elements change from version to
version. The publisher keeps each version on the GPU, and the worker copies it from there (CUDA
IPC). Every result is compared bit for bit. Kernels that find, pack and apply changes are measured
next to it.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

import torchrelay as tr
from benchmarks.harness import machine, save
from torchrelay.memory.gpu import changes

SECONDS = 120.0  # that any one call may last
SHARE = 0.02  # of all elements, which change
GB = 1e9

STALL = "publish returns (copied on the GPU)"
UPDATE = "subscription: update to a version that is there"
PULL = "pull of a version that is there"
VERIFIED = "the same, digests compared on the GPU"
WHOLE = "2 % changed: from publish to the worker has it"


def prints_of(state: dict[str, torch.Tensor]) -> list[int]:
    """Sums of words and of words times their place: the same for the same bits alone."""
    found = []
    for tensor in state.values():
        words = tensor.view(torch.int64)
        place = torch.arange(1, words.numel() + 1, device=words.device)
        found += [words.sum(), (words * place).sum()]
    result: list[int] = torch.stack(found).tolist()
    return result


def change(state: dict[str, torch.Tensor], draw: torch.Generator) -> None:
    """Flip a bit of 2 % of the elements, anywhere."""
    for tensor in state.values():
        bits = tensor.view(torch.int16)
        some = int(bits.numel() * SHARE)
        index = torch.randint(0, bits.numel(), (some,), device="cuda", generator=draw)
        bits[index] ^= 1
    torch.cuda.synchronize()


def worker(line: Connection, count: int, nbytes: int) -> None:
    """Takes orders of the publisher: (kind, url, step, whether Python is profiled)."""
    state = {
        f"layers.{n}.weight": torch.zeros(nbytes // 2, dtype=torch.bfloat16, device="cuda")
        for n in range(count)
    }
    torch.cuda.synchronize()
    line.send("ready")
    while (order := line.recv()) is not None:
        kind, url, step, profiled = order
        if kind == "subscribe":
            following = tr.subscribe(url, into=state, timeout=SECONDS)
            line.send("subscribed")
            continue
        profile = cProfile.Profile() if profiled else None
        begun = time.monotonic()
        if profile is not None:
            profile.enable()
        if kind == "update":
            got = following.update(at_least=step)
        else:
            got = tr.pull(
                url,
                into=state,
                timeout=SECONDS,
                options=tr.options.PullOptions(verify="all" if kind == "verified pull" else True),
            )
        ended = time.monotonic()
        text = ""
        if profile is not None:
            profile.disable()
            out = io.StringIO()
            pstats.Stats(profile, stream=out).sort_stats("cumtime").print_stats(60)
            text = out.getvalue()
        found = (begun, ended, got.step, got.report.route, dict(got.report.instead), text)
        line.send((*found, got.report.seconds, prints_of(state)))


def measure_updates(
    line: Connection, state: dict[str, torch.Tensor], laps: int, *, profile: bool
) -> list[dict[str, Any]]:
    """Versions one after the other: how long the publisher waits, and when the worker has them."""
    total = sum(tensor.nbytes for tensor in state.values())
    draw = torch.Generator("cuda").manual_seed(1)
    found: dict[str, list[float]] = {}

    def ask(kind: str, step: int, *, profiled: bool = False) -> None:
        line.send((kind, endpoint.url, step, profiled))

    def answer(step: int) -> tuple[float, float]:
        assert line.poll(SECONDS), "the worker does not answer"
        begun, ended, got, route, instead, text, seconds, prints = line.recv()
        assert (got, route) == (step, "cuda_ipc"), (got, step, route, instead)
        assert prints == prints_of(state), f"step {step} has other bits"
        if text:
            print(text, seconds, file=sys.stderr)
        return begun, ended

    def publish(step: int) -> tuple[float, float, tr.Pending]:
        change(state, draw)
        begun = time.monotonic()
        pending = endpoint.publish(state, step=step, stage_on="device")
        return begun, time.monotonic(), pending

    with tr.serve(state, step=0, timeout=SECONDS) as endpoint:
        ask("subscribe", 0)
        assert line.poll(SECONDS) and line.recv() == "subscribed"
        for step in range(1, 2 * (laps + 2), 2):
            ask("update", step)  # the worker waits for this version
            time.sleep(0.05)  # it has asked: what is measured begins with the publish
            begun, returned, pending = publish(step)
            _, ended = answer(step)
            pending.result(SECONDS)
            times = {STALL: returned - begun, WHOLE: ended - begun}
            publish(step + 1)[2].result(SECONDS)  # and this one is there before the worker asks
            for name, kind in ((UPDATE, "update"), (PULL, "pull"), (VERIFIED, "verified pull")):
                ask(kind, step + 1)
                first, last = answer(step + 1)
                times[name] = last - first
            if step > 3:  # the first versions allocate memory
                for name, seconds in times.items():
                    found.setdefault(name, []).append(seconds)
        if profile:
            publish(step + 2)[2].result(SECONDS)
            ask("update", step + 2, profiled=True)
            answer(step + 2)
            ask("pull", step + 2, profiled=True)
            answer(step + 2)
            watch = cProfile.Profile()
            watch.enable()
            publish(step + 3)[2].result(SECONDS)
            watch.disable()
            out = io.StringIO()
            pstats.Stats(watch, stream=out).sort_stats("cumtime").print_stats(50)
            print(out.getvalue(), file=sys.stderr)
    return [_row(name, found[name], total) for name in (STALL, UPDATE, PULL, VERIFIED, WHOLE)]


def measure_changes(count: int, nbytes: int, laps: int) -> list[dict[str, Any]]:
    """The kernels alone, on one field of elements of two bytes."""
    total = count * nbytes
    draw = torch.Generator("cuda").manual_seed(2)
    old = torch.empty(total // 2, dtype=torch.int16, device="cuda")
    old.random_(-(2**15), 2**15 - 1, generator=draw)
    new = old.clone()
    piece = 1 << 28
    for low in range(0, len(new), piece):
        part = new[low : low + piece]
        some = int(part.numel() * SHARE)
        part[torch.randint(0, part.numel(), (some,), device="cuda", generator=draw)] ^= 1
    fields = [(0, total, 2)]

    def find() -> changes.Changes:
        return changes.find(old.data_ptr(), new.data_ptr(), fields, 0)

    changed = find().total()
    assert changed == int((old != new).sum()), "other elements than changed"
    seconds = []
    for _ in range(laps):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        find()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    row = _row("find: a bit for each element", seconds, total)
    return [{**row, "changed": round(changed / len(new), 4)}]


def _row(name: str, seconds: list[float], total: int) -> dict[str, Any]:
    middle = median(seconds)
    print(f"{name:50s} {1e3 * middle:8.2f} ms {total / GB / middle:8.0f} GB/s of state", flush=True)
    return {
        "case": name,
        "ms": round(1e3 * middle, 3),
        "gb_s": round(total / GB / middle, 1),
        "seconds": [round(one, 6) for one in seconds],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.weights", description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--laps", type=int, default=9)
    parser.add_argument("--profile", action="store_true", help="show where Python spends its time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    count, nbytes = (8, 1_000_000) if options.small else (320, 25_000_000)
    laps = 2 if options.small else options.laps
    rows = measure_changes(count, nbytes, laps)
    torch.cuda.empty_cache()
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=worker, args=(theirs, count, nbytes), daemon=True)
    child.start()
    theirs.close()
    draw = torch.Generator("cuda").manual_seed(0)
    state = {
        f"layers.{n}.weight": torch.randint(
            -(2**15), 2**15, (nbytes // 2,), dtype=torch.int16, device="cuda", generator=draw
        ).view(torch.bfloat16)
        for n in range(count)
    }
    assert ours.poll(SECONDS) and ours.recv() == "ready"
    rows = measure_updates(ours, state, laps, profile=options.profile) + rows
    ours.send(None)
    child.join(SECONDS)
    result = {
        "benchmark": "weights on one GPU",
        "machine": {**machine(), "gpu": torch.cuda.get_device_name()},
        "bytes": count * nbytes,
        "tensors": count,
        "exact": True,
        "rows": rows,
    }
    save(result, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
