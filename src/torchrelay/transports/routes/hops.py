"""How chunks come from one rank and go on to the next, in order.

As messages of the group; or, between receivers of one place, read by the one behind out of the
buffers of the one before: that one shows which process it is, sends a note of where they lie, and
keeps them until each is answered. A reader that cannot read says so once, and gets messages from
there on.
"""

from __future__ import annotations

import queue
import secrets
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch

from torchrelay.errors import RemoteProtocolError
from torchrelay.memory import threads
from torchrelay.memory.vectors import OtherMemoryError, read_run
from torchrelay.transports.group.c10d import ProcessGroup, Watcher, Work, inside_backend, wait_for
from torchrelay.transports.protocol import wire
from torchrelay.transports.routes import notes as numbers
from torchrelay.transports.routes.nearby import place


class Handed(Protocol):
    def __call__(self, fault: Exception | None, read: bool, digest: bytes = b"") -> None:
        """Told of each chunk: what went wrong, whether it was read rather than sent, and its digest
        if the way has made one."""


_Job = tuple[torch.Tensor, Handed]


class Way(Protocol):
    """Chunks to or from one rank; a way that never ends keeps no group alive."""

    def put(self, data: torch.Tensor, report: Handed) -> None:
        """The next chunk: its bytes, or the memory for them. Does not block."""

    def close(self) -> None:
        """No more come. What is under way is waited for beside."""


def way_in(
    group: ProcessGroup, upstream: int, transfer: int, lane: int, *, notes: bool, may_read: bool
) -> Way:
    """`notes` come in place of chunks; `may_read`: this side agrees to that."""
    tag = wire.tag(transfer, lane)
    if notes:
        return _Reading(group, upstream, transfer, tag, may_read)
    return _Messages("data-in", lambda data: group.recv([data], upstream, tag))


def way_on(
    group: ProcessGroup, downstream: int, transfer: int, lane: int, *, notes: bool = False
) -> Way:
    tag = wire.tag(transfer, lane)
    if notes:
        return _Handing(group, downstream, transfer, tag)
    return _Messages("data-on", lambda data: group.send([data], downstream, tag))


class _Messages:
    """Each chunk is a message."""

    def __init__(self, name: str, post: Callable[[torch.Tensor], Work]) -> None:
        self._post, self._watcher = post, Watcher(name)

    def put(self, data: torch.Tensor, report: Handed) -> None:
        try:
            self._watcher.watch(self._post(data), data, lambda fault: report(fault, False))
        except RuntimeError as fault:
            report(fault, False)

    def close(self) -> None:
        self._watcher.close()


