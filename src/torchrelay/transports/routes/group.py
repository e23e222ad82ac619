"""Route "group": the backend of a device (nccl, xccl) moves device memory from rank to rank.

Control stays on sockets. Such a backend has no tags and nothing that was posted can be taken back,
so a process sends one state at a time through it, and chunks are received in memory of the route's
own: a transfer that was given up writes to nothing of the caller's. After one was given up, a
process does not take the route on that group again: what is still posted would meet the chunks of
the next transfer.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from torchrelay.memory import threads, vectors
from torchrelay.memory.gpu.side import on_side_stream
from torchrelay.state.torch_private import device_backends
from torchrelay.transports.c10d import inside_backend, wait_for
from torchrelay.transports.routes import route as r
from torchrelay.transports.routes.outgoing import Outgoing
from torchrelay.transports.routes.reading import ReadDone, ReadingFetch
from torchrelay.transports.streams.chunk_sender import ChunkSent
from torchrelay.transports.wire import messages as m

TAG = (1 << 30) + 8  # for backends that have tags
PARTING_SECONDS = 0.1  # for a thread whose last operation is over
ABANDONED = "a transfer through the backend was given up, and what it posted cannot be taken back"


class GroupFacts(msgspec.Struct, array_like=True, frozen=True):
    """The kind of device whose memory carries chunks."""

    device: m.Name


def carriers(group: Any) -> list[str]:
    """The kinds of devices whose memory the group's backends move. gloo moves host memory only."""
    if group is None:
        return []
    backends = device_backends(group)
    return [kind for kind, name in backends.items() if kind != "cpu" and name != "gloo"]


_read_facts = m.reader(GroupFacts)


class _Use:
    """How this process uses the backends of a group."""

    def __init__(self, group: Any) -> None:
        self.carriers = carriers(group)  # asked for once: torch takes milliseconds to tell
        self.alone = threading.Lock()  # held while a state of this process goes through the group
        self.abandoned = False
        self.left: list[threads.Running] = []  # threads of transfers that are over

    def why_not(self) -> str:
        """Why no other transfer may go through the group; empty if one may."""
        self.left = [one for one in self.left if not one.wait(PARTING_SECONDS)]
        return ABANDONED if self.abandoned or self.left else ""


_uses: weakref.WeakKeyDictionary[Any, _Use] = weakref.WeakKeyDictionary()
_uses_lock = threading.Lock()


def _use_of(group: Any) -> _Use:
    with _uses_lock:
        if group not in _uses:
            _uses[group] = _Use(group)
        return _uses[group]


class GroupService(r.RouteService):
    """Sends chunks in order, and again those that the receiver asks for."""

    def __init__(self, receiver: r.Receiver) -> None:
        super().__init__(receiver)
        self._device = "cpu"
        self._over = False
        self._requested = 0
        self._sending: list[threads.Running] = []

    def offer(self, outgoing: Outgoing) -> bytes | r.Unavailable:
        kinds, use = outgoing.snapshot.devices, _use_of(self._receiver.member.group)
        found = [kind for kind in use.carriers if kind in kinds]
        if not found:
            return r.Unavailable("no backend of the group moves the memory that the state is in")
        if why := use.why_not():
            return r.Unavailable(why)
        self._device = found[0]
        return m.write(GroupFacts(found[0]))

    def begin(self, outgoing: Outgoing, accept: m.Accept, link: r.Link) -> bytes:
        self.outgoing, self._requested = outgoing, 0
        self.need(range(len(outgoing.snapshot.chunks)), restart=False)
        return b""

    def need(self, chunks: Sequence[int], *, restart: bool) -> None:
        assert self.outgoing is not None
        count = len(self.outgoing.snapshot.chunks)
        self._requested += len(chunks)
        if max(chunks, default=0) >= count or self._requested > (r.RETRIES + 2) * count:
            raise r.RouteFault("asked for chunks that do not exist, or again and again")
        job = partial(self._send, self.outgoing, list(chunks))
        self._sending.append(threads.run(job, "worker"))

    def _send(self, outgoing: Outgoing, chunks: list[int]) -> None:
        receiver, snapshot = self._receiver, outgoing.snapshot
        use = _use_of(receiver.member.group)
        try:
            with use.alone:
                for index in chunks:
                    if self._over:
                        use.abandoned = True
                        return
                    data = snapshot.view(index, self._device)
                    if data is None:
                        size = snapshot.chunks.sizes[index]
                        with on_side_stream():  # work queued on others may use their memory
                            data = torch.empty(size, dtype=torch.uint8, device=self._device)
                            snapshot.read(index, data, vectors.copy)
                    with inside_backend():
                        wait_for(receiver.member.group.send([data], receiver.rank, TAG), data)
                    self.wire_bytes += data.numel()
                    self.messages += 1
                    receiver.report(ChunkSent(index))
        except Exception as fault:  # whatever the backend raises: the pair is broken
            use.abandoned = True
            receiver.report(r.ServiceFailed(receiver.rank, f"the backend cannot send: {fault}"))

    def close(self) -> None:
        self._over = True
        if self._sending:
            _use_of(self._receiver.member.group).left += self._sending
        self._sending = []


class GroupFetch(ReadingFetch):
    """Takes chunks in the order in which they are sent, and compares their digests."""

    def __init__(self, incoming: r.Incoming, device: str) -> None:
        super().__init__(incoming, verify=incoming.offer.verify)
        self._device = device
        self._use = _use_of(incoming.member.group)
        self._landing_lock = threading.Lock()
        self._over = False
        self._receiving: list[threads.Running] = []

    def _read_chunks(self, chunks: list[int]) -> None:
        if self._receiving:  # the sender sends every chunk once without being asked
            self._talk.send(m.Need(tuple(chunks)))
        self._outstanding += len(chunks)
        # On a thread that can be left behind: a receive that was posted cannot be taken back.
        self._receiving.append(threads.run(partial(self._receive_all, chunks), "worker"))

    def _receive_all(self, chunks: list[int]) -> None:
        group, sender = self._incoming.member.group, self._talk.sender
        try:
            for index in chunks:
                size = self._chunks.sizes[index]
                data = torch.empty(size, dtype=torch.uint8, device=self._device)
                with inside_backend():
                    wait_for(group.recv([data], sender, TAG), data)
                with self._landing_lock:
                    if self._over:
                        self._use.abandoned = True
                        return
                    self._land(index, data)
                self._talk.inbox.put(ReadDone(size))
        except Exception as fault:
            self._use.abandoned = True
            self._talk.inbox.put(self._talk.lost(str(fault)))

    def close(self) -> None:
        with self._landing_lock:
            self._over = True
        self._use.left += self._receiving
        self._receiving = []
        super().close()


def _fetch(facts: bytes, incoming: r.Incoming) -> GroupFetch | r.Unavailable:
    device = _read_facts(facts).device
    use = _use_of(incoming.member.group)
    if device not in use.carriers:
        return r.Unavailable(f"no backend of the group moves memory of {device} here")
    if why := use.why_not():
        return r.Unavailable(why)
    return GroupFetch(incoming, device)


ROUTE = r.Route("group", GroupService, _fetch, comparison=r.DigestComparison.BY_DEFAULT)
