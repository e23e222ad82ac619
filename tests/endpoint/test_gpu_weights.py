"""A published step in memory of a GPU, read by another process of the host (CUDA IPC)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import torchrelay as tr
from torchrelay.deadlines import Deadline
from torchrelay.endpoint.publish.device_slots import DeviceSlots
from torchrelay.errors import PeerLostError, RelayError
from torchrelay.memory.gpu.block import DeviceBlock
from torchrelay.memory.gpu.kernels import device_bytes
from torchrelay.planning.stored import Shard
from torchrelay.sources.device_source import DeviceSource
from torchrelay.sources.endpoint import EndpointSource
from torchrelay.stores.reading.box_reads import BoxRead
from torchrelay.stores.reading.device_copies import DeviceCopies
from torchrelay.stores.step_files import StepFiles
from torchrelay.weights import Encoding

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: memory of one is lent"
)
SECONDS = 120.0


def _state(seed: int, rows: int = 6000) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, 512, generator=draw)
    return {
        "w": wide.cuda(),
        "half": wide[:, :100].to(torch.bfloat16).cuda(),
        "turned": wide.cuda().t(),
        "bits": torch.randint(-(2**15), 2**15, (999,), dtype=torch.int16, generator=draw)
        .cuda()
        .view(torch.bfloat16),
        "odd": torch.arange(seed, seed + 7, dtype=torch.uint8).cuda(),
        "host": torch.full((5,), float(seed)),
        "n": seed,
    }


def _same(found: dict[str, Any], seed: int) -> bool:
    wanted = _state(seed)
    tensors = [key for key in wanted if key != "n"]
    return found["n"] == seed and all(
        torch.equal(found[key].cpu().contiguous().view(torch.uint8), _bytes(wanted[key]))
        for key in tensors
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def _publish(line: Connection) -> None:
    """A trainer: publishes the states that it is asked for."""
    with tr.serve(_state(0), step=0, timeout=SECONDS) as endpoint:
        line.send(endpoint.url)
        while (order := line.recv()) is not None:
            step, wait, keys = order
            state = {key: one for key, one in _state(step).items() if not keys or key in keys}
            pending = endpoint.publish(state, step=step, stage_on="device")
            if wait:
                pending.result(SECONDS)
            line.send(endpoint.status()["sent_bytes"])


class Trainer:
    def __init__(self) -> None:
        spawn = get_context("spawn")
        self._line, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_publish, args=(theirs,))
        self.process.start()
        theirs.close()
        self.url: str = self._answer()

    def _answer(self) -> Any:
        assert self._line.poll(SECONDS)
        return self._line.recv()

    def publish(self, step: int, *keys: str, wait: bool = True) -> int:
        self._line.send((step, wait, keys))
        found: int = self._answer()
        return found

    def close(self) -> None:
        if self.process.is_alive():
            self._line.send(None)
        self.process.join(SECONDS)


@contextmanager
def _trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    try:
        yield trainer
    finally:
        trainer.close()


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    torch.zeros(1, device="cuda")  # this process uses the GPU
    with _trainer() as found:
        yield found


@pytest.mark.parametrize("verify", [True, "all"])
def test_a_worker_has_the_bits_of_each_version(trainer: Trainer, verify: Any) -> None:
    into = _state(99)
    places = {key: one.data_ptr() for key, one in into.items() if isinstance(one, torch.Tensor)}
    for step in range(1, 6):
        sent = trainer.publish(step, wait=step % 2 == 0)
        got = tr.pull(
            trainer.url, into=into, timeout=SECONDS, options=tr.options.PullOptions(verify=verify)
        )
        assert got.report.route == "cuda_ipc" and not got.report.instead, got.report
        assert got.report.verified is (verify == "all") and got.step == step
        assert _same(into, step) and sent == 0
    assert places == {key: into[key].data_ptr() for key in places}


def test_a_subscription_follows(trainer: Trainer) -> None:
    into = _state(97)
    trainer.publish(70)
    with tr.subscribe(trainer.url, into=into, timeout=SECONDS) as following:
        for step in range(71, 75):
            trainer.publish(step, wait=step % 2 == 0)
            got = following.update(at_least=step)
            assert got.step == step and got.report.route == "cuda_ipc", got.report
            assert following.update().report.bytes == 0 and _same(into, step)


def test_updates_of_tensors_alone_are_planned_once(trainer: Trainer) -> None:
    """By the copies of the first update, until the tensors or the published state are others."""
    keys = ["w", "half", "bits", "odd"]
    into = {key: _state(97)[key] for key in keys}
    trainer.publish(80, *keys)
    with tr.subscribe(trainer.url, into=into, timeout=SECONDS) as following:
        for step in range(81, 90):
            trainer.publish(step, *keys, *(["host"] if step > 87 else []), wait=step % 2 == 0)
            if step == 88:
                into["host"] = torch.zeros(5)
            got = following.update(at_least=step)
            assert got.step == step and got.report.route == "cuda_ipc", got.report
            assert ("plan" in got.report.seconds) is (step in (81, 85, 86, 88, 89))
            wanted = _state(step)
            assert all(torch.equal(_bytes(one), _bytes(wanted[key])) for key, one in into.items())
            if step == 84:  # another tensor
                into["w"] = torch.zeros_like(into["w"])
            if step == 85:  # the same one with other memory
                into["half"].data = torch.zeros_like(into["half"])


def test_new_tensors_and_host_tensors(trainer: Trainer) -> None:
    trainer.publish(11)
    got = tr.pull(trainer.url, timeout=SECONDS, options=tr.options.PullOptions(device="cuda"))
    assert got.report.route == "cuda_ipc" and got.state["w"].is_cuda and _same(got.state, 11)
    into = {
        key: one.cpu() if isinstance(one, torch.Tensor) else one for key, one in _state(1).items()
    }
    into["odd"] = into["odd"].cuda()
    got = tr.pull(trainer.url, into=into, timeout=SECONDS)
    assert got.report.route == "cuda_ipc" and into["w"].is_cpu and _same(into, 11)
    got = tr.pull(trainer.url, timeout=SECONDS, options=tr.options.PullOptions(same_host=False))
    assert got.report.route == "http" and _same(got.state, 11)
    got = tr.pull(trainer.url, timeout=SECONDS)
    assert got.report.route == "mapped" and _same(got.state, 11)


def test_memory_does_not_grow(trainer: Trainer) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("looks at the free memory of the GPU, which other workers use: run it alone")
    into = _state(98)
    left = []
    for step in range(20, 50):
        trainer.publish(step, wait=False)
        tr.pull(trainer.url, into=into, timeout=SECONDS)
        torch.cuda.empty_cache()
        left.append(torch.cuda.mem_get_info()[0])
    assert _same(into, 49) and left[-1] >= left[9] - (64 << 20)  # the trainer's cache varies


def test_a_lease_keeps_its_version(trainer: Trainer) -> None:
    trainer.publish(60)
    source = DeviceSource(EndpointSource(trainer.url))
    opened = source.open(60, Deadline(SECONDS))
    assert source.used
    for step in range(61, 66):
        trainer.publish(step)
        assert tr.pull(trainer.url, into=_state(1), timeout=SECONDS).step == step
    whole = bytearray(opened.record.volumes[0].nbytes)
    opened.files.reader(opened.record.volumes[0].name).read_into(0, memoryview(whole))
    assert bytes(_bytes(_state(60)["w"]).flatten().tolist()) in bytes(whole)
    opened.close()
    source.end()


def test_a_publisher_that_dies_leaves_the_worker_as_it_was() -> None:
    torch.zeros(1, device="cuda")
    with _trainer() as trainer:
        trainer.publish(1)
        into = _state(5)
        source = DeviceSource(EndpointSource(trainer.url))
        opened = source.open(1, Deadline(SECONDS))
        device, address = opened.files.device_memory(opened.record.volumes[0].name)  # type: ignore[union-attr]
        nbytes = opened.record.volumes[0].nbytes
        before = _lent_bytes(address, nbytes, device)
        assert trainer.process.pid is not None
        os.kill(trainer.process.pid, signal.SIGKILL)
        trainer.process.join(SECONDS)
        with pytest.raises(PeerLostError, match="publisher at"):
            until = Deadline(30)
            while not until.passed:
                opened.files.check_lent()  # type: ignore[union-attr]
                time.sleep(0.01)
        # A copy that had begun would have read the same bits: what is open here stays valid.
        assert torch.equal(before, _lent_bytes(address, nbytes, device))
        opened.close()
        source.end()
        with pytest.raises(RelayError):
            tr.pull(trainer.url, into=into, timeout=10)
        assert _same(into, 5)


def _lent_bytes(address: int, nbytes: int, device: int) -> torch.Tensor:
    return device_bytes(address, nbytes, device).cpu()


class _Files(StepFiles):
    """A step of one file in memory of this process."""

    on_gpus = True

    def __init__(self, block: DeviceBlock) -> None:
        self._block = block

    def device_memory(self, name: str) -> tuple[int, int]:
        return self._block.device, self._block.address


def test_changes_that_the_gpu_found_reach_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subscriber that reads over HTTP receives changed elements, which the server has not looked
    for itself."""
    found: list[object] = []
    real = DeviceSlots.changes

    def spied(*args: Any) -> Any:
        found.append(real(*args))
        return found[-1]

    monkeypatch.setattr(DeviceSlots, "changes", spied)
    draw = torch.Generator("cuda").manual_seed(5)
    state = {
        "w": torch.randn(1000, 1003, device="cuda").bfloat16(),
        "x": torch.randn(500, 500, device="cuda"),
    }
    into = {key: torch.zeros_like(one, device="cpu") for key, one in state.items()}
    with tr.serve(state, step=0, timeout=SECONDS) as endpoint:
        following = tr.subscribe(endpoint.url, into=into, same_host=False, timeout=SECONDS)
        following.update()
        for step in range(1, 6):
            for one in state.values():
                flat = one.view(-1)
                index = torch.randperm(flat.numel(), device="cuda", generator=draw)
                flat[index[: flat.numel() // 50]] += 1
            sent = endpoint.status()["sent_bytes"]
            before = {key: one.clone() for key, one in into.items()}
            endpoint.publish(state, step=step, stage_on="device").result(SECONDS)
            got = following.update(at_least=step)
            assert got.step == step and got.report.route == "parts"
            assert all(torch.equal(into[key], state[key].cpu()) for key in state)
            differ = sum(int((into[key] != before[key]).sum()) for key in state)
            status = endpoint.status()
            assert status["changes"]["steps"][-1]["changed"] == differ
            assert status["sent_bytes"] - sent < 0.1 * sum(one.nbytes for one in state.values())
        following.close()
    assert len(found) == 6 and found[0] is None and None not in found[1:]


def test_a_version_is_cast_on_the_gpu() -> None:
    masters = {"w": torch.randn(300, 70, device="cuda"), "n": torch.arange(5, device="cuda")}
    encoding = Encoding(dtype=torch.bfloat16)
    with tr.serve(masters, step=0, timeout=SECONDS, encoding=encoding) as endpoint:
        for step in (1, 2, 3):
            masters["w"] += 1
            endpoint.publish(masters, step=step, stage_on="device")
            got = tr.pull(
                endpoint.url, timeout=SECONDS, options=tr.options.PullOptions(device="cuda")
            )
            assert got.step == step
            assert torch.equal(got.state["w"], masters["w"].to(torch.bfloat16))
            assert torch.equal(got.state["n"], masters["n"])


def test_boxes_of_all_kinds_stay_on_the_gpu() -> None:
    """Rows, columns, other dtypes and strides: what a worker of another mesh takes."""
    block = DeviceBlock(1 << 20, 0)
    whole = torch.randn(64, 48, device="cuda")
    start = 1000
    block.view(start, whole.nbytes).copy_(whole.view(torch.uint8).flatten())
    torch.cuda.synchronize()
    shard = Shard((0, 0), (64, 48), 0, start)
    moved: list[int] = []

    def taken(offsets: tuple[int, int], to: torch.Tensor) -> torch.Tensor:
        read = BoxRead("float32", shard, offsets, tuple(to.shape), to)
        _copies(block, [read], moved.append).land()
        return to

    empty: Callable[..., torch.Tensor] = lambda *s, **k: torch.zeros(*s, device="cuda", **k)  # noqa: E731
    assert torch.equal(taken((8, 0), empty(4, 48)), whole[8:12])
    assert torch.equal(taken((0, 24), empty(64, 24)), whole[:, 24:])
    assert torch.equal(taken((3, 5), empty(20, 9).t().contiguous().t()), whole[3:23, 5:14])
    assert torch.equal(taken((1, 1), empty(2, 3, dtype=torch.bfloat16)), whole[1:3, 1:4].bfloat16())
    big = empty(64, 96)
    taken((0, 0), big[:, 48:])
    assert torch.equal(big[:, 48:], whole) and not big[:, :48].any()
    assert sum(moved) == 4 * (4 * 48 + 64 * 24 + 20 * 9 + 64 * 48) + 2 * 6
    block.close()


def _copies(block: DeviceBlock, reads: list[BoxRead], progress: Any) -> DeviceCopies:
    class Record:
        volumes = [type("File", (), {"name": "a"})()]  # noqa: RUF012

    return DeviceCopies(_Files(block), Record(), reads, progress)  # type: ignore[arg-type]