class _HandingThread:
    """One end of a way through memory: chunks in order, on a thread that may wait for the other.

    That thread decides alone what goes over the lane, so that the two ends stay in step.
    """

    def __init__(self, name: str, group: ProcessGroup, peer: int, transfer: int, tag: int) -> None:
        self._name, self._group, self._peer, self._tag = name, weakref.ref(group), peer, tag
        self._me, self._transfer = group.rank(), transfer
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._messages: _Messages | None = None  # once chunks cannot be read
        self._said: tuple[Work, torch.Tensor] | None = None
        threads.run(self._run, name)

    def put(self, data: torch.Tensor, report: Handed) -> None:
        self._jobs.put((data, report))

    def close(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        try:
            self._work()
        except Exception as fault:  # whatever the backend raises: the pair is broken
            while (job := self._jobs.get()) is not None:
                job[1](fault, False)
        with suppress(Exception):
            self._see_taken()
        if self._messages is not None:
            self._messages.close()

    def _work(self) -> None:
        """Do what comes until the end; report a fault for what is under way, and raise it."""
        raise NotImplementedError

    @property
    def _there(self) -> ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group is gone")
        return group

    def _hear(self, count: int) -> list[int]:
        """Wait for a message of so many numbers."""
        message = torch.zeros(count, dtype=torch.int64, device="cpu")
        with inside_backend():
            wait_for(self._there.recv([message], self._peer, self._tag), message)
        heard: list[int] = message.tolist()
        return heard

    def _say(self, words: Sequence[int]) -> None:
        """Post a message. The one before it is taken by then: what is heard between shows it."""
        self._see_taken()
        message = torch.tensor(words, dtype=torch.int64, device="cpu")
        self._said = self._there.send([message], self._peer, self._tag), message

    def _see_taken(self) -> None:
        if self._said is not None:
            with inside_backend():
                wait_for(*self._said)


class _Handing(_HandingThread):
    """The end that has the chunks. A note tells of all that are there once the last is answered."""

    def __init__(self, group: ProcessGroup, downstream: int, transfer: int, tag: int) -> None:
        self._proof: place.Proof | None = None
        super().__init__("data-on", group, downstream, transfer, tag)

    def _show(self) -> None:
        """Show the reader which process this is, once it has asked."""
        nonce = numbers.read_hail(self._hear(numbers.HAIL_NUMBERS))
        process = place.Process(0, -1, 0)
        with suppress(OSError):  # nothing to show: it cannot read, and says so
            self._proof = place.Proof(place.claim(nonce, self._me, self._peer, self._transfer))
            process = self._proof.process
        self._say(process)

    def _work(self) -> None:
        shown = False
        while batch := self._batch():
            try:
                if not shown:
                    self._show()
                    shown = True
                if self._messages is None:
                    self._say(numbers.note([(data.data_ptr(), data.numel()) for data, _ in batch]))
                while batch and self._messages is None:
                    self._hear_answer(batch)
            except Exception as fault:
                for _, report in batch:
                    report(fault, False)
                raise
            for data, report in batch:
                assert self._messages is not None
                self._messages.put(data, report)

    def _batch(self) -> list[_Job]:
        """What is there, at least one; none at the end."""
        batch: list[_Job] = []
        while not batch or (len(batch) < numbers.NOTE_CHUNKS and not self._jobs.empty()):
            job = self._jobs.get()
            if job is None:
                self._jobs.put(None)  # for the next time
                break
            batch.append(job)
        return batch

    def _hear_answer(self, batch: list[_Job]) -> None:
        """Take what has been read out of the batch."""
        count = self._hear(1)[0]
        if not 0 <= count <= len(batch):
            raise RemoteProtocolError(f"answer {count} to {len(batch)} chunks", rank=self._peer)
        for _ in range(count):
            batch.pop(0)[1](None, True)
        if not count:
            self._messages = _Messages(
                self._name, lambda data: self._there.send([data], self._peer, self._tag)
            )


class _Reading(_HandingThread):
    """The end that wants the chunks, in private memory: they are not verified yet."""

    def __init__(
        self, group: ProcessGroup, upstream: int, transfer: int, tag: int, may_read: bool
    ) -> None:
        self._may_read = may_read
        self._pid = 0
        self._over = False
        super().__init__("data-in", group, upstream, transfer, tag)

    def close(self) -> None:
        """After `close` no more chunks are delivered. A thread that still waits keeps the memory of
        one chunk."""
        self._over = True
        with suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        super().close()

    def _recognise(self) -> bool:
        """Ask the other which process it is; whether that is so, and it can be read."""
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        self._say(numbers.hail(nonce))
        process = place.Process(*numbers.read_process(self._hear(numbers.PROCESS_NUMBERS)))
        claim = place.claim(nonce, self._peer, self._me, self._transfer)
        self._pid = process.pid
        return self._may_read and not (
            place.cannot_open(process, claim) or place.cannot_read(process, claim)
        )

    def _work(self) -> None:
        reads: bool | None = None
        noted: list[tuple[int, int]] = []
        unanswered = 0
        while (job := self._jobs.get()) is not None and not self._over:
            data, report = job
            try:
                if reads is None:
                    reads = self._recognise()
                if self._messages is None:
                    noted = noted or numbers.read_note(self._hear(numbers.NOTE_NUMBERS))
                    reads = reads and self._read(*noted.pop(0), data)
            except Exception as fault:
                report(fault, False)
                raise
            if reads:
                report(None, True)
                unanswered += 1
            # At the latest when this thread may have to wait: the other wants its memory back.
            if unanswered and (not reads or not noted or self._jobs.empty()):
                self._answer(unanswered)
                unanswered = 0
            if not reads:
                self._receive(data, report)

    def _read(self, address: int, size: int, data: torch.Tensor) -> bool:
        if size != data.numel():
            raise RemoteProtocolError(f"a note of {size} bytes for {data.numel()}", rank=self._peer)
        with suppress(OtherMemoryError):
            read_run(self._pid, address, data.data_ptr(), size)
            return True
        return False

    def _answer(self, count: int) -> None:
        with suppress(Exception):  # of a broken pair: what is heard next tells
            self._say([count])

    def _receive(self, data: torch.Tensor, report: Handed) -> None:
        if self._messages is None:
            self._answer(0)
            self._messages = _Messages(
                self._name, lambda data: self._there.recv([data], self._peer, self._tag)
            )
        self._messages.put(data, report)
