"""Which way the bytes take. Decided by the receiver, who is the one that reads.

From fast to slow: `cuda_ipc` (the sender's GPU memory, opened here), `host` (the sender's host
memory, read by this process), `group` (messages over the process group). The first that works is
taken; what is said about the others goes into the report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torchrelay.errors import RouteError, UsageError
from torchrelay.transports.protocol import wire
from torchrelay.transports.routes import place

ROUTES = ("cuda_ipc", "host", "group")


@dataclass(frozen=True)
class Choice:
    route: str
    reads: bool = False  # this process can read the sender's host memory where it lies
    why_ring: str = ""  # why it cannot, where it cannot
    instead: dict[str, str] = field(default_factory=dict)


def check_route(route: str | None) -> str | None:
    if route is not None and route not in ROUTES:
        raise UsageError(f"route is one of {', '.join(ROUTES)} or None, not {route!r}")
    return route


def compares(route: str, verify: bool | None) -> bool:
    """Whether what comes by a route is compared with what was sent: what crosses a wire or lies in
    opened memory is, unless it is not wanted; what the kernel copies is if it is wanted."""
    return verify is True if route == "host" else verify is not False


def choose(
    offer: wire.Offer,
    mine: wire.Place,
    claim: bytes,
    wanted: str | None,
    try_cuda_ipc: Callable[[], str],
) -> Choice:
    """The fastest route that works. `try_cuda_ipc` says why that one does not, empty if it does;
    `claim` is what the sender's process shows.

    `RouteError` where the only one that either side takes does not work.
    """
    if wanted and offer.route and wanted != offer.route:
        raise RouteError(f"the sender takes route {offer.route!r} alone, this side {wanted!r}")
    only = wanted or offer.route
    if only == "group":
        return Choice("group", instead=dict.fromkeys(ROUTES[:-1], "not asked for"))
    instead: dict[str, str] = {}
    reads, why_ring, no_host = False, "", _no_memory(offer, mine)
    if not no_host:
        assert offer.memory is not None
        sender = place.Process(offer.memory.place.pid, offer.memory.fd, offer.memory.beacon)
        no_host = place.cannot_open(sender, claim)
        why_ring = "" if no_host else place.cannot_read(sender, claim)
        reads = not why_ring
    for name in ROUTES[:-1]:
        if only not in (None, name):
            instead[name] = "not asked for"
            continue
        why = no_host or (try_cuda_ipc() if name == "cuda_ipc" else "")
        if not why:
            return Choice(name, reads, why_ring, instead)
        elif only == name:
            raise RouteError(f"route {name!r} was asked for, but: {why}")
        else:
            instead[name] = why
    if only is not None:
        raise RouteError(f"the sender takes route {only!r} alone, which is not known here")
    return Choice("group", instead=instead)


def _no_memory(offer: wire.Offer, mine: wire.Place) -> str:
    if offer.memory is None:
        return "the sender does not say where its memory is"
    return place.apart(mine, offer.memory.place)
