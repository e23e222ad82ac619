"""The list of routes, and which of them a receiver takes.

The first that works is taken; why those before it were not goes into the report.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from torchrelay.errors import RouteError, UsageError
from torchrelay.transports.routes.seam import Incoming, Mover, Outgoing, Route, Server, Unavailable

# The files of routes, from fast to slow. The last one always works.
FILES = (
    "cuda_ipc",
    "host",
    "connections",
    "nixl",
    "messages",
)
ROUTES: tuple[Route, ...] = tuple(import_module(f"{__package__}.{name}").ROUTE for name in FILES)
BY_NAME = {route.name: route for route in ROUTES}
GROUP = ROUTES[-1]


class Choice(NamedTuple):
    route: Route
    mover: Mover
    instead: dict[str, str]  # faster routes: why each was not taken


def check_route(route: str | None) -> str | None:
    asked = list(dict.fromkeys(one.asked_as for one in ROUTES))
    if route is not None and route not in asked:
        raise UsageError(f"route is one of {', '.join(asked)} or None, not {route!r}")
    return route


def compares(route: str, verify: bool | None) -> bool:
    """Whether what comes by a route, as callers call it, is compared with what was sent."""
    return all(one.compares(verify) for one in ROUTES if one.asked_as == route)


def servers(outgoing: Outgoing) -> dict[str, Server]:
    """The sender's ends of the routes that it offers, by name."""
    return {
        route.name: route.server(outgoing)
        for route in ROUTES
        if _open(route, outgoing.options.route)
    }


def _open(route: Route, only: str | None) -> bool:
    """Whether a route may be taken where one is asked for, or none is."""
    return route.asked_as == only if only is not None else not route.by_request


def choose(incoming: Incoming, wanted: str | None) -> Choice:
    """The fastest route that works. `RouteError` where the only one that either side takes does
    not."""
    offered = incoming.offer.route
    if wanted and offered and wanted != offered:
        raise RouteError(f"the sender takes route {offered!r} alone, this side {wanted!r}")
    only = wanted or offered
    if only is not None and only not in {route.asked_as for route in ROUTES}:
        raise RouteError(f"the sender takes route {only!r} alone, which is not known here")
    instead: dict[str, str] = {}
    for route in ROUTES:
        if not _open(route, only):
            if not route.by_request and route.name == route.asked_as:
                instead[route.name] = "not asked for"
            continue
        found = route.accept(incoming.offer.routes.get(route.name), incoming)
        if not isinstance(found, Unavailable):
            return Choice(route, found, instead)
        if found.because:
            instead[route.name] = found.because
    raise RouteError(f"route {only!r} was asked for, but: {instead.get(only or '', '')}")
