"""Pages for people and what they show, beside what programs read.

A page is a line of `PAGES`: a path, and what answers a GET of it. The request has been let in like
any other. It may read from the service: `snapshots` has the tensors of each step, and by
`ServedStep.view` the bytes of volumes that are in this process; `status` says what goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from torchrelay.endpoint.server.service import Service

Page = Callable[[Service, web.BaseRequest], Awaitable[web.StreamResponse]]

PAGES: dict[str, Page] = {}
