"""One of two ranks, run by an interpreter of any torch: `python -m tests.support.torch_peer ...`

    arguments: RANK PORT      both ranks meet at the TCPStore on that port of the loopback address
    stdin:     a line of JSON for each call, as {"call": "send", "how": "stock", ...}
    stdout:    a line of JSON for each: what the call returned, or how it failed

Calls whose `how` is "stock" are torch's own code and need torch alone. It ends with its stdin.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._pg_transport import PGTransport
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.support import torch_states as states

TIMEOUT = timedelta(seconds=30)
CPU = torch.device("cpu")


class Peer:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.group: Any = dist.group.WORLD
        self.mesh = init_device_mesh("cpu", (2,))

    def versions(self) -> list[str]:
        return [torch.__version__.partition("+")[0], sys.version.partition(" ")[0]]

    def has_ours(self) -> bool:
        """Whether this interpreter can import the library."""
        try:
            import torchrelay.dropin  # noqa: F401
        except ImportError:
            return False
        return True

    def send(self, how: str, content: str) -> None:
        """To rank 1, which calls `recv`."""
        sent = self._content(content)
        if how == "stock":
            PGTransport(self.group, TIMEOUT, CPU).send_checkpoint([1], sent)
        else:
            _dropin(self.group, how, None).send_checkpoint([1], sent)

    def recv(self, how: str, content: str, in_place: bool) -> list[str]:
        """What differs in what came from rank 0."""
        into = self._empty(content) if in_place else None
        state = None if into is None else (lambda: into)
        if how == "stock":
            got = PGTransport(self.group, TIMEOUT, CPU, state).recv_checkpoint(0)
        else:
            got = _dropin(self.group, how, state).recv_checkpoint(0)
        found: list[str] = states.differences(got, self._content(content))
        return found + (_elsewhere(got, into) if in_place else [])

    def record(self, how: str, content: str, file: str) -> None:
        """Write the messages of a sender. Rank 1 makes the same call, since some states are made
        together."""
        sent = self._content(content)
        if self.rank:
            return
        recorder: Any = _Recorder(Path(file))
        if how == "stock":
            PGTransport(recorder, TIMEOUT, CPU).send_checkpoint([1], sent)
        else:
            from torchrelay.dropin._torch_wire import send_torch

            send_torch(recorder, [1], sent, CPU, lambda work, what: None)

    def _content(self, content: str) -> Any:
        """What rank 0 sends."""
        if content == "sharded":
            return {"w": states.sharded(self.rank)}
        if content == "distributed":
            return states.distributed(self.mesh, 0)
        if content == "copies":
            return {"copies": states.distributed(self.mesh, 0)["copies"]}
        return states.dense() if content == "dense" else states.plain()

    def _empty(self, content: str) -> Any:
        if content == "copies":
            return {"copies": states.distributed(self.mesh, 0, fill=False)["copies"]}
        return states.zeros(self._content(content))

    # Checkpoints, which each rank writes and reads its part of.

    def save(self, how: str, path: str) -> None:
        state = states.part(self.mesh, self.rank)
        if how == "stock":
            dcp.save(state, checkpoint_id=path)
        elif how == "writer":
            from torchrelay.dcp import Writer

            dcp.save(state, storage_writer=Writer(path, step=7, timeout=30))
        else:
            from torchrelay.dropin import Checkpointer

            files = dcp.FileSystemWriter(path), dcp.FileSystemReader(path)
            Checkpointer(*files).save(state)

    def load(self, how: str, path: str) -> list[str]:
        """What differs in a checkpoint that both ranks load into their parts."""
        want = states.part(self.mesh, self.rank)
        into = states.empty_part(self.mesh, self.rank)
        if how == "stock":
            dcp.load(into, checkpoint_id=path)
        elif how == "writer":
            from torchrelay.dcp import Reader

            dcp.load(into, storage_reader=Reader(path, timeout=30))
        else:
            from torchrelay.dropin import Checkpointer

            files = dcp.FileSystemWriter(path), dcp.FileSystemReader(path)
            Checkpointer(*files).load(into)
        return states.differences(states.as_dcp(into), states.as_dcp(want))


class _Recorder:
    """In the place of a group: each message that is sent becomes a line of a file, its tag and its
    bytes in hexadecimal digits."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _Done:
        (one,) = tensors
        data = bytes(one.contiguous().view(torch.uint8).tolist())
        with self._file.open("a") as file:
            print(tag, data.hex(), file=file)
        return _Done()


class _Done:
    def wait(self) -> None:
        pass


def _dropin(group: Any, how: str, state: Callable[[], object] | None) -> Any:
    from torchrelay.dropin import PGTransport

    protocol: Any = "torch" if how == "ours" else "relay"
    return PGTransport(group, TIMEOUT, CPU, state, protocol=protocol)


def _elsewhere(got: Any, into: Any, path: str = "state") -> list[str]:
    """The tensors that were received into other memory than they should be."""
    if isinstance(into, torch.Tensor):
        pair = [one.to_local() if isinstance(one, DTensor) else one for one in (got, into)]
        return [] if pair[0].data_ptr() == pair[1].data_ptr() else [f"{path}: other memory"]
    if not isinstance(into, (dict, list)):
        return []
    keys = into if isinstance(into, dict) else range(len(into))
    return [one for key in keys for one in _elsewhere(got[key], into[key], f"{path}[{key!r}]")]


def main() -> None:
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    answers, sys.stdout = sys.stdout, sys.stderr
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    peer = Peer(rank)
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer = {"returned": getattr(peer, call.pop("call"))(**call)}
        except BaseException:
            answer = {"failed": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # the other rank may have left the group


if __name__ == "__main__":
    main()
