"""The ways that bytes take between ranks of one machine, each forced in turn.

`group`: messages over the process group. `channel`: messages over connections of their own.
`host`: the receiver reads the sender's memory. `ring`: reading is refused, and all goes through
shared buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest

import torchrelay as tr
from torchrelay.memory import vectors
from torchrelay.transports.routes import connections, host, place
from torchrelay.transports.routes import read_tables as readings

WAYS = ("group", "channel", "host", "ring")
NEARBY = ("host", "ring")
BY_MESSAGES = ("group", "channel")
every_way = pytest.mark.parametrize("way", WAYS)

PIECE = 64 << 10
"""Bytes of one read, so that a state of a megabyte takes several."""


def route_of(way: str) -> str:
    return "host" if way in NEARBY else "group"


def refused(process: object, claim: bytes) -> str:
    return "reading is refused by this test"


@contextlib.contextmanager
def taking(way: str) -> Iterator[None]:
    """Within: what relays of this process send and receive takes this way, and no other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tr.Relay.__init__.__kwdefaults__, "route", route_of(way))
        for reader in (host, readings):
            patch.setattr(reader, "batches", partial(vectors.batches, piece=PIECE))
        if way == "ring":
            patch.setattr(place, "cannot_read", refused)
        if way == "channel":
            patch.setattr(connections, "WORTH_BYTES", 0)
        yield


@contextlib.contextmanager
def patched(owner: Any, **names: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setattr(owner, name, value)
        yield


def elsewhere(**lies: Any) -> contextlib.AbstractContextManager[None]:
    """Within: this process says that it is somewhere else."""
    true = place.here()
    return patched(place, here=lambda: msgspec.structs.replace(true, **lies))


def by(rank: int, group: Any, way: str, fn: Callable[..., Any], *args: Any) -> Any:
    """A function of a rank, run with its relays on this way: `pool.run(by, way, fn, *args)`."""
    with taking(way):
        return fn(rank, group, *args)
