"""Steps in memory of a GPU: who gets them, and what is written to meanwhile.

Host memory takes the place of a GPU's, which is not there: handles are addresses of this process.
tests/endpoint/test_gpu_weights.py has the same on a GPU, with processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import torchrelay as tr
from torchrelay.deadlines import Deadline
from torchrelay.describing.region import Stream
from torchrelay.endpoint import pull
from torchrelay.endpoint.front import Endpoint
from torchrelay.endpoint.publish import device_path, host_slots
from torchrelay.endpoint.publish.device_slots import check_choice
from torchrelay.endpoint.server.device_steps import MOST_SLOTS, DeviceSteps
from torchrelay.endpoint.server.messages import FinishPublish, Show, StepRecord, Volume
from torchrelay.errors import PeerLostError, UsageError
from torchrelay.memory.digest import digest
from torchrelay.memory.pages import host_view
from torchrelay.sources import device_source
from torchrelay.sources.connection import Host
from torchrelay.sources.device_source import DeviceSource
from torchrelay.sources.endpoint import EndpointSource
from torchrelay.sources.lent_memory import DeviceExport, LocalFacts
from torchrelay.transports.routes.cuda.handles import Opening
from torchrelay.weights import subscription


class HostSlot:
    """A slot of a publisher in host memory."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.memory = torch.zeros(nbytes, dtype=torch.uint8)
        handle = self.memory.data_ptr().to_bytes(8, "little") + nbytes.to_bytes(8, "little")
        self.export = DeviceExport(number, "stand-in", handle, nbytes)

    def fill(self, streams: Sequence[Stream], volumes: Sequence[Volume]) -> None:
        for stream, volume in zip(streams, volumes, strict=True):
            stream.read(0, volume.nbytes, self.memory[volume.start :])

    def digests(self, volumes: Sequence[Volume]) -> list[bytes]:
        found = []
        for one in volumes:
            ends = [min(at + one.chunk_bytes, one.nbytes) for at in _chunks(one)]
            parts = [
                self.memory[one.start + low : one.start + high]
                for low, high in zip(_chunks(one), ends, strict=True)
            ]
            found.append(b"".join(digest(part.numpy()) for part in parts))
        return found

    def copy_to(self, arena: torch.Tensor, nbytes: int) -> None:
        arena[:nbytes].copy_(self.memory[:nbytes])


def _chunks(one: Volume) -> range:
    return range(0, one.nbytes, one.chunk_bytes)


class HostSlots:
    """In place of `DeviceSlots`."""

    full = False  # whether all memory is taken

    def __init__(self) -> None:
        self.slots: dict[int, HostSlot] = {}

    def unfit(self, share: object, nbytes: int, choice: str) -> str:
        return "host is wanted" if choice == "host" else "no memory" if self.full else ""

    def slot(self, number: int, share: object, nbytes: int) -> HostSlot:
        if number not in self.slots or self.slots[number].memory.numel() < nbytes:
            self.slots[number] = HostSlot(number, nbytes)
        return self.slots[number]

    def changes(self, *_: object) -> None:
        """Found by the server."""

    def published(self, *_: object) -> None:
        pass

    def close(self) -> None:
        self.slots.clear()

    forget = close


def _opened(export: Any) -> Opening:
    address, nbytes = (int.from_bytes(export.handle[n : n + 8], "little") for n in (0, 8))
    return Opening(address, 0, nbytes)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr(device_path, "DeviceSlots", HostSlots)
    arena = host_slots.Arena
    monkeypatch.setattr(host_slots, "Arena", lambda nbytes, pinned: arena(nbytes))
    monkeypatch.setattr(pull, "wants_gpu", lambda into, device=None: True)
    monkeypatch.setattr(device_source, "open_export", _opened)
    monkeypatch.setattr(device_source, "close_opening", lambda opened: None)
    monkeypatch.setattr(
        device_source,
        "device_bytes",
        lambda at, nbytes, device: torch.frombuffer(host_view(at, nbytes), dtype=torch.uint8),
    )
    with tr.serve(_state(0), step=0, timeout=60) as found:
        yield found


def _state(seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(100_000, generator=draw), "n": seed, "half": torch.ones(3).half()}


def _is(found: dict[str, Any], seed: int) -> bool:
    wanted = _state(seed)
    return found["n"] == seed and all(torch.equal(found[k], wanted[k]) for k in ("w", "half"))


def test_the_newest_step_is_read_where_it_was_copied_to(endpoint: Endpoint) -> None:
    for seed in range(1, 5):
        endpoint.publish(_state(seed), step=seed)
        into = _state(99)
        got = tr.pull(endpoint.url, into=into, timeout=60)
        assert got.report.route == "cuda_ipc" and not got.report.instead
        assert got.step == seed and _is(into, seed)
    assert endpoint.status()["sent_bytes"] == 0


def test_others_read_the_same_bytes_over_http(endpoint: Endpoint) -> None:
    endpoint.publish(_state(1), step=1)
    got = tr.pull(endpoint.url, timeout=60, options=tr.options.PullOptions(same_host=False))
    assert got.report.route == "http" and got.report.verified and _is(got.state, 1)


def test_a_wait_ends_with_a_step_that_is_on_the_gpu(endpoint: Endpoint) -> None:
    endpoint.publish(_state(7), step=7)
    got = tr.pull(endpoint.url, timeout=60, options=tr.options.PullOptions(newer_than=6))
    assert (got.step, got.report.route) == (7, "cuda_ipc")
    with pytest.raises(tr.errors.TransferTimeoutError, match="no step above 7"):
        tr.pull(endpoint.url, timeout=1.5, options=tr.options.PullOptions(newer_than=7))
    endpoint.publish(_state(8), step=8, stage_on="host").result(60)
    got = tr.pull(endpoint.url, timeout=60, options=tr.options.PullOptions(newer_than=7))
    assert (got.step, got.report.route) == (8, "mapped") and "cuda_ipc" in got.report.instead


