"""The step server: snapshots, complete or partial, that others read by HTTP or map on this host.

It runs next to a trainer (`serve`), in a process that outlives the worker (`Keeper`), and in a
puller that passes on what it has (a seed). They differ in who tells it what to show.
"""

from __future__ import annotations

import threading

from torchrelay.endpoint.server.app import App
from torchrelay.endpoint.server.http.accepting import Acceptor, listen_at
from torchrelay.endpoint.server.http.connections import HttpServer
from torchrelay.endpoint.server.local_memory import LocalMemory
from torchrelay.endpoint.server.messages import Listen
from torchrelay.endpoint.server.service import Service
from torchrelay.sources.access import Access
from torchrelay.sources.http_head import ServerUrl

_SWEEP_SECONDS = 1.0


class StepServer:
    """Listens until `close`. `lends`: whether processes of this host may map its memory."""

    def __init__(self, listen: Listen, *, lends: bool = True) -> None:
        # Ranks with one self-signed certificate read from each other without a `cafile`.
        cafile = listen.cafile or listen.certfile
        access = Access(listen.token, None, cafile, listen.certfile, listen.keyfile)
        self.service = Service(access=access, stall=listen.stall)
        listener = listen_at(listen.host, listen.port)
        self.port: int = listener.getsockname()[1]
        self.service.url = ServerUrl(access.scheme, listen.host, self.port).url
        app = App(self.service)
        self._http = self.service.http = HttpServer(
            app.answer,
            connections=listen.connections,
            stall=listen.stall,
            context=access.server_context(),
            body_limit=app.body_limit,
        )
        self._memory = LocalMemory(self.service) if lends else None
        self.service.socket = "" if self._memory is None else self._memory.name
        self._closed = threading.Event()
        threading.Thread(target=self._sweep, name="torchrelay-sweep", daemon=True).start()
        self._acceptor = Acceptor(listener, self._http.serve)

    def _sweep(self) -> None:
        while not self._closed.wait(_SWEEP_SECONDS):
            with self.service.lock:
                self.service.transfers.sweep()

    def close(self) -> None:
        """Stop listening and cut all connections."""
        self._closed.set()
        self._acceptor.close()
        if self._memory is not None:
            self._memory.close()
        self._http.close()
