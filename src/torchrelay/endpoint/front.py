"""`serve` and `Endpoint`: a live state at a URL."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any

from torchrelay.deadlines import Deadline, Timeout, seconds_of
from torchrelay.endpoint.process import ServerProcess
from torchrelay.endpoint.publishing import Published, Publisher
from torchrelay.endpoint.security import Address, check_certificate, check_listening, find_token
from torchrelay.endpoint.server import messages as m
from torchrelay.errors import RelayError, UsageError
from torchrelay.owner import Owner, enrol
from torchrelay.steps import check_step
from torchrelay.transports.group.assembly import Assembly
from torchrelay.version import __version__

HOLD_SECONDS = 60.0
STALL_SECONDS = 10.0
CONNECTIONS = 256


class Endpoint:
    """A live state that others read over HTTP (docs/http.md). Made by `serve`."""

    def __init__(
        self,
        *,
        address: str,
        token: str | None,
        token_file: str | os.PathLike[str] | None,
        certfile: str | None,
        keyfile: str | None,
        group: Any,
        timeout: Timeout,
        hold: float,
        stall: float,
        connections: int,
    ) -> None:
        self._all = Assembly.of(group, "endpoint")
        with self._all.joining():
            self._timeout = seconds_of(timeout)
            self._address = Address.parse(address)
            secret = find_token(token, token_file)
            check_listening(self._address, secret)
            check_certificate(certfile, keyfile)
            for name, value in (("hold", hold), ("stall", stall)):
                if not 0 < value < 1e6:
                    raise UsageError(f"{name} is a number of seconds, not {value!r}")
            if connections < 1:
                raise UsageError(f"connections is a positive number, not {connections!r}")
            self._owner = Owner("Endpoint")
            self._scheme = "http" if certfile is None else "https"
            # Ranks of one host cannot have one port: the first has it, the others take free ones.
            port = self._address.port if self._all.coordinates else 0
            self._server = ServerProcess(
                m.Listen(
                    self._address.host,
                    port,
                    secret,
                    certfile,
                    keyfile,
                    hold,
                    connections,
                    stall,
                    __version__,
                )
            )
            self._server.start(self._timeout)
        self._publisher = Publisher(self._all, self._server, self._own_url)
        self._closed = False
        self._calls = threading.RLock()
        enrol(self)

    def _own_url(self) -> str:
        return f"{self._scheme}://{self._address.shown}:{self._server.port}"

    @property
    def url(self) -> str:
        """Where to read all of it. Ranks of a group name the URL of the first."""
        return self._publisher.urls[0] if self._publisher.urls else self._own_url()

    def publish(self, state: object, *, step: int, timeout: Timeout | None = None) -> Published:
        """Stage a state and return; a process beside this one shows it to readers.

        The state may change as soon as this returns. Readers of the step before go on with it.
        Where some still read the one before that, the publish is skipped and `Published.skipped`
        says why. Ranks of a group call it together.
        """
        self._owner.check()
        check_step(step)
        with self._calls:
            if self._closed:
                raise UsageError("this endpoint is closed")
            deadline = Deadline(self._timeout if timeout is None else timeout)
            return self._publisher.publish(state, step, deadline)

    def status(self) -> dict[str, Any]:
        """What goes on, as `/status.json` has it."""
        self._owner.check()
        if self._closed:
            raise UsageError("this endpoint is closed")
        return self._server.status(self._timeout)

    def close(self) -> None:
        """Stop serving, and free the memory."""
        if not self._owner.here or self._closed:
            return
        self._closed = True
        self._publisher.settle(self._timeout)
        self._server.close()
        self._publisher.close()

    def _forsake(self) -> None:
        self._server.forsake()
        self._publisher.forsake()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    state: object,
    *,
    step: int,
    address: str = "127.0.0.1:0",
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    certfile: str | None = None,
    keyfile: str | None = None,
    group: Any = None,
    timeout: Timeout = 300.0,
    hold: float = HOLD_SECONDS,
    stall: float = STALL_SECONDS,
    connections: int = CONNECTIONS,
) -> Endpoint:
    """Serve a live state over HTTP, and return when its first step is staged.

    - `address`: HOST:PORT; port 0 is a free one. Off loopback it needs a token.
    - `token`, or `token_file`, or the environment's TORCHRELAY_TOKEN: what readers have to know.
      Without one, only processes of this user on this machine may read.
    - `certfile`, `keyfile`: serve by TLS.
    - `group`: ranks that serve one state together, each its part; by default all ranks, where
      torch.distributed is initialized. `False`: this process alone.
    - `timeout` bounds each call.
    - `hold`: how many seconds a step that is no longer the newest is kept for its readers.
    - `stall`: a reader that takes no bytes, or comes up with no request, for so many seconds is
      dropped.
    - `connections`: how many may be open at once.

    A context manager; `close` ends the server process and frees the memory.
    """
    endpoint = Endpoint(
        address=address,
        token=token,
        token_file=token_file,
        certfile=certfile,
        keyfile=keyfile,
        group=group,
        timeout=timeout,
        hold=hold,
        stall=stall,
        connections=connections,
    )
    try:
        endpoint.publish(state, step=step)
    except BaseException:
        with suppress(RelayError):
            endpoint.close()
        raise
    return endpoint
