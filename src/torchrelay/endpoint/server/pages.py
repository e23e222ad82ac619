"""Pages for people and what they show, beside what programs read.

A page is a line of `PAGES`: a path, and what answers a GET of it. It has been let in like any other
request, and may read from the app: `app.snapshots` (tensors by name, and the bytes of volumes that
are in this process, by `ServedStep.view`), `app.ledger`, `app.status()`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from torchrelay.endpoint.server.app import App

Page = Callable[["App", web.BaseRequest], Awaitable[web.StreamResponse]]

PAGES: dict[str, Page] = {}
