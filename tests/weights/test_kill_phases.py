"""Workers, servers and trainers that are killed or stopped at any phase of an update: those that
are left have one version, and the next update is right."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torchrelay as tr
from tests.keeper.jobs import end_keepers
from tests.support.ranks import Ranks, reached, tell, wait_until_stopped
from tests.weights.conftest import Wire
from tests.weights.test_faults import LATER, PARTS, followed, once, version_of, weights
from torchrelay.weights import MappedDestination, ParameterRule, SourcePart, WeightMapping

TIMEOUT = 30
SOON = 6.0  # for an update that cannot end
HOLDS = ("plan", "stream", "give", "land")  # the phases of an update, one pair of ranks for each


# A rank of a worker is killed.


class Counter:
    """An object of the state that a rank holds in, when all ranks have verified."""

    def __init__(self, stops: bool) -> None:
        self.number, self.stops = -1, stops

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.stops and state["number"] == 2:
            self.stops = False
            reached("give", hold=True)
        self.number = state["number"]


class Landing(MappedDestination):
    """A destination that a rank holds in while it is written."""

    stops = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.stops and float(state["there"][0]) == 2:
            self.stops = False
            reached("land", hold=True)


def shared(version: int) -> dict[str, Any]:
    """The state that is published for the ranks of the workers."""
    state = weights(version)
    return state | {
        "counter": {"number": version},
        "mapped": {"there": torch.full((4,), float(version))},
    }


class Rank:
    """The destination of one rank."""

    def __init__(self, holds: str) -> None:
        self.counter, self.mine = Counter(holds == "give"), {"here": torch.zeros(4)}
        mapping = WeightMapping((ParameterRule("here", (SourcePart("there"),)),))
        mapped = Landing(self.mine, mapping)
        mapped.stops = holds == "land"
        self.into = weights(-1) | {"counter": self.counter, "mapped": mapped}

    def version(self) -> int:
        """-99 for a mixture."""
        found = {version_of(self.into), self.counter.number, int(self.mine["here"][0])}
        return found.pop() if len(found) == 1 else -99


def follow(rank: int, group: Any, urls: list[str], same_host: bool) -> tuple[str, int, int]:
    """The second rank of each pair holds in a phase; returns how the update of the first ended, the
    version that it has then, and the one after it has continued alone."""
    pairs = [dist.new_group([2 * pair, 2 * pair + 1]) for pair in range(len(HOLDS))]
    mine = Rank(HOLDS[rank // 2] if rank % 2 else "")
    given: dict[str, Any] = {"same_host": same_host, "timeout": TIMEOUT}
    subscription = tr.subscribe(urls[rank], into=mine.into, group=pairs[rank // 2], **given)
    assert subscription.update().step == mine.version() == 1
    reached("first", hold=True)
    ended = ""
    try:
        subscription.update(at_least=2, timeout=SOON)
    except tr.errors.RelayError as fault:
        ended = type(fault).__name__
    left = mine.version()
    if rank % 2 == 0:
        alone = tr.subscribe(urls[rank], into=mine.into, no_dist=True, **given)
        assert alone.update(at_least=2).step == 2
    return ended, left, mine.version()


class Stopped:
    """A stream that stands still at a byte, until it is let go."""

    def __init__(self, wire: Wire, after: int) -> None:
        self.there, self._go = threading.Event(), threading.Event()
        self._after = after
        wire.meddle = self._meddle
        self.wire = wire

    def _meddle(self, asked: bytes, at: int, data: bytes) -> bytes | None:
        if asked == PARTS and at >= self._after and not self._go.is_set():
            self.there.set()
            self._go.wait(TIMEOUT)
            return None
        return data

    def let_go(self) -> None:
        self._go.set()


def test_a_rank_of_a_worker_that_is_killed_in_any_phase(wires: Callable[[str], Wire]) -> None:
    with tr.serve(shared(1), step=1, timeout=TIMEOUT) as endpoint:
        lines = {phase: wires(endpoint.url) for phase in ("plan", "stream")}
        urls = [endpoint.url] * 8
        for phase, wire in lines.items():
            urls[2 * HOLDS.index(phase) + 1] = wire.url
        with Ranks(follow, 8, urls, False) as ranks:
            for rank in range(8):
                ranks.wait_reached(rank, "first", TIMEOUT)
            endpoint.publish(shared(2), step=2).result(TIMEOUT)
            stopped = {
                phase: Stopped(wire, LATER if phase == "stream" else 0)
                for phase, wire in lines.items()
            }
            for rank in range(8):
                ranks.release(rank)
            for pair, phase in enumerate(HOLDS):
                if phase in stopped:
                    assert stopped[phase].there.wait(TIMEOUT)
                else:
                    ranks.wait_reached(2 * pair + 1, phase, TIMEOUT)
                ranks.kill(2 * pair + 1)
            for one in stopped.values():
                one.let_go()
            found = dict(zip(HOLDS, ranks.results(TIMEOUT, [0, 2, 4, 6]), strict=True))
    print(found)
    for phase, (ended, left, last) in found.items():
        assert ended and last == 2
        assert left == 1 if phase != "land" else left == 2


# A server is killed or stopped.


def once_at(wire: Wire, line: bytes, after: int, act: Callable[[], None]) -> list[int]:
    """Act when a request has been answered that far, and break it off."""
    done: list[int] = []

    def meddle(asked: bytes, at: int, data: bytes) -> bytes | None:
        if asked.startswith(line) and at >= after and not done:
            done.append(at)
            act()
            return None
        return data

    wire.meddle = meddle
    return done


PHASES = {
    "list": (b"GET /steps.json", 0),
    "plan": (b"GET /record", 0),
    "begin": (PARTS, 0),
    "stream": (PARTS, LATER),
    "end": (b"POST /readers/", 0),
}


def slow_but(name: object, *all_of: object) -> list[Any]:
    """One of some parameters every day, and the others in `make test-slow`."""
    return [one if one == name else pytest.param(one, marks=pytest.mark.slow) for one in all_of]


@pytest.mark.parametrize("phase", slow_but("stream", *PHASES))
def test_a_server_that_is_killed_leaves_one_version(
    wires: Callable[[str], Wire], phase: str
) -> None:
    with tr.serve(weights(1), step=1, timeout=TIMEOUT) as endpoint:
        wire = wires(endpoint.url)
        subscription, into = followed(wire.url)
        subscription.update()
        endpoint.publish(weights(2), step=2).result(TIMEOUT)
        pid = endpoint._server.process.pid
        assert pid is not None
        server = os.pidfd_open(pid)
        where = once_at(wire, *PHASES[phase], lambda: os.kill(pid, signal.SIGKILL))
        if phase == "end":
            assert subscription.update(timeout=2).step == version_of(into) == 2
        else:
            with pytest.raises(tr.errors.RelayError):
                subscription.update(timeout=2)
            assert version_of(into) == 1
        assert where
        ended, _, _ = select.select([server], [], [], TIMEOUT)  # a kill takes a moment
        os.close(server)
        assert ended
        endpoint.publish(weights(3), step=3).result(TIMEOUT)  # by a new server
        wire.lead(endpoint.url)
        assert subscription.update(at_least=3).step == version_of(into) == 3


@contextmanager
def stopped(pid: int | None) -> Iterator[None]:
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    wait_until_stopped(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("same_host", slow_but(True, False, True))
def test_a_server_that_stands_still(same_host: bool) -> None:
    with tr.serve(weights(1), step=1, timeout=TIMEOUT) as endpoint:
        subscription, into = followed(endpoint.url, same_host=same_host)
        subscription.update()
        endpoint.publish(weights(2), step=2).result(TIMEOUT)
        with stopped(endpoint._server.process.pid), pytest.raises(tr.errors.RelayError):
            subscription.update(timeout=1)
        assert version_of(into) == 1
        assert subscription.update(timeout=TIMEOUT).step == version_of(into) == 2


def test_a_server_that_stops_within_a_stream(wires: Callable[[str], Wire]) -> None:
    with tr.serve(weights(1), step=1, timeout=TIMEOUT) as endpoint:
        wire = wires(endpoint.url)
        subscription, into = followed(wire.url)
        subscription.update()
        endpoint.publish(weights(2), step=2).result(TIMEOUT)
        pid = endpoint._server.process.pid or 0

        def stop(data: bytes) -> bytes:
            os.kill(pid, signal.SIGSTOP)
            return data

        where = once(wire, stop)
        try:
            with pytest.raises(tr.errors.RelayError):
                subscription.update(timeout=2)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert where and version_of(into) == 1
        assert subscription.update(timeout=TIMEOUT).step == version_of(into) == 2


@pytest.mark.slow  # a connection without progress is given up after 10 s
def test_a_server_that_stops_within_a_stream_is_replaced(wires: Callable[[str], Wire]) -> None:
    with (
        tr.serve(weights(1), step=1, timeout=TIMEOUT) as one,
        tr.serve(weights(1), step=1, timeout=TIMEOUT) as other,
    ):
        wire, spare = wires(one.url), wires(other.url)
        subscription, into = followed([wire.url, spare.url])
        pid = one._server.process.pid or 0

        def stop(data: bytes) -> bytes:
            os.kill(pid, signal.SIGSTOP)
            return data

        where = once(wire, stop)
        try:
            report = subscription.update(timeout=2 * TIMEOUT).report
        finally:
            os.kill(pid, signal.SIGCONT)
        assert where and version_of(into) == 1 and report.sources[spare.url] > 0


# A rank of the trainer is killed.


ELEMENTS = 1_500_000  # of each rank


def whole(version: int) -> torch.Tensor:
    return torch.arange(2.0 * ELEMENTS) + version


def train(rank: int, group: Any, versions: int) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def state(version: int) -> dict[str, Any]:
        return {"w": distribute_tensor(whole(version), mesh, [Shard(0)], src_data_rank=None)}

    with tr.serve(state(1), step=1, timeout=TIMEOUT) as endpoint:
        for version in range(1, versions + 1):
            if version > 1:
                endpoint.publish(state(version), step=version).result(TIMEOUT)
            tell((endpoint.url, endpoint._server.process.pid))
            reached("published", hold=True)


@pytest.mark.parametrize("replaced", slow_but(True, False, True))
def test_a_trainer_rank_that_is_killed_is_named_or_replaced(
    wires: Callable[[str], Wire], replaced: bool
) -> None:
    """`replaced`: a seed has the same volumes."""
    with Ranks(train, 2, 2) as ranks:
        for rank in range(2):
            ranks.wait_reached(rank, "published", TIMEOUT)
        url = ranks.told(0)[0][0]
        wire = wires(url)
        into = {"w": torch.zeros(2 * ELEMENTS)}
        given: dict[str, Any] = {"same_host": False, "timeout": TIMEOUT}
        first = tr.subscribe(wire.url, into=into, **given)
        assert first.update().step == 1 and torch.equal(into["w"], whole(1))
        for rank in range(2):
            ranks.release(rank)
        for rank in range(2):
            ranks.wait_reached(rank, "published", TIMEOUT)
        (_, pid), sources = ranks.told(0)[-1], [wire.url]
        copy = tr.pull(
            url, timeout=TIMEOUT, options=tr.options.PullOptions(same_host=False, reshare=replaced)
        )
        if replaced:
            assert copy.seed is not None
            sources.append(copy.seed.url)
        subscription = tr.subscribe(sources, into=into, **given)

        def lose() -> None:
            ranks.kill(0)
            os.kill(pid, signal.SIGKILL)

        where = once_at(wire, PARTS, LATER, lose)
        if replaced:
            got = subscription.update(timeout=TIMEOUT)
            assert got.step == 2 and torch.equal(into["w"], whole(2))
            assert wire.url in got.report.failed
        else:
            with pytest.raises(tr.errors.RelayError, match=wire.url):
                subscription.update(timeout=2)
            assert torch.equal(into["w"], whole(1))
            with pytest.raises(tr.errors.RelayError, match=wire.url):
                first.update(timeout=2)
            assert torch.equal(into["w"], whole(1))
        assert where
        if copy.seed is not None:
            copy.seed.close()
    with tr.serve({"w": whole(3)}, step=3, timeout=TIMEOUT) as again:  # another trainer
        wire.lead(again.url)
        assert subscription.update(at_least=3, timeout=TIMEOUT).step == 3
        assert torch.equal(into["w"], whole(3))


TOKEN = "correct-horse-battery-staple"


def replicate(rank: int, group: Any, job: str) -> None:
    """Two replicas that serve the same shards, each in a group of its own; or, with a job, one of
    them whose keeper has them, too."""
    access = tr.Access(token=TOKEN)
    shape = (2,) if job else (2, 2)
    mesh = init_device_mesh("cpu", shape)
    groups = [dist.new_group([first, first + 1]) for first in range(0, mesh.size(), 2)]
    places = [Shard(0)] if job else [Replicate(), Shard(0)]
    state = {"w": distribute_tensor(whole(1), mesh, places, src_data_rank=None)}
    keeper = None
    if job:
        keeper = tr.Keeper(
            job,
            access=access,
            timeout=TIMEOUT,
            options=tr.options.KeeperOptions(lease_seconds=TIMEOUT, copies=0),
        )
        keeper.stage(1, state).result(TIMEOUT)
    mine = groups[rank // 2]
    with tr.serve(state, step=1, access=access, group=mine, timeout=TIMEOUT) as endpoint:
        endpoint.publish(state, step=1).result(TIMEOUT)
        other = None if keeper is None else keeper.url
        tell((endpoint.url, endpoint._server.process.pid, other))
        reached("published", hold=True)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["replica", "keeper"])
def test_a_replica_or_a_keeper_replaces_a_trainer_rank(
    wires: Callable[[str], Wire], other: str
) -> None:
    job = f"weights-{os.getpid()}" if other == "keeper" else ""
    try:
        with Ranks(replicate, 2 if job else 4, job) as ranks:
            for rank in range(len(ranks.processes)):
                ranks.wait_reached(rank, "published", TIMEOUT)
            url, pid, keeper = ranks.told(0)[0]
            spare = keeper or ranks.told(2)[0][0]
            wire = wires(url)
            into = {"w": torch.zeros(2 * ELEMENTS)}
            subscription = tr.subscribe(
                [wire.url, spare],
                into=into,
                access=tr.Access(token=TOKEN),
                same_host=False,
                timeout=TIMEOUT,
            )

            def lose() -> None:
                ranks.kill(0)
                os.kill(pid, signal.SIGKILL)

            where = once_at(wire, PARTS, LATER, lose)
            got = subscription.update()
            assert where and got.step == 1 and torch.equal(into["w"], whole(1))
            assert wire.url in got.report.failed and got.report.sources[spare] > 0
    finally:
        if job:
            end_keepers(job)
