"""What transfers cost a matmul loop on the sender's GPU, beyond the share that their bytes take.

The loop runs on rank 0's default stream in three conditions, in turn: alone, beside transfers, and
beside a transfer's work for the device and nothing else. That work is the same kernel on the same
bytes in the same two processes at the same pace: rank 1 copies and hashes memory that rank 0 has
exported, rank 0 hashes it on a side stream. No relay takes part: no capture, no messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import SECONDS
from torchrelay import Relay
from torchrelay.geometry.runs import Runs
from torchrelay.memory.gpu.kernels import by_device
from torchrelay.transports.routes.nearby import device_digests
from torchrelay.transports.routes.nearby.ipc_handles import Exports, Openings

ALONE, TRANSFERS, DEVICE_WORK = CONDITIONS = ("alone", "transfers", "device_work")
NAME = "matmul loop beside transfers"
BAR = 0.05  # of the loop's rate beside the device work
SAME_PACE = 0.03  # by which the two conditions may differ in transfers a second
SIDE = 8192  # of the matrices
BATCH = 8  # products between two waits for the device

Act = Callable[[], None]
Windows = dict[str, list[dict[str, float]]]

# In the ranks -----------------------------------------------------------------------------------


def measure(
    group: Any, state: dict[str, torch.Tensor], rounds: int, count: int, pause: float
) -> Windows:
    """Figures of each window, by condition. A window has `count` transfers, one every `pause`
    seconds or as fast as they come; the device work follows the pace that they had."""
    mine = group.rank()
    relay, openings = Relay(group, timeout=SECONDS), Openings()

    def transfer() -> None:
        if mine == 0:
            report = relay.send(state, to=1)
        else:
            report = relay.recv(0, into=state, atomic=False).report
        if report.route != "cuda_ipc" or not report.verified:
            raise RuntimeError(f"by {report.route}, verified: {report.verified}")

    acts: dict[str, Act] = {
        ALONE: lambda: None,
        TRANSFERS: transfer,
        DEVICE_WORK: device_work(group, list(state.values()), openings),
    }
    window = Loop() if mine == 0 else paced
    for act in acts.values():
        for _ in range(3):
            group.barrier().wait()
            act()
    found: Windows = {name: [] for name in CONDITIONS}
    pace = dict.fromkeys(CONDITIONS, pause)
    for number in range(rounds):
        for name in CONDITIONS if number % 2 == 0 else CONDITIONS[::-1]:
            told = [pace[name]]
            dist.broadcast_object_list(told, 0, group=group)
            group.barrier().wait()
            one = window(acts[name], count, told[0])
            found[name].append(one)
            if name == TRANSFERS:
                pace[DEVICE_WORK] = 1 / one["per_s"]
    group.barrier().wait()
    openings.close()
    relay.close()
    return found


def device_work(group: Any, tensors: list[torch.Tensor], openings: Openings) -> Act:
    """This rank's part of what a transfer asks of the device, all else done beforehand."""
    ends, starts = 0, []
    for tensor in tensors:
        starts.append(ends)
        ends += tensor.nbytes
    mine = Runs(starts, [one.data_ptr() for one in tensors], [one.nbytes for one in tensors])
    if group.rank() == 0:
        exported = Exports().of(mine)
        grid = device_digests.Grid()
        expected = grid.digests(mine, ends).packed()
        dist.broadcast_object_list([exported, expected], 0, group=group)

        def hash_memory() -> None:
            grid.digests(mine, ends).packed()

        return hash_memory
    told: list[Any] = [None, None]
    dist.broadcast_object_list(told, 0, group=group)
    sources = openings.sources(0, told[0], ends)

    def copy() -> None:
        copied = openings.copier.copy(sources, by_device(mine), ends, digests=True)
        if copied.differs(told[1]) is not None:
            raise RuntimeError("WRONG BITS beside the matmul loop")

    return copy


def paced(act: Act, count: int, pause: float) -> dict[str, float]:
    """Do it `count` times, one every `pause` seconds or as fast as it goes."""
    seconds = []
    begun = due = time.perf_counter()
    for _ in range(count):
        start = time.perf_counter()
        act()
        now = time.perf_counter()
        seconds.append(now - start)
        due = max(due + pause, now)
        time.sleep(due - now)
    return {"per_s": count / (time.perf_counter() - begun), "seconds": median(seconds)}


class Loop:
    """The training: products one after another on the default stream."""

    def __init__(self) -> None:
        self._matrix = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
        self(lambda: None, 1, 1.0)

    def __call__(self, act: Act, count: int, pause: float) -> dict[str, float]:
        """The rate of products while a thread of this process keeps the pace."""
        over = threading.Event()
        beside: dict[str, float] = {}
        faults: list[Exception] = []

        def run() -> None:
            try:
                beside.update(paced(act, count, pause))
            except Exception as fault:
                faults.append(fault)
            over.set()

        stream = torch.cuda.current_stream()
        stream.synchronize()
        thread = threading.Thread(target=run)
        products, begun = 0, time.perf_counter()
        thread.start()
        while not over.is_set():
            for _ in range(BATCH):
                self._matrix @ self._matrix
            stream.synchronize()
            products += BATCH
        rate = products / (time.perf_counter() - begun)
        thread.join()
        if faults:
            raise faults[0]
        return {"products_per_s": rate, **beside}


# In the parent ----------------------------------------------------------------------------------


def judged(sender: Windows, receiver: Windows) -> dict[str, Any]:
    """Medians over the windows, and what the transfers lose against the device work alone."""

    def middle(windows: Windows, name: str, figure: str) -> float:
        return median(window[figure] for window in windows[name])

    rate = {name: middle(sender, name, "products_per_s") for name in CONDITIONS}
    pace = {name: middle(receiver, name, "per_s") for name in (TRANSFERS, DEVICE_WORK)}
    lost = 1 - rate[TRANSFERS] / rate[DEVICE_WORK]
    same_pace = abs(pace[TRANSFERS] / pace[DEVICE_WORK] - 1) <= SAME_PACE
    return {
        "case": NAME,
        "products_per_s": {name: round(one, 1) for name, one in rate.items()},
        "transfers_per_s": {name: round(one, 3) for name, one in pace.items()},
        "receiver_seconds": {name: round(middle(receiver, name, "seconds"), 5) for name in pace},
        "share": round(1 - rate[DEVICE_WORK] / rate[ALONE], 4),
        "lost": round(lost, 4),
        "bar": BAR,
        "same_pace": same_pace,
        "passed": same_pace and lost < BAR,
        "windows": {
            name: [round(window["products_per_s"], 1) for window in sender[name]]
            for name in CONDITIONS
        },
    }


def row(found: dict[str, Any]) -> str:
    rate, pace = found["products_per_s"], found["transfers_per_s"]
    return (
        f"{NAME:44s} products/s: alone {rate[ALONE]:.1f}, beside the device work "
        f"{rate[DEVICE_WORK]:.1f} ({pace[DEVICE_WORK]:.2f}/s, share {found['share']:.1%}), beside "
        f"transfers {rate[TRANSFERS]:.1f} ({pace[TRANSFERS]:.2f}/s): lost beyond the share "
        f"{found['lost']:.1%} (bar {BAR:.0%}) {'pass' if found['passed'] else 'FAIL'}"
    )
