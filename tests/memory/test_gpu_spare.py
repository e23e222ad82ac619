"""A spare copy on GPUs is waited for on every device that has some of it.

Two GPUs are not at hand: host memory stands for that of devices, and notes stand for their streams.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch

from torchrelay.memory.gpu import spare
from torchrelay.memory.gpu.spare import DeviceCopy


class OnDevice(NamedTuple):
    """A tensor of a GPU, whose bits lie in host memory."""

    bits: torch.Tensor
    device: torch.device
    is_cuda: bool = True

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes


class Driver:
    """Notes in what order copies, events and waits come."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    def current_stream(self, device: torch.device) -> Any:
        class Event:
            def synchronize(event) -> None:
                self.done.append(("wait", str(device)))

        class Stream:
            def record_event(stream) -> Event:
                self.done.append(("record", str(device)))
                return Event()

        return Stream()


def test_every_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, empty, copy_all = Driver(), torch.empty, spare.copy_all

    def copied(spares: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        driver.done.append(("copy", str(len(sources))))
        copy_all(spares, sources)

    def on_host(*size: int, device: torch.device, **how: Any) -> torch.Tensor:
        return empty(*size, **how)

    monkeypatch.setattr(spare, "raw_of", lambda tensor: tensor.bits)
    monkeypatch.setattr(spare, "copy_all", copied)
    monkeypatch.setattr(torch, "empty", on_host)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", driver.current_stream)
    one, other = torch.device("cuda:0"), torch.device("cuda:1")
    bits = [torch.arange(n, n + 5, dtype=torch.int32) for n in range(3)]
    tensors: Any = [OnDevice(bits[0], other), OnDevice(bits[1], one), OnDevice(bits[2], other)]
    taken = DeviceCopy()
    copies = taken.take(tensors)
    assert all(map(torch.equal, copies, bits))
    assert driver.done == [
        *[("copy", "2"), ("record", "cuda:1")],
        *[("copy", "1"), ("record", "cuda:0")],
    ]
    driver.done.clear()
    taken.wait()
    assert driver.done == [("wait", "cuda:1"), ("wait", "cuda:0")]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_the_stream_that_is_current_is_waited_for() -> None:
    stream, tensor = torch.cuda.Stream(), torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    taken = DeviceCopy()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1 << 28)
        tensor.fill_(3)
        (copy,) = taken.take([tensor])
    taken.wait()
    assert stream.query()
    assert bool((copy.view(torch.float32) == 3).all())