def test_a_subscription_asks_once_where_a_server_lends_memory(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Host] = []
    find = device_source.local_facts

    def spied(host: Host) -> LocalFacts:
        asked.append(host)
        return find(host)

    monkeypatch.setattr(device_source, "local_facts", spied)
    monkeypatch.setattr(subscription, "wants_gpu", lambda into, device=None: True)
    into = _state(99)
    with tr.subscribe(endpoint.url, into=into, timeout=60) as worker:
        for step in range(1, 4):
            endpoint.publish(_state(step), step=step)
            assert worker.update(step).report.route == "cuda_ipc" and _is(into, step)
    assert len(asked) == 1


def test_a_step_in_host_memory_replaces_one_on_the_gpu(endpoint: Endpoint) -> None:
    endpoint.publish(_state(1), step=1).result(60)
    endpoint.publish(_state(2), step=2, stage_on="host").result(60)
    got = tr.pull(endpoint.url, timeout=60)
    assert got.report.route == "mapped" and _is(got.state, 2)
    endpoint.publish(_state(3), step=3)
    got = tr.pull(endpoint.url, timeout=60)
    assert got.report.route == "cuda_ipc" and _is(got.state, 3)


def test_what_is_lent_is_never_written_to(endpoint: Endpoint) -> None:
    """Publishing continues, into the third slot, and to host memory when that is lent as well."""
    held = []
    for step in range(1, 6):
        endpoint.publish(_state(step), step=step)
        source = DeviceSource(EndpointSource(endpoint.url))
        opened = source.open(None, Deadline(60))
        held.append((step, source, opened))
    assert [source.used for _, source, _ in held] == [True] * MOST_SLOTS + [False] * 2
    assert all("cuda_ipc" in source.instead for _, source, _ in held[MOST_SLOTS:])
    for step, source, opened in held:
        file = opened.record.volumes[0]
        whole = bytearray(file.nbytes)
        opened.files.reader(file.name).read_into(0, memoryview(whole))
        assert _state(step)["w"].numpy().tobytes() in bytes(whole)
        opened.close()
        source.end()
    endpoint.publish(_state(9), step=9)
    assert tr.pull(endpoint.url, timeout=60).report.route == "cuda_ipc"


def test_a_publisher_that_dies_is_an_error(endpoint: Endpoint) -> None:
    endpoint.publish(_state(1), step=1).result(60)
    source = DeviceSource(EndpointSource(endpoint.url))
    opened = source.open(1, Deadline(60))
    endpoint.close()
    reader = opened.files.reader(opened.record.volumes[0].name)
    buffer = bytearray(100)
    # The server ends a moment after its publisher.
    with pytest.raises(PeerLostError, match="publisher at"):
        until = Deadline(30)
        while not until.passed:
            reader.read_into(0, memoryview(buffer))
    opened.close()
    source.end()


def test_a_server_that_came_back_is_found_again(endpoint: Endpoint) -> None:
    endpoint.publish(_state(1), step=1).result(60)
    assert tr.pull(endpoint.url, timeout=60).report.route == "cuda_ipc"
    endpoint._server.process.drop()
    endpoint.publish(_state(2), step=2).result(60)
    got = tr.pull(endpoint.url, timeout=60)
    assert got.report.route == "cuda_ipc" and _is(got.state, 2)


def test_without_memory_the_host_has_it(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostSlots, "full", True)
    endpoint.publish(_state(1), step=1)
    got = tr.pull(endpoint.url, timeout=60)
    assert got.report.route == "mapped" and _is(got.state, 1)
    with pytest.raises(UsageError, match=r"stage_on=.device., but no memory"):
        endpoint.publish(_state(2), step=2, stage_on="device")
    assert _is(tr.pull(endpoint.url, timeout=60).state, 1)


def test_a_handle_of_too_little_memory_is_not_read(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.publish(_state(1), step=1)
    monkeypatch.setattr(
        device_source, "open_export", lambda export: _opened(export)._replace(nbytes=100)
    )
    got = tr.pull(endpoint.url, timeout=60)
    assert got.report.instead == {"cuda_ipc": "a volume reaches out of the memory"}
    assert got.report.route == "mapped" and _is(got.state, 1)


def test_slots_of_a_server() -> None:
    """Pure: which slot is taken next."""
    steps = DeviceSteps()
    whole = StepRecord(b"r", [], 0, ["http://a"], [])

    def publish(step: int) -> int:
        slot = steps.take()
        if slot >= 0:
            export = DeviceExport(slot, "", b"", 1)
            steps.show(Show(slot, step, f"{step:032x}", [], whole, export))
        steps.finish(FinishPublish(step, on_device=slot >= 0))
        return slot

    assert [publish(n) for n in range(4)] == [0, 1, 0, 1]
    first = steps.newest
    assert first is not None and first.step == 3
    steps.leases[first.slot] += 1
    assert [publish(n) for n in (4, 5, 6)] == [0, 2, 0]
    assert steps.find("", 3) is first and steps.find(f"{5:032x}", None) is not None
    for step in (5, 6):
        found = steps.find("", step)
        assert found is not None
        steps.leases[found.slot] += 1
    assert publish(7) == -1 and steps.newest is None
    steps.leases[first.slot] -= 1
    assert publish(8) == 1 and steps.find("", 3) is None
    slot = steps.take()
    steps.finish(FinishPublish(9, failed=True))
    assert slot == -1 and steps.newest is not None and steps.newest.step == 8


def test_a_choice_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="stage_on must be one of auto, host, device"):
        check_choice("disk")
