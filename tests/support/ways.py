"""The paths that bytes take between ranks of one machine, each forced in turn.

`tcp`: chunks over data connections. `memory`: the receiver reads the sender's memory. `ring`: that
is forbidden, and everything goes through shared buffers. `nixl`: the receiver reads through NIXL,
if that is installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest

import torchrelay as tr
from torchrelay.memory import vectors
from torchrelay.transports.meeting import matching
from torchrelay.transports.routes import memory, tcp
from torchrelay.transports.routes.host import place

WAYS = ("tcp", "memory", "ring")
VERIFIED = ("tcp", "nixl")
"""Ways on which digests are compared unless they are not wanted."""
HAS_NIXL = any(map(find_spec, ("nixl", "nixl_cu12", "nixl_cu13")))
WAYS_HERE = (*WAYS, "nixl") if HAS_NIXL else WAYS
_nixl = pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed: pip install nixl-cu12")
every_route = pytest.mark.parametrize("way", [*WAYS, pytest.param("nixl", marks=_nixl)])
every_way = pytest.mark.parametrize(
    "way", [*WAYS, pytest.param("nixl", marks=[_nixl, pytest.mark.slow])]
)
"""As `every_route`; an agent of NIXL takes a while to start, so some tests leave it for later."""

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
            patch.setattr(place, "cannot_read", refused)
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
    true = place.here()
    return patched(place, here=lambda: msgspec.structs.replace(true, **lies))


def by(rank: int, group: Any, way: str, fn: Callable[..., Any], *args: Any) -> Any:
    """A function of a rank, run with its relays on this way: `pool.run(by, way, fn, *args)`."""
    with taking(way):
        return fn(rank, group, *args)
