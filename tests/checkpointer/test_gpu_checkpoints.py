"""Checkpoints of states on a GPU: exact, damage found wherever it comes from, nothing between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from torchrelay.shares import share as shares
from torchrelay.stores.reading import chunks, device_fetch
from torchrelay.stores.reading.device_fetch import DeviceFetch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: these run where there is one"
)

State = dict[str, Any]


def made(seed: int) -> State:
    """Tensors of all kinds: large, tiny, of odd lengths, strided, on the host."""
    draw = torch.Generator().manual_seed(seed)

    def bits(*shape: int, dtype: torch.dtype = torch.int16) -> torch.Tensor:
        return torch.randint(-100, 100, shape, generator=draw).to(dtype)

    return {
        "model": {
            "large": bits(3_000_001).cuda(),
            "odd": [bits(size, dtype=torch.uint8).cuda() for size in (1, 3, 17, 4099, 70_001)],
            "tiny": [bits(5, dtype=torch.float32).cuda() for _ in range(300)],
            "strided": bits(60, 50, dtype=torch.float32).cuda().t(),
            "rows": bits(80, 30).cuda()[::2],
            "scalar": bits(1, dtype=torch.float64).cuda()[0],
        },
        "host": [bits(1000), bits(7, dtype=torch.bfloat16)],
        "step": seed,
    }


def leaves(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from leaves(value)
    elif isinstance(state, list):
        for value in state:
            yield from leaves(value)


def same(one: Any, other: Any) -> bool:
    pairs = list(zip(leaves(one), leaves(other), strict=True))
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs) and one["step"] == other["step"]


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tr.Checkpointer]:
    with tr.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, made(1))
        yield checkpointer


@pytest.mark.parametrize("options", [{}, {"atomic": False}, {"verify": False}])
def test_a_load_into_gpu_tensors_is_exact(saved: tr.Checkpointer, options: Any) -> None:
    into = made(2)
    got = saved.load(into=into, **options)
    assert same(into, made(1)) and not got.report.instead


def test_a_load_to_new_gpu_tensors_is_exact(saved: tr.Checkpointer) -> None:
    got = saved.load(device="cuda")
    assert same(got.state, made(1)) and not got.report.instead
    assert all(leaf.is_cuda for leaf in leaves(got.state["model"]))


def test_digests_that_a_gpu_made_are_the_librarys(saved: tr.Checkpointer) -> None:
    """A load to the host hashes every chunk there."""
    assert same(saved.load(device="cpu").state, made(1))


@pytest.mark.parametrize("stage", ["auto", "device", "host"])
def test_an_asynchronous_save_keeps_what_was_there_when_it_was_called(
    tmp_path: Path, stage: Any
) -> None:
    with tr.Checkpointer(
        tmp_path / "run", options=tr.options.CheckpointerOptions(stage_on=stage)
    ) as checkpointer:
        for step in (1, 2):
            state = made(step)
            pending = checkpointer.save_async(step, state)
            for leaf in leaves(state):
                leaf.zero_()
            pending.result()
            assert same(checkpointer.load(into=state).state, made(step))
            assert same(checkpointer.load(device="cpu").state, made(step))


def flip(view: torch.Tensor, at: int) -> None:
    view[at] ^= 4


def damaged_file(checkpointer: tr.Checkpointer, root: Path) -> str:
    (file,) = root.glob("run/step-1/model.safetensors")
    data = bytearray(file.read_bytes())
    data[5_000_000] ^= 1
    file.write_bytes(data)
    return "large"


@contextmanager
def wrapped(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[..., None]) -> Iterator[None]:
    """Within: `act` is called with the arguments of a method of `DeviceFetch`, around it."""
    original = getattr(DeviceFetch, name)

    def method(self: DeviceFetch, *args: Any) -> Any:
        return act(lambda: original(self, *args), *args)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceFetch, name, method)
        yield


def refused(checkpointer: tr.Checkpointer, name: str) -> None:
    """A load that finds damage: named by tensor and offset, and nothing is landed."""
    into = made(2)
    with pytest.raises(tr.errors.DamagedError) as caught:
        checkpointer.load(into=into, step=1)
    assert name in str(caught.value.path) and caught.value.offset is not None
    assert same(into, made(2))


def test_a_flipped_byte_on_the_file(saved: tr.Checkpointer, tmp_path: Path) -> None:
    refused(saved, damaged_file(saved, tmp_path))


def test_a_flipped_byte_in_a_pinned_buffer(
    saved: tr.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Flipping:
        """A reader of a file that changes a byte after it was read."""

        def __init__(self, reader: Any) -> None:
            self.reader, self.cold = reader, reader.cold

        def read_into(self, start: int, view: memoryview) -> None:
            self.reader.read_into(start, view)
            if start <= 5_000_000 < start + len(view):
                view[5_000_000 - start] ^= 16

    def opened(*args: Any, **options: Any) -> Flipping:
        return Flipping(chunks.opened(*args, **options))

    with monkeypatch.context() as patch:
        patch.setattr(device_fetch, "opened", opened)
        refused(saved, "large")
    assert same(saved.load(into=made(2)).state, made(1))


def test_a_flipped_byte_in_device_memory(
    saved: tr.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(compare: Callable[[], None], groups: Any, slab: torch.Tensor) -> None:
        flip(slab, 4_000_000)
        compare()

    with wrapped(monkeypatch, "_compare", act):
        refused(saved, "large")


def test_a_flipped_byte_on_the_way_to_the_host_is_found_by_the_next_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is of what the GPU had: what is staged, and then written, is another."""
    original = shares.stage

    def stage(copies: Any, arena: torch.Tensor, *, threads: int) -> None:
        original(copies, arena, threads=threads)
        copy = next(copy for copy in copies if copy.start <= 5_000_000 < copy.stop)
        flip(arena, copy.at + 5_000_000 - copy.start)

    with tr.Checkpointer(tmp_path / "run") as checkpointer:
        monkeypatch.setattr(shares, "stage", stage)
        checkpointer.save(1, made(1))
        refused(checkpointer, "large")


@pytest.mark.parametrize("options", [{}, {"atomic": False}])
def test_no_room_on_the_gpu_is_told_and_the_load_goes_by_the_host(
    saved: tr.Checkpointer, monkeypatch: pytest.MonkeyPatch, options: Any
) -> None:
    monkeypatch.setattr(device_fetch, "room_on", lambda device: 1000)
    into = made(2)
    got = saved.load(into=into, **options)
    assert same(into, made(1))
    assert "room for" in got.report.instead["device memory"]


def test_a_slab_smaller_than_the_state_is_gone_through_in_rounds(
    saved: tr.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_fetch, "GROUP_BYTES", 1 << 20)
    monkeypatch.setattr(device_fetch, "ROUND_BYTES", 2 << 20)
    into = made(2)
    got = saved.load(into=into, atomic=False)
    assert same(into, made(1)) and not got.report.instead


def test_auto_takes_the_host_where_the_copy_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchrelay.memory.gpu import spare

    monkeypatch.setattr(spare, "room_beside_training", lambda device: 1000)
    with tr.Checkpointer(tmp_path / "run") as checkpointer:
        state = made(1)
        before = torch.cuda.memory_allocated()
        checkpointer.save_async(1, state).result()
        assert torch.cuda.memory_allocated() - before < 1 << 20
        assert same(checkpointer.load(device="cpu").state, made(1))
