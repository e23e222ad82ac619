"""A cable that is pulled out in the middle of a transfer between hosts, and plugged in again.

Nothing closes a connection then: whoever waits has its own deadline alone. Weights are old or new,
ranks that are still connected go on, and with the cable back the next transfer is right.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

import torchrelay as tr
from tests.support import faults
from tests.support.faults import CHUNK, GRACE, RECEIVER, SENDER, Outcome, attempt, held_at, weights
from tests.support.netns import Hosts, Switch, Unavailable
from tests.support.ways import patched
from torchrelay.deadlines import Deadline

OLD, NEW, MEANWHILE, AFTER = 100, 1, 2, 3
SECONDS = 4.0  # of a call whose peer is cut off
LONG = 30.0
HOSTS = 3

pytestmark = pytest.mark.timeout(300)


class Scene(NamedTuple):
    """Who talks to whom, whose cable is pulled, and when."""

    shape: str  # "one" to one, one to two ("fan"), one from two ("gather")
    victim: int
    phase: str


DAILY = (Scene("one", 1, "data"), Scene("fan", 1, "data"), Scene("gather", 1, "data"))
SLOW = (
    *(Scene("one", 1, phase) for phase in ("before", "joined", "commit")),
    *(Scene("one", 0, phase) for phase in ("before", "joined", "data", "confirm")),
    *(Scene("fan", 2, phase) for phase in ("before", "joined", "data")),
    *(Scene("fan", 0, phase) for phase in ("data",)),
    *(Scene("gather", 0, phase) for phase in ("before", "joined", "data", "confirm")),
    *(Scene("gather", 2, phase) for phase in ("before",)),
)


# On the hosts


def flag(folder: str, name: str) -> None:
    Path(folder, name).touch()


def wait_for(folder: str, name: str, seconds: float = LONG) -> None:
    end = time.monotonic() + seconds
    while not Path(folder, name).exists():
        assert time.monotonic() < end, f"{name} did not come"
        time.sleep(0.005)


def wait_until_reached(relay: tr.Relay, rank: int) -> None:
    """The kernel takes a moment to notice that a cable is back."""
    there = relay._member().meeting.directory.find(rank, Deadline(LONG))
    end = time.monotonic() + LONG
    while True:
        try:
            socket.create_connection((there.host, there.port), 2.0).close()
            return
        except OSError:
            assert time.monotonic() < end, f"rank {rank} cannot be reached"
            time.sleep(0.05)


@contextlib.contextmanager
def cut_at(scene: Scene, rank: int, folder: str) -> Iterator[None]:
    """Within: this rank reports that it is at the phase of the scene, and waits for the cut."""

    def reached(phase: str, *, hold: bool = False) -> None:
        flag(folder, "there")
        wait_for(folder, "cut")

    if rank != scene.victim or scene.phase == "before":
        yield
        return
    sends = scene.victim == 0 or (scene.shape == "gather" and scene.victim == 1)
    spots = (SENDER if sends else RECEIVER)["tcp"]
    with patched(faults, reached=reached), held_at(spots[scene.phase], "there"):
        yield


class Job:
    """One rank's part, by the shape of a scene. Its weights are `live`."""

    def __init__(self, rank: int, shape: str, relay: tr.Relay) -> None:
        self.rank, self.shape, self.relay = rank, shape, relay
        self.live = weights(OLD)
        self._mesh = DeviceMesh("cpu", [0, 1])

    def _shards(self, seed: int) -> dict[str, Any]:
        """What one of two senders has: half of the rows of the large tensors."""
        state = weights(seed)
        for name in ("w", "h"):
            rows = state[name].tensor_split([(len(state[name]) + 1) // 2])[self.rank]
            shape, stride = state[name].size(), state[name].stride()
            state[name] = DTensor.from_local(
                rows, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
            )
        return state

    def play(self, seed: int, ranks: set[int], timeout: float) -> Outcome | None:
        """Transfer the weights of a seed among those ranks, if this is one of them."""
        if self.rank not in ranks:
            return None
        senders = {0, 1} & ranks if self.shape == "gather" else {0}
        receivers = sorted(ranks - senders)
        if self.rank in senders:
            state = self._shards(seed) if senders == {0, 1} else weights(seed)
            return attempt(lambda: self.relay.send(state, receivers, timeout=timeout))
        source: Any = sorted(senders) if senders == {0, 1} else min(senders)
        out = attempt(lambda: self.relay.recv(source, into=self.live, timeout=timeout))
        return out._replace(weights=faults.verdict(self.live, OLD, NEW, MEANWHILE, AFTER))


def played(rank: int, scene: Scene, folder: str) -> list[Outcome | None]:
    """Before the cut, with the cable out, and with the cable back."""
    shape, victim, phase = scene
    everyone = {0, 1} if shape == "one" else {0, 1, 2}
    relay = tr.Relay(chunk_bytes=CHUNK, route="tcp", join_window=1.0, timeout=LONG)
    job = Job(rank, shape, relay)
    first = job.play(OLD, everyone, LONG)
    dist.barrier()
    if phase == "before":
        if rank == victim:
            flag(folder, "there")
        wait_for(folder, "cut")
    with cut_at(scene, rank, folder):
        faulty = job.play(NEW, everyone, SECONDS)
    meanwhile = None
    connected = everyone - {victim}
    if len(connected) > 1 and (shape, victim) not in (("fan", 0), ("gather", 2)):
        meanwhile = job.play(MEANWHILE, connected, LONG)
    flag(folder, f"over {rank}")
    wait_for(folder, "back")
    for other in sorted(everyone - {rank}) if rank in everyone else ():
        wait_until_reached(relay, other)
    flag(folder, f"ready {rank}")
    for other in range(HOSTS):
        wait_for(folder, f"ready {other}")
    return [first, faulty, meanwhile, job.play(AFTER, everyone, LONG)]


# The test


@pytest.fixture(scope="module")
def switch() -> Iterator[Switch]:
    try:
        made = Switch(HOSTS)
    except Unavailable as reason:
        pytest.skip(str(reason))
    with made:
        yield made


def act(switch: Switch, scene: Scene, folder: str) -> None:
    """Pull the victim's cable when it is there, and plug it in when all calls are over."""
    wait_for(folder, "there")
    switch.connect(scene.victim, False)
    flag(folder, "cut")
    for rank in range(HOSTS):
        wait_for(folder, f"over {rank}")
    switch.connect(scene.victim, True)
    flag(folder, "back")


@pytest.mark.parametrize(
    "scene",
    [*DAILY, *(pytest.param(scene, marks=pytest.mark.slow) for scene in SLOW)],
    ids=lambda scene: "-".join(map(str, scene)),
)
def test_a_cable_that_is_pulled_out_and_plugged_in(
    switch: Switch, tmp_path: Path, scene: Scene
) -> None:
    shape, victim, _ = scene
    with Hosts(switch) as hosts:
        hand = threading.Thread(target=act, args=(switch, scene, str(tmp_path)), daemon=True)
        hand.start()
        try:
            found = hosts.run(played, scene, str(tmp_path), timeout=120)
        finally:
            hand.join(LONG)
            switch.connect(victim, True)
    everyone = (0, 1) if shape == "one" else (0, 1, 2)
    for rank in everyone:
        first, faulty, meanwhile, after = found[rank]
        assert first.error is None and after.error is None, (rank, first, after)
        assert after.weights in (None, AFTER), (rank, after)
        assert meanwhile is None or meanwhile.error is None, (rank, meanwhile)
        assert faulty.seconds < SECONDS + GRACE + 1, (rank, faulty)
        if faulty.weights is not None:
            assert faulty.weights == (OLD if faulty.error else NEW), (rank, faulty)
    if shape == "fan" and victim != 0:
        other = 3 - victim
        assert found[0][1].receivers == (other,), found[0][1]
        assert found[other][1].error is None and found[other][1].seconds < SECONDS
    if shape == "gather" and victim != 2:
        assert found[2][1].error in ("TransferTimeoutError", "PeerLostError"), found[2][1]
        assert f"rank {victim}" in found[2][1].text, found[2][1]
