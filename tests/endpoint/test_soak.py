"""A thousand clients of all kinds at one endpoint and one keeper: honest ones are served
throughout; memory and descriptors of the servers stay flat.

    SOAK_SECONDS=300 pytest -m slow tests/endpoint/test_soak.py -s
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pytest
import torch

import torchrelay as tr
from tests.endpoint.soak_clients import KINDS, Tally, Target, run_clients
from tests.keeper.jobs import end_keepers
from tests.support.forks import servers

SECONDS = float(os.environ.get("SOAK_SECONDS", "30"))
CLIENTS = int(os.environ.get("SOAK_CLIENTS", "1000"))
PROCESSES = 4
TOKEN = "correct-horse-battery-staple"
NUMEL = 2_000_000
GROWTH = 8 << 20  # bytes of memory that a server may take more at the end than at the beginning


class Sample(NamedTuple):
    """What a process has."""

    anonymous: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Sample:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        facts = dict(line.split(":", 1) for line in lines)
        count = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return cls(int(facts["RssAnon"].split()[0]) << 10, count, int(facts["Threads"]))


class Watch:
    """Samples of processes, once a second."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.samples: dict[str, list[Sample]] = {name: [] for name in pids}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(1.0):
            for name, pid in self._pids.items():
                self.samples[name].append(Sample.of(pid))

    def end(self) -> None:
        self._over.set()
        self._thread.join(10)


def target_of(url: str, token: str, status: dict[str, Any]) -> Target:
    step = status["steps"][-1]
    return Target(url, token, step["step"], step["snapshot"], step["here"][0], step["bytes"])


def soak(pipe: Any, share: int, targets: list[Target], seconds: float) -> None:
    torch.set_num_threads(1)
    kinds = {
        kind: (count * CLIENTS // 1000 + PROCESSES - 1 - share) // PROCESSES
        for kind, (_, count, _) in KINDS.items()
    }
    tally = run_clients(kinds, targets, seconds, seed=share)
    pipe.send((dict(tally.served), dict(tally.failed), tally.slowest, sum(kinds.values())))


def run_all(targets: list[Target], seconds: float) -> tuple[Tally, int]:
    """The clients of several processes; what they found, and how many they were."""
    tally, clients, running = Tally(), 0, []
    for share in range(PROCESSES):
        ours, theirs = servers.Pipe(duplex=False)
        process = servers.Process(target=soak, args=(theirs, share, targets, seconds))
        process.start()
        running.append((process, ours))
    try:
        for _, pipe in running:
            assert pipe.poll(seconds + 180), "the clients do not end"
            served, failed, slowest, count = pipe.recv()
            tally.served.update(served)
            tally.failed.update(failed)
            tally.slowest = max(tally.slowest, slowest)
            clients += count
    finally:
        for process, _ in running:
            process.kill()
            process.join(30)
    return tally, clients


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_clients_of_all_kinds() -> None:
    state = {"w": torch.arange(NUMEL, dtype=torch.float32), "step": 1}
    access, job = tr.Access(token=TOKEN), f"soak-{os.getpid()}"
    endpoint = tr.serve(state, step=1, access=access, no_dist=True, timeout=120)
    keeper = tr.Keeper(
        job,
        access=access,
        no_dist=True,
        timeout=120,
        options=tr.options.KeeperOptions(lease_seconds=900),
    )
    try:
        endpoint.publish(state, step=1).result(60)
        keeper.stage(1, state).result(60)
        pids = {"endpoint": endpoint._server.process.pid or 0, "keeper": keeper.pid or 0}
        before = {name: Sample.of(pid) for name, pid in pids.items()}
        targets = [
            target_of(endpoint.url, TOKEN, endpoint.status()),
            target_of(keeper.url, TOKEN, keeper.status()),
        ]
        watch = Watch(pids)
        tally, clients = run_all(targets, SECONDS)
        watch.end()
        print(f"\n{clients} clients for {SECONDS:.0f} s: {dict(tally.served)}")
        print(f"honest failures: {dict(tally.failed)}; slowest honest call {tally.slowest:.1f} s")
        for name, samples in watch.samples.items():
            third = max(1, len(samples) // 3)
            first, last = samples[third : 2 * third], samples[-third:]
            grown = mean(s.anonymous for s in last) - mean(s.anonymous for s in first)
            peak = Sample(*(max(values) for values in zip(*samples, strict=True)))
            print(f"{name}: before {before[name]}, peak {peak}, grown {grown / 1e6:.2f} MB")
            assert grown < GROWTH, f"{name} has grown by {grown} bytes"
            assert peak.descriptors < 700, f"{name} has had {peak.descriptors} descriptors"
        assert not tally.failed
        for kind in ("honest_pull", "honest_mapped", "honest_range"):
            assert tally.served[kind] > 0
        end = time.monotonic() + 60
        for name, pid in pids.items():  # everything that clients have taken is given back
            while Sample.of(pid).descriptors > before[name].descriptors + 8:
                assert time.monotonic() < end, (name, Sample.of(pid), before[name])
                time.sleep(0.5)
            print(f"{name}: after {Sample.of(pid)}")
        got = tr.pull(endpoint.url, access=access, no_dist=True, timeout=60)
        assert torch.equal(got.state["w"], state["w"])
        assert endpoint.publish(state, step=2).skipped is None
    finally:
        endpoint.close()
        keeper.close()
        end_keepers(job)
