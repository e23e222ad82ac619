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
from torchrelay.endpoint.server.messages import CONNECTIONS, HOLD_SECONDS, STALL_SECONDS
from torchrelay.errors import RelayError, UsageError
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
        """Copy a state and return; another process shows it to readers.

        The state may change as soon as this returns. Readers of the step before continue with it.
        Where some still read the one before that, the publish is skipped and `Pending.skipped`
        says why. All ranks of a group call it together.

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
    access: Access | None = None,
    group: Any = None,
    timeout: Timeout = 300.0,
    hold: float = HOLD_SECONDS,
    stall: float = STALL_SECONDS,
    connections: int = CONNECTIONS,
    encoding: Encoding | None = None,
) -> Endpoint:
    """Serve a live state over HTTP, and return when its first step is staged.

    - `address`: HOST:PORT; port 0 takes a free one. Other addresses than loopback need a token.
    - `access`: the token that readers have to send, and the certificate to serve TLS with. Without
      a token, only processes of this user on this machine may read.
    - `group`: ranks that serve one state together, each its part; by default all ranks, where
      torch.distributed is initialized. `False`: this process alone.
    - `timeout` bounds each call.
    - `hold`: seconds that a step which is no longer the newest is kept for its readers.
    - `stall`: a reader that takes no bytes, or sends no request, for this many seconds is dropped.
    - `connections`: how many may be open at once.
    - `encoding`: how steps are kept and sent (`torchrelay.endpoint.Encoding`).

    A context manager; `close` ends the server process and frees the memory.
    """
    needs_linux("serve")
    ranks = Coordinator.of(group, "endpoint")
    with ranks.joining():
        seconds = seconds_of(timeout)
        place, access = Address.parse(address), access or Access()
        place.check(access.secret())
        for name, value in (("hold", hold), ("stall", stall)):
            if not 0 < value < 1e6:
                raise UsageError(f"{name} must be a positive number of seconds, not {value!r}")
        if connections < 1:
            raise UsageError(f"connections must be a positive number, not {connections!r}")
        if not isinstance(encoding, (Encoding, type(None))):
            raise UsageError(f"encoding is an Encoding, not {type(encoding).__name__}")
        encoding = encoding or Encoding()
        # Ranks of one host cannot share a port: the first has it, the others take free ones.
        listen = m.Listen.at(place.host, place.port if ranks.coordinates else 0, access)
        listen.hold, listen.stall, listen.connections = hold, stall, connections
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
