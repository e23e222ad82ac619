"""A state is freed when its owner drops it, with the cyclic garbage collector off.

Arrays of numpy stand behind the tensors that are sent: they live exactly as long as the memory is
in use by anybody.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.support.faults import CHUNK
from tests.support.ways import WAYS, by, refused_soon
from torchrelay.dropin import PGTransport
from torchrelay.progress import Progress

LONG = 25.0
SHORT = 0.3
SOON = 10.0  # seconds in which threads that were beside a call are over
TENSORS = 6


class Watched:
    """References to memory that should be gone."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[Any]] = []

    def state(self) -> dict[str, Any]:
        arrays = [np.full((300, 300), number, dtype=np.float32) for number in range(TENSORS)]
        self._seen += map(weakref.ref, arrays)
        made = {f"w{number}": torch.from_numpy(array) for number, array in enumerate(arrays)}
        made["t"] = made["w0"].t()  # not contiguous
        self.watch(made)
        return made

    def watch(self, state: dict[str, Any]) -> None:
        for value in state.values():
            self._seen += [weakref.ref(value), weakref.ref(value.untyped_storage())]

    def alive(self) -> int:
        """How many live on, once nothing is under way any more."""
        end = time.monotonic() + SOON
        while (count := self._count()) and time.monotonic() < end:
            time.sleep(0.01)
        self._seen.clear()
        return count

    def _count(self) -> int:
        return sum(ref() is not None for ref in self._seen)


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def failing(call: Callable[[], Any]) -> str:
    try:
        call()
    except (tr.errors.RelayError, KeyboardInterrupt) as fault:
        return type(fault).__name__
    return "no error"


def interrupt(done: Progress) -> None:
    raise KeyboardInterrupt


def lives(rank: int, group: Any) -> dict[str, tuple[int, str]]:
    """For each scene what lives on after it, and how it ended."""
    relay = tr.Relay(group, chunk_bytes=CHUNK, timeout=LONG, pool=0)
    watched, found = Watched(), {}

    def scene(name: str, send: Callable[[Any], Any], recv: Callable[[], Any]) -> None:
        """`recv` returns the state that was received, if any."""
        result = failing(lambda: send(watched.state())) if rank == 0 else failing(recv)
        # A failed call's own exception must not keep anything either: it is gone by now.
        found[name] = watched.alive(), result
        dist.barrier(group)

    def new() -> None:
        got = relay.recv(0).state
        watched.watch(got)

    def in_place(**options: Any) -> None:
        relay.recv(0, into=watched.state(), **options)

    with without_collector(), refused_soon():
        for number in range(3):
            scene(f"new {number}", lambda state: relay.send(state, 1), new)
        scene("in place", lambda state: relay.send(state, 1), in_place)
        scene("not atomic", lambda state: relay.send(state, 1), lambda: in_place(atomic=False))
        scene("progress", lambda state: relay.send(state, 1, progress=print_nothing), new)
        scene(
            "refused",
            lambda state: relay.send(state, 1),
            lambda: relay.recv(0, into={**watched.state(), "more": torch.ones(2)}),
        )
        scene("another step", lambda state: relay.send(state, 1, step=1), lambda: in_place(step=2))
        scene("sender stops", lambda state: relay.send(state, 1, progress=interrupt), in_place)
        scene(
            "receiver stops",
            lambda state: relay.send(state, 1),
            lambda: in_place(progress=interrupt),
        )
        scene(
            "unsupported",
            lambda state: relay.send({**state, "f": interrupt}, 1),
            in_place,
        )
        scene("nobody", lambda state: relay.send(state, 1, timeout=SHORT), lambda: None)
        scene("nobody either", lambda state: None, lambda: in_place(timeout=SHORT))
        scene("new again", lambda state: relay.send(state, 1), new)
    return found


def print_nothing(done: Progress) -> None:
    pass


@pytest.mark.parametrize("way", WAYS)
def test_a_state_is_freed_when_its_owner_drops_it(pool2: Any, way: str) -> None:
    results = pool2.run(by, way, lives, timeout=120, fresh_group=True)
    alive = [{name: count for name, (count, _) in found.items() if count} for found in results]
    assert alive == [{}, {}], alive
    ends = [{name: end for name, (_, end) in found.items()} for found in results]
    for name in ("new 0", "in place", "not atomic", "progress", "new again"):
        assert [end[name] for end in ends] == ["no error"] * 2, ends
    assert ends[0]["refused"] == "PeerRefusedError" and ends[1]["refused"] == "MismatchError", ends
    assert ends[0]["unsupported"] == "UnsupportedLeafError", ends


def several(rank: int, group: Any) -> list[int]:
    relay, watched, found = tr.Relay(group, chunk_bytes=CHUNK, timeout=LONG, pool=0), Watched(), []
    with without_collector():
        for route in ("tcp", "memory", None):
            if rank == 0:
                relay.send(watched.state(), [1, 2, 3], route=route)
            else:
                watched.watch(relay.recv(0, route=route).state)
            found.append(watched.alive())
            dist.barrier(group)
    return found


def test_a_state_that_went_to_several_is_freed(pool4: Any) -> None:
    assert pool4.run(several, timeout=90, fresh_group=True) == [[0, 0, 0]] * 4


def dropped(rank: int, group: Any, protocol: Any) -> int:
    watched = Watched()
    with without_collector():
        transport = PGTransport(
            group, timedelta(seconds=LONG), torch.device("cpu"), protocol=protocol
        )
        for _ in range(3):
            if rank == 0:
                transport.send_checkpoint([1], watched.state())
            else:
                got: Any = transport.recv_checkpoint(0)
                watched.watch(got)
                del got
        return watched.alive()


@pytest.mark.parametrize("protocol", ["relay", "torch"])
def test_a_state_that_went_by_the_dropin_is_freed(pool2: Any, protocol: str) -> None:
    assert pool2.run(dropped, protocol, timeout=60, fresh_group=True) == [0, 0]
