"""The receiver that is fed from here, in a chain: a chunk leaves for it as soon as it matches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from torchrelay.transports.meeting.node import DataTicket, Node
from torchrelay.transports.streams.chunk_receiver import ChunkArrived
from torchrelay.transports.streams.chunk_sender import Borrow, ChunkSender
from torchrelay.transports.streams.sockets import DataSocket


class NextReceiver:
    """Feeds one receiver with chunks that have arrived here.

    `release` takes each chunk that has left, or never will. The connections report `FeedBroken`.
    """

    def __init__(
        self,
        report: Callable[[object], None],
        release: Callable[[ChunkArrived], None],
    ) -> None:
        self._release = release
        self._waiting: dict[int, ChunkArrived] = {}
        # Not of `self`: they would keep each other, and with them the state, after the end.
        self._sender = ChunkSender(_lend_from(self._waiting, release), report)
        self._stack = ExitStack()

    def admit(self, node: Node, ticket: DataTicket) -> None:
        """Take its connections from now on."""
        expected = node.expect(ticket, lambda sock: self._sender.add(DataSocket(sock)))
        self._stack.enter_context(expected)

    def pass_on(self, chunk: ChunkArrived) -> None:
        self._waiting[chunk.index] = chunk
        self._sender.put([chunk.index])

    @property
    def unsent(self) -> int:
        """Chunks that have not left yet."""
        return self._sender.unsent

    def takes_nothing_for(self, seconds: float) -> bool:
        """Whether chunks wait for it, and none of their bytes left in this time."""
        return self.unsent > 0 and time.monotonic() > self._sender.moved_at + seconds

    def finish(self, seconds: float) -> None:
        """All chunks have left: say so to it."""
        self._sender.finish(seconds)

    def close(self) -> None:
        """Feed it no more. It notices that its connections are closed, and asks the sender."""
        self._stack.close()
        self._sender.close()
        while self._waiting:
            self._release(self._waiting.popitem()[1])


def _lend_from(waiting: dict[int, ChunkArrived], release: Callable[[ChunkArrived], None]) -> Borrow:
    @contextmanager
    def borrow(index: int) -> Iterator[tuple[torch.Tensor, bytes]]:
        """Within: a chunk that has arrived, with the digest that it came with."""
        chunk = waiting.pop(index)
        try:
            yield chunk.data, chunk.digest
        finally:
            release(chunk)

    return borrow
