"""Receives at the same time, each for a step of its own; and processes that leave cleanly."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.ways import by, every_way, patched
from torchrelay.transports.meeting.conversation import Conversation
from torchrelay.transports.wire.messages import Join, Message

STEPS = range(6)


def by_step(rank: int, group: Any) -> list[int]:
    """Six sends from six threads, once six receives wait, each for one step, in another order."""
    begun = threading.Semaphore(0)
    original = Conversation.send

    def send(self: Conversation, message: Message) -> None:
        original(self, message)
        if isinstance(message, Join):
            begun.release()

    relay = tr.Relay(group, timeout=60)
    got: dict[int, float] = {}

    def one(step: int) -> None:
        if rank == 0:
            relay.send({"w": torch.full((1000,), float(step))}, 1, step=step)
        else:
            got[step] = relay.recv(0, step=step).state["w"].unique().item()

    order = list(STEPS) if rank == 0 else [3, 0, 5, 1, 4, 2]
    threads = [threading.Thread(target=one, args=(step,)) for step in order]
    with patched(Conversation, send=send):
        if rank == 0:
            torch.distributed.barrier(group)
        for thread in threads:
            thread.start()
        if rank == 1:
            assert all(begun.acquire(timeout=60) for _ in STEPS)
            torch.distributed.barrier(group)
        for thread in threads:
            thread.join(70)
    return sorted(got) if all(step == value for step, value in got.items()) else []


@every_way
def test_each_receive_gets_its_step(pool2: Any, way: str) -> None:
    assert pool2.run(by, way, by_step, timeout=90) == [[], list(STEPS)]


def nobody_has_it(rank: int, group: Any) -> float:
    """Two receives for steps that are not sent: both are refused soon, and both senders are."""
    relay = tr.Relay(group, timeout=20)
    faults: list[type] = []
    begun = time.monotonic()

    def one(step: int) -> None:
        try:
            if rank == 0:
                relay.send({"w": step}, 1, step=step)
            else:
                relay.recv(0, step=step + 10)
        except tr.errors.RelayError as fault:
            faults.append(type(fault))

    threads = [threading.Thread(target=one, args=(step,)) for step in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert faults == [tr.errors.StepMismatchError] * 2, faults
    return time.monotonic() - begun


def test_a_step_nobody_has_is_refused(pool2: Any) -> None:
    assert max(pool2.run(nobody_has_it, timeout=60)) < 10


SCRIPT = """
    import sys
    import torch, torch.distributed as dist
    import torchrelay as tr

    def main(rank, folder, fails, destroys):
        dist.init_process_group("gloo", init_method=f"file://{folder}/s", rank=rank, world_size=2)
        relay = tr.Relay(timeout=0.5 if fails else 20)
        if not fails:
            for route in ("tcp", "memory"):
                if rank == 0:
                    relay.send({"w": torch.ones(5)}, 1, route=route)
                else:
                    kept = relay.recv(0)
        elif rank == 1:
            try:
                relay.recv(0)
            except tr.errors.TransferTimeoutError:
                pass
        dist.barrier()
        if destroys:
            dist.destroy_process_group()

    if __name__ == "__main__":
        rank, folder, fails, ends = sys.argv[1:]
        main(int(rank), folder, fails == "fails", ends == "destroys")
"""


@pytest.mark.parametrize(
    ("fails", "ends"),
    [
        ("fails", "leaves"),
        ("succeeds", "destroys"),
        pytest.param("fails", "destroys", marks=pytest.mark.slow),
        pytest.param("succeeds", "leaves", marks=pytest.mark.slow),
    ],
)
def test_processes_exit_cleanly(tmp_path: Path, fails: str, ends: str) -> None:
    """A thread that still waits in the backend must not abort the interpreter's exit."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(script)]
    ranks = [subprocess.Popen([*command, str(n), str(tmp_path), fails, ends]) for n in range(2)]
    try:
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
