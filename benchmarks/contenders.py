"""Two more to compare with: torchft's HTTP transport, and a plain copy within one process."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.versus import SOURCE, Moved
from torchrelay.demo.job import leaves

TORCHFT_NOTE = (
    "HTTPTransport with num_chunks=0, as torchft's Manager makes it; where torchft is not "
    "installed whole, an empty package stands in for its __init__, which wants the compiled part "
    "that this transport does not use"
)


def torchft_missing() -> str | None:
    """Why torchft's transport cannot run here, if so."""
    try:
        _http_transport()
    except Exception as fault:  # whatever a package of another version raises when imported
        return f"{type(fault).__name__}: {fault}"
    return None


def _http_transport() -> Any:
    try:
        importlib.import_module("torchft")
    except ImportError:
        source = Path(sys.prefix) / "torchft-src" / "torchft"
        if not source.is_dir():
            raise
        package = types.ModuleType("torchft")
        package.__path__ = [str(source)]
        sys.modules["torchft"] = package
    return importlib.import_module("torchft.checkpointing.http_transport").HTTPTransport


class ByTorchft:
    """The receiver fetches over HTTP what the sender serves; always new tensors."""

    def __init__(self, group: Any, timeout: float) -> None:
        self._timeout = timedelta(seconds=timeout)
        self._transport = _http_transport()(self._timeout, num_chunks=0)
        server = self._transport._server
        server.RequestHandlerClass.log_message = lambda *args: None
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        self._step = 0
        # Its own address has the host's name, which need not resolve.
        mine = [f"http://localhost:{server.socket.getsockname()[1]}/checkpoint/"]
        dist.broadcast_object_list(mine, src=SOURCE, group=group)
        self._address = mine[0]

    def rest(self) -> None:
        self._step += 1
        self._transport.disallow_checkpoint()

    def send(self, state: object, to: Sequence[int]) -> Moved:
        self._transport.send_checkpoint(list(to), self._step, state, self._timeout)
        return Moved(None, {})

    def recv(self) -> Moved:
        got = self._transport.recv_checkpoint(SOURCE, self._address, self._step, self._timeout)
        return Moved(got, {})

    def close(self) -> None:
        self._transport.shutdown()


class ByCopy:
    """Within the receiver: the same bytes by `copy_` on two threads, the limit of a transfer."""

    def __init__(self, state: object, *, sends: bool) -> None:
        self._state = state
        tensors = [leaf for _, leaf in leaves(state) if isinstance(leaf, torch.Tensor)]
        self._pairs = [] if sends else [(tensor, tensor.clone()) for tensor in tensors]

    def rest(self) -> None:
        pass

    def send(self, state: object, to: Sequence[int]) -> Moved:
        return Moved(None, {})

    def recv(self) -> Moved:
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            for target, source in self._pairs:
                target.copy_(source)
        finally:
            torch.set_num_threads(before)
        return Moved(self._state, {})

    def close(self) -> None:
        self._pairs = []
