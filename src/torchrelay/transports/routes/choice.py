"""The list of routes, and which of them a receiver takes.

The first that works is taken. Why those before it were not goes into the report.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from torchrelay.errors import RouteError, UsageError
from torchrelay.transports.routes.route import (
    Incoming,
    Receiver,
    Route,
    RouteFetch,
    RouteService,
    Unavailable,
)

# The files of routes, from fast to slow. The last one works between any two processes.
FILES = ("cuda_ipc", "memory", "group", "tcp")
ROUTES: tuple[Route, ...] = tuple([import_module(f"{__package__}.{name}").ROUTE for name in FILES])
BY_NAME = {route.name: route for route in ROUTES}
ALWAYS = ROUTES[-1]
_NOT_OFFERED = "the sender does not offer it"


class Choice(NamedTuple):
    route: Route
    fetch: RouteFetch
    instead: dict[str, str]  # faster routes: why each was not taken


def check_route(route: str | None) -> str | None:
    if route is not None and route not in BY_NAME:
        raise UsageError(f"route is one of {', '.join(BY_NAME)} or None, not {route!r}")
    return route


def services(receiver: Receiver, only: str | None) -> dict[str, RouteService]:
    """The sender's ends of the routes that it offers to a receiver, by name."""
    return {route.name: route.service(receiver) for route in ROUTES if only in (None, route.name)}


def choose(incoming: Incoming, wanted: str | None) -> Choice:
    """The fastest route that works. `RouteError` if one side takes one route alone, and it does
    not work."""
    offered = incoming.offer.route
    if wanted and offered and wanted != offered:
        raise RouteError(f"the sender takes route {offered!r} alone, this side {wanted!r}")
    only = wanted or offered
    if only is not None and only not in BY_NAME:
        raise RouteError(f"the sender takes route {only!r} alone, which is not known here")
    instead: dict[str, str] = {}
    for route in ROUTES:
        if only not in (None, route.name):
            instead[route.name] = "not asked for"
            continue
        facts = incoming.offer.routes.get(route.name)
        found: RouteFetch | Unavailable
        if facts is None:
            found = Unavailable(incoming.offer.unavailable.get(route.name, _NOT_OFFERED))
        else:
            found = route.fetch(facts, incoming)
        if not isinstance(found, Unavailable):
            return Choice(route, found, instead)
        if found.because:
            instead[route.name] = found.because
    raise RouteError(f"route {only!r} was asked for, but: {instead.get(only or '', 'none works')}")
