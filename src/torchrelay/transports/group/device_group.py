"""A process group whose backend moves device memory alone (nccl, xccl), in the usual shape.

Such a backend knows no tags, and a posted receive holds up everything behind it on its stream. So
control messages go through the group's store, and data alone through the backend, from device to
device. Because tags do not count, one transfer at a time may use a pair of ranks: the sender sees
to that before it says go.

Not run between real GPUs so far: the tests drive it with a stand-in for the backend.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from datetime import timedelta

import torch

from torchrelay.transports.group.c10d import FOREVER, ProcessGroup, Work
from torchrelay.transports.group.store_values import KeyValueStore, await_keys, put, take
from torchrelay.transports.protocol.wire import LANES, PRELUDE_TAG


class Mail:
    """Messages through a store, in order for each sender, receiver and tag."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._next: defaultdict[tuple[int, int, int, str], int] = defaultdict(int)

    def _key(self, source: int, target: int, tag: int, end: str) -> str:
        with self._lock:
            count = self._next[source, target, tag, end]
            self._next[source, target, tag, end] += 1
        return f"torchrelay/{source}/{target}/{tag}/{count}"

    def send(self, data: torch.Tensor, source: int, target: int, tag: int) -> Work:
        put(self._store, self._key(source, target, tag, "out"), data.numpy().tobytes())
        return _Done()

    def recv(self, into: torch.Tensor, source: int, target: int, tag: int) -> Work:
        return _Awaited(self._store, self._key(source, target, tag, "in"), into)


class _Done:
    def wait(self, timeout: timedelta = FOREVER) -> bool:
        return True


class _Awaited:
    """A message that is looked for until it is there."""

    def __init__(self, store: KeyValueStore, key: str, into: torch.Tensor) -> None:
        self._store, self._key, self._into = store, key, into

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        if not await_keys(self._store, [self._key], timeout.total_seconds()):
            raise RuntimeError(f"nothing at {self._key} within {timeout}")
        data = take(self._store, self._key)
        flat = self._into.view(torch.uint8).view(-1)
        if len(data) != flat.numel():
            raise RuntimeError(f"{len(data)} bytes at {self._key}, {flat.numel()} were awaited")
        flat.copy_(torch.frombuffer(data, dtype=torch.uint8))
        return True


class DeviceGroup:
    """`ProcessGroup` on a device-only backend: control by mail, data through the backend."""

    def __init__(self, group: ProcessGroup, mail: Mail) -> None:
        self._group, self._mail = group, mail

    def rank(self) -> int:
        return self._group.rank()

    def size(self) -> int:
        return self._group.size()

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work:
        if _is_control(tag):
            return self._mail.send(tensors[0], self.rank(), dst, tag)
        return self._group.send(tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work:
        if _is_control(tag):
            return self._mail.recv(tensors[0], src, self.rank(), tag)
        return self._group.recv(tensors, src, tag)


def _is_control(tag: int) -> bool:
    return tag == PRELUDE_TAG or tag % LANES == 0
