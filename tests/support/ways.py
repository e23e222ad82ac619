"""The paths that bytes take between ranks of one machine, each forced in turn.

`tcp`: chunks over data connections. `memory`: the receiver reads the sender's memory. `ring`: that
is forbidden, and everything goes through shared buffers.
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
from torchrelay.transports.meeting import matching
from torchrelay.transports.routes import memory, tcp
from torchrelay.transports.routes.host import claims, location

WAYS = ("tcp", "memory", "ring")
VERIFIED = ("tcp",)
"""Ways on which digests are compared unless they are not wanted."""
every_way = pytest.mark.parametrize("way", WAYS)

PIECE = 64 << 10
"""Bytes of one read, so that a state of a megabyte takes several."""


def route_of(way: str) -> str:
    return "memory" if way == "ring" else way


def refused(process: object, claim: bytes) -> str:
    return "reading is refused by this test"


@contextlib.contextmanager
def taking(way: str) -> Iterator[None]:
    """Within: what relays of this process send and receive takes this way, and no other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tr.Relay.__init__.__kwdefaults__, "route", route_of(way))
        patch.setattr(memory, "batches", partial(vectors.batches, piece=PIECE))
        patch.setattr(tcp, "CONNECTION_BYTES", PIECE)
        if way == "ring":
            patch.setattr(claims, "cannot_read", refused)
        yield


@contextlib.contextmanager
def patched(owner: Any, **names: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setattr(owner, name, value)
        yield


def refused_soon() -> contextlib.AbstractContextManager[None]:
    """Within: a receiver that asks for a wrong step is refused soon, where no other send could come
    that has it."""
    return patched(matching, UNDECIDED_SECONDS=0.2)


def elsewhere(**lies: Any) -> contextlib.AbstractContextManager[None]:
    """Within: this process says that it is somewhere else."""
    true = location.here()
    return patched(location, here=lambda: msgspec.structs.replace(true, **lies))


def by(rank: int, group: Any, way: str, fn: Callable[..., Any], *args: Any) -> Any:
    """A function of a rank, run with its relays on this way: `pool.run(by, way, fn, *args)`."""
    with taking(way):
        return fn(rank, group, *args)
