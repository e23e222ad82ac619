"""`serve` and `Endpoint`: a live state at a URL."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal

from torchrelay.coordination.coordinator import Coordinator
from torchrelay.deadlines import Timeout, seconds_of
from torchrelay.endpoint.address import Address
from torchrelay.endpoint.encoding import Encoding
from torchrelay.endpoint.publish.device_slots import check_choice
from torchrelay.endpoint.publish.publisher import Publisher
from torchrelay.endpoint.publish.server_process import ServerProcess
from torchrelay.endpoint.server import messages as m
from torchrelay.errors import RelayError, UsageError
from torchrelay.options import ServeOptions, checked_options
from torchrelay.owner import close_at_exit
from torchrelay.pending import Pending
from torchrelay.sources.access import Access
from torchrelay.system import needs_linux


class Endpoint:
    """A live state that others read over HTTP (docs/http.md). Made by `serve`."""

    def __init__(self, publisher: Publisher, server: ServerProcess) -> None:
        self._publisher, self._server = publisher, server
        close_at_exit(self)

    @property
    def url(self) -> str:
        """Where to read all of the state. All ranks of a group have the URL of the first."""
        return self._publisher.urls[0] if self._publisher.urls else self._server.url

    def publish(
        self,
        state: object,
        *,
        step: int,
        timeout: Timeout | None = None,
        stage_on: Literal["auto", "host", "device"] = "auto",
    ) -> Pending:
        """All ranks call it together: copy a state and return; another process shows it.

        The state may change as soon as this returns. Readers of the step before continue with it.
        Where some still read the one before that, the publish is skipped and `Pending.skipped`
        says why.

        `stage_on`: "device" copies a state that is on one GPU to other memory of that GPU, within
        milliseconds; two copies are kept there. Processes of this host read it there (CUDA IPC);
        its bytes reach host memory in the background, for all others. "host" copies to host memory,
        and frees what was taken of the GPU. "auto": on the GPU where a quarter of its memory stays
        free next to what training has used at its peak.
        """
        check_choice(stage_on)
        return self._publisher.publish(state, step, timeout, stage_on)

    def status(self) -> dict[str, Any]:
        """The steps, readers and counts of this rank's server, as `/status.json` has them."""
        return self._publisher.status()

    def close(self) -> None:
        """Stop serving, and free the memory."""
        self._publisher.close()

    def _detach_after_fork(self) -> None:
        self._publisher.detach_after_fork()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    state: object,
    *,
    step: int,
    address: str = "127.0.0.1:0",
    encoding: Encoding | None = None,
    timeout: Timeout = 300.0,
    access: Access | None = None,
    group: Any = None,
    no_dist: bool = False,
    options: ServeOptions | None = None,
) -> Endpoint:
    """All ranks call it together: serve a live state over HTTP.

    Returns when its first step is staged.

    - `address`: HOST:PORT; port 0 takes a free one. Other addresses than loopback need a token.
    - `encoding`: how steps are kept and sent (`torchrelay.weights.Encoding`).
    - `timeout` bounds each call.
    - `access`: the token that readers have to send, and the certificate to serve TLS with. Without
      a token, only processes of this user on this machine may read.
    - `group`: ranks that serve one state together, each its part; by default all ranks, where
      torch.distributed is initialized. `no_dist`: this process alone.
    - `options`: the rare ones, as `tr.options.ServeOptions`.

    A context manager; `close` ends the server process and frees the memory.
    """
    needs_linux("serve")
    ranks = Coordinator.of(group, "endpoint", no_dist=no_dist)
    with ranks.joining():
        seconds = seconds_of(timeout)
        chosen: ServeOptions = checked_options(options, ServeOptions)
        place, access = Address.parse(address), access or Access()
        place.check(access.secret())
        for name, value in (
            ("hold_seconds", chosen.hold_seconds),
            ("stall_seconds", chosen.stall_seconds),
        ):
            if not 0 < value < 1e6:
                raise UsageError(f"{name} must be a positive number of seconds, not {value!r}")
        if chosen.connections < 1:
            raise UsageError(f"connections must be a positive number, not {chosen.connections!r}")
        if not isinstance(encoding, (Encoding, type(None))):
            raise UsageError(f"encoding is an Encoding, not {type(encoding).__name__}")
        encoding = encoding or Encoding()
        # Ranks of one host cannot share a port: the first has it, the others take free ones.
        listen = m.Listen.at(place.host, place.port if ranks.coordinates else 0, access)
        listen.hold, listen.stall = chosen.hold_seconds, chosen.stall_seconds
        listen.connections = chosen.connections
        listen.history = encoding.history
        server = ServerProcess(listen)
        server.start(seconds)
    again = "call serve again"
    endpoint = Endpoint(Publisher(ranks, server, seconds, "Endpoint", again, encoding), server)
    try:
        endpoint.publish(state, step=step)
    except BaseException:
        with suppress(RelayError):
            endpoint.close()
        raise
    return endpoint
