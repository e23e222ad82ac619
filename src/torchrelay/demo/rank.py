"""What each of the demo's processes does, and how it tells the parent."""

from __future__ import annotations

import os
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchrelay.demo.job import DemoJob, Settings, clear, fingerprint, tensor_bytes
from torchrelay.demo.versus import DIRECT, IN_PLACE, NEW, SOURCE, Course, Mode, Who, hush_torch
from torchrelay.relay import Progress, Relay

WORLD = 4
SECONDS = 60.0  # that any one wait may last

KINDS: list[tuple[Who, Mode]] = [
    ("torch", NEW),
    ("torchrelay", NEW),
    ("torch", IN_PLACE),
    ("torchrelay", IN_PLACE),
    ("torchrelay", DIRECT),
]


def main(conn: Connection, rank: int, scratch: str, settings: Settings) -> None:
    """The whole life of one process; reports are pairs of a word and a value."""
    try:
        torch.set_num_threads(1)
        hush_torch()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(scratch) / 'store'}",
            rank=rank,
            world_size=WORLD,
            timeout=timedelta(seconds=SECONDS),
        )
        conn.send(("ready", None))
        job = _pass_on(conn, rank, settings)
        conn.send(("losses", job.train(settings.steps_after)))
        _compare(conn, job.state(), settings)
        # A process that leaves early breaks connections that others may still use.
        conn.poll(SECONDS)
    except BaseException:
        conn.send(("failed", traceback.format_exc()))
    finally:
        conn.close()
        os._exit(0)  # skips waiting for connections that a failed peer has left half open


def _pass_on(conn: Connection, rank: int, settings: Settings) -> DemoJob:
    """Rank 0 trains and sends; the others start with other weights and receive."""
    job = DemoJob(settings, seed=rank)
    report = _reporter(conn)
    with Relay(timeout=SECONDS) as relay:
        if rank == SOURCE:
            losses = job.train(settings.steps_before)
            state = job.state()
            conn.send(("trained", (losses, tensor_bytes(state))))
            sent = relay.send(
                state, to=range(1, WORLD), step=settings.steps_before, progress=report
            )
            conn.send(("moved", (fingerprint(state), sent.wire_bytes, sent.total_seconds)))
        else:
            got = relay.recv(SOURCE, step=settings.steps_before, progress=report)
            job.load(got.state)
            fields = (fingerprint(job.state()), got.report.wire_bytes, got.report.total_seconds)
            conn.send(("moved", fields))
    return job


def _compare(conn: Connection, state: dict[str, Any], settings: Settings) -> None:
    """Laps of every kind in turn, so that a disturbance of the machine meets all of them alike."""
    group = dist.group.WORLD
    courses = [Course(who, mode, group, state, SECONDS) for who, mode in KINDS]
    sends = dist.get_rank() == SOURCE
    for index, course in enumerate(courses):
        if not sends:
            clear(state)
        course.lap()
        into_state = sends or KINDS[index][1] != NEW
        conn.send(("checked", fingerprint(state if into_state else course.received)))
        course.received = None
    for _ in range(settings.rounds):
        for course in courses:
            conn.send(("lap", course.lap()))
            course.received = None


def _reporter(conn: Connection) -> Any:
    last = 0.0

    def report(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now > last + 0.02 or progress.done == progress.total:
            last = now
            conn.send(("progress", tuple(progress)))

    return report
