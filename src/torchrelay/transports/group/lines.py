"""Control messages between ranks of a process group, and how two ranks find each other.

A posted receive that a call gave up on is taken over by the next call, so no message is lost or
mixed up.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from torchrelay.deadlines import TICK, Deadline
from torchrelay.errors import (
    PeerLostError,
    RemoteProtocolError,
    TransferTimeoutError,
    UsageError,
)
from torchrelay.memory import threads
from torchrelay.state.tensors import device_backends
from torchrelay.transports.group.c10d import ProcessGroup, Watcher, inside_backend, use, wait_for
from torchrelay.transports.group.device_group import DeviceGroup, Mail
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.exchange import OfferExchange
from torchrelay.transports.protocol.machines.events import CLOSED

GRACE = 1.0  # seconds for the last messages of a transfer to be taken
UNHEARD = 1024  # messages of a peer that wait to be heard, at most
LARGE = 64 << 10  # bytes of a message that is not taken while others wait
UNWANTED = 64  # messages that are taken after the call is over
PAUSES = (0.001, 0.02)  # seconds between looks whether they have been heard: first, and last

Sink = Callable[[wire.Message | Exception], None]


class ControlLine:
    """Control messages to and from one rank in one transfer, in order, both ways."""

    def __init__(self, group: ProcessGroup, peer: int, transfer: int) -> None:
        self.group, self.peer, self.transfer = group, peer, transfer
        self._tag = wire.tag(transfer, wire.CONTROL_LANE)
        self._lock = threading.Lock()
        # Bytes of the next frame that this side sends, and of the next that it takes.
        self._frame_out = self._frame_in = wire.FIRST_FRAME_BYTES
        self._inbox: list[wire.Message | Exception] = []
        self._sink: Sink | None = None
        self._depth: Callable[[], int] | None = None  # of them wait there to be heard
        self._unwanted: int | None = None  # messages that may still come, once the call is over
        self._writer: Watcher | None = None
        self.delivered = threading.Event()  # set while nothing is on its way out
        self.delivered.set()
        self._outgoing = 0
        self._taken_at = 0.0
        self.heard = threading.Event()  # set once the peer has said something, or is lost
        self.ended = threading.Event()  # set once it has said its last word, or is lost
        self.broken = False
        self.adopted = False  # left by an earlier call, maybe on connections since replaced
        threads.run(self._read, "line")

    def listen(self, sink: Sink | None, depth: Callable[[], int] | None = None) -> None:
        """Hand messages to `sink`, those that came before included; None keeps them for later.

        `depth` tells how many of them wait there: with many, no more are taken from the peer.
        """
        with self._lock:
            self._sink, self._depth = sink, depth
            waiting, self._inbox = (self._inbox, []) if sink else ([], self._inbox)
            for message in waiting:
                assert sink is not None
                sink(message)

    def last_word(self) -> wire.Message | None:
        """What the peer has ended the transfer with, where nobody has listened to it."""
        with self._lock:
            last = self._inbox[-1] if self._inbox else None
        return None if isinstance(last, Exception) or not self.ended.is_set() else last

    def leave(self) -> None:
        """The call is over. Of what the peer still says, its last word is waited for; but a peer
        that goes on and on is not even listened to."""
        with self._lock:
            self._sink, self._depth = _ignore, None
            self._inbox.clear()
            self._unwanted = UNWANTED

    def put_back(self, messages: Sequence[wire.Message | Exception]) -> None:
        """Return messages that were handed out but not heeded, after `listen(None)`."""
        with self._lock:
            self._inbox[:0] = messages

    def unanswered(self) -> float:
        """For how many seconds the peer has not taken what is on its way to it."""
        with self._lock:
            return time.monotonic() - self._taken_at if self._outgoing else 0.0

    @property
    def untaken(self) -> int:
        """Messages on their way to the peer."""
        return self._outgoing

    def send(self, message: wire.Message) -> None:
        """Post a message. Does not block; a broken line is reported to the sink by the reader."""
        with self._lock:
            head, payload = wire.frame(message, self._frame_out)
            self._frame_out = wire.FRAME_BYTES
            if self._writer is None:
                self._writer = Watcher("line-out")
            try:
                for data in filter(None, (head, payload)):
                    buffer = torch.frombuffer(data, dtype=torch.uint8)
                    work = self.group.send([buffer], self.peer, self._tag)
                    if not self._outgoing:
                        self._taken_at = time.monotonic()
                    self._outgoing += 1
                    self.delivered.clear()
                    self._writer.watch(work, buffer, self._sent)
            except RuntimeError:
                pass
            if isinstance(message, wire.TERMINAL):
                self._writer.close()

    def _sent(self, fault: Exception | None) -> None:
        with self._lock:
            self._outgoing -= 1
            self._taken_at = time.monotonic()
            if not self._outgoing:
                self.delivered.set()

    def _read(self) -> None:
        with inside_backend():
            self._read_all()

    def _read_all(self) -> None:
        try:
            while True:
                message = self._read_one()
                self._deliver(message)
                if isinstance(message, wire.TERMINAL) or self._enough():
                    return
        except Exception as fault:
            self._deliver(fault)
        finally:
            self.ended.set()

    def _enough(self) -> bool:
        if self._unwanted is None:
            return False
        self._unwanted -= 1
        return self._unwanted < 0

    def _wait_until_heard(self, unheard: int) -> None:
        """Let the peer keep what it has to say while more than so many messages wait here."""
        pause, longest = PAUSES
        while (self._depth() if self._depth else len(self._inbox)) > unheard:
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _read_one(self) -> wire.Message:
        self._wait_until_heard(UNHEARD)
        head = torch.zeros(self._frame_in, dtype=torch.uint8, device="cpu")
        wait_for(self.group.recv([head], self.peer, self._tag), head)
        self._frame_in = wire.FRAME_BYTES
        length, payload = wire.read_frame(head.numpy().tobytes())
        if payload is None:
            self._wait_until_heard(0 if length > LARGE else UNHEARD)
            # Zeros: gloo takes a shorter message for all of it.
            body = torch.zeros(length, dtype=torch.uint8, device="cpu")
            wait_for(self.group.recv([body], self.peer, self._tag), body)
            return wire.read_message(body.numpy().data, self.group.size())
        return wire.read_message(payload, self.group.size())

    def _deliver(self, message: wire.Message | Exception) -> None:
        if isinstance(message, RemoteProtocolError):
            message.rank = self.peer
        elif isinstance(message, Exception):
            message = PeerLostError(f"connection lost: {message}; {CLOSED}", rank=self.peer)
        with self._lock:
            self.broken = isinstance(message, Exception)
            if self._sink is None:
                self._inbox.append(message)
            else:
                self._sink(message)
        self.heard.set()


def _ignore(message: wire.Message | Exception) -> None:
    pass


class FirstMessage:
    """A first message from one rank: a posted receive, or one that came and was put back."""

    def __init__(self, value: int | None = None) -> None:
        self.value = value
        self.fault: Exception | None = None
        self.adopted = False  # left by an earlier call, maybe on connections since replaced
        self._woken: queue.SimpleQueue[object] = queue.SimpleQueue()

    @classmethod
    def post(cls, group: ProcessGroup, peer: int) -> FirstMessage:
        first, number = cls(), torch.zeros(1, dtype=torch.int64, device="cpu")

        def report(fault: Exception | None) -> None:
            if fault is None:
                first.value = int(number.item())
            first.fault = fault
            first._woken.put(None)

        try:
            work = group.recv([number], peer, wire.PRELUDE_TAG)
        except RuntimeError as fault:
            report(fault)
            return first
        watcher = Watcher("first-message")
        watcher.watch(work, number, report)
        watcher.close()
        return first

    @property
    def came(self) -> bool:
        return self.value is not None or self.fault is not None

    def wait(self, deadline: Deadline) -> bool:
        """Wait until it has come; whether it has."""
        with deadline.wakes(self._woken):
            while not self.came and not deadline.passed:
                with suppress(queue.Empty):
                    self._woken.get(timeout=max(deadline.left(), 0.001))
        return self.came


class GroupLines:
    """What calls on one group share in this process: half-open lines and unanswered first messages.

    A sender that gave up on an absent receiver leaves its first message unread; the next transfer
    to that rank goes on with the same line. A receiver that gave up leaves the receive that it has
    posted, and the next call waits for that one. The group is not kept alive: it is the caller's
    to destroy.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = weakref.ref(group)
        backends = device_backends(group)
        # A backend without host memory sends control messages through the group's store.
        self._mail = Mail(group.get_group_store()) if backends and "cpu" not in backends else None  # type: ignore[attr-defined]
        # gloo takes no device pointers; other backends of a device move its memory directly.
        self.direct = [kind for kind, name in backends.items() if kind != "cpu" and name != "gloo"]
        self.exchange = OfferExchange()
        self.one_at_a_time = threading.Lock()  # those know no tags
        self._lock = threading.Lock()
        self._lines: dict[int, list[ControlLine]] = {}
        self._first_messages: dict[int, list[FirstMessage]] = {}
        self._unknown: dict[int, ControlLine] = {}

    @property
    def group(self) -> ProcessGroup:
        group = self._group()
        if group is None:
            raise UsageError("the process group is gone")
        return group if self._mail is None else DeviceGroup(group, self._mail)

    @property
    def device_only(self) -> bool:
        """Whether the backend cannot move host memory."""
        return self._mail is not None

    def carrier(self, kinds: set[str]) -> str:
        """Whose memory carries a state that lies on devices of these kinds."""
        if self._mail is not None or (len(kinds) == 1 and kinds <= set(self.direct)):
            return self.direct[0] if self._mail is not None else next(iter(kinds))
        return "cpu"

    @contextmanager
    def alone(self, deadline: Deadline) -> Iterator[None]:
        """Within: nobody else sends through a backend without tags."""
        while not self.one_at_a_time.acquire(timeout=min(deadline.left(), TICK)):
            if deadline.passed:
                raise TransferTimeoutError(
                    "timed out: another transfer on this group did not end", phase="data"
                )
        try:
            yield
        finally:
            self.one_at_a_time.release()

    def call(self, peer: int) -> ControlLine:
        """A line to a receiver: one left half open, or a new one with its prelude on the way."""
        with self._lock:
            waiting = self._lines.get(peer, [])
            while waiting:
                line = waiting.pop(0)
                if not line.broken:
                    return line
        transfer = secrets.randbelow(1 << wire.ID_BITS)
        line = ControlLine(self.group, peer, transfer)
        number = torch.tensor([wire.prelude(transfer)], dtype=torch.int64, device="cpu")
        watcher = Watcher("prelude")
        # A pair that is broken already raises at once; the line's reader reports the same.
        with suppress(RuntimeError):
            work = self.group.send([number], peer, wire.PRELUDE_TAG)
            watcher.watch(work, number, lambda fault: None)
        watcher.close()
        return line

    def hang_up(self, line: ControlLine) -> None:
        """Keep a line on which this side has said nothing, for the next transfer."""
        line.adopted = True
        with self._lock:
            self._lines.setdefault(line.peer, []).append(line)

    def excuse(self, lines: Iterable[ControlLine], reason: str, seconds: float) -> None:
        """Tell the receivers that wait why nothing comes, and leave the lines to the others to the
        next transfer. Who waits answers at once: `seconds` are for a busy machine.
        """
        ends = time.monotonic() + seconds
        for line in lines:
            while line.heard.wait(max(0.0, ends - time.monotonic())):
                if not line.ended.is_set():
                    line.send(wire.Abort(wire.text(reason)))
                    break
                if line.broken and not line.adopted:
                    break
                line = self.call(line.peer)  # it has left an earlier call, and may wait anew
            else:
                self.hang_up(line)

    def wonder(self, line: ControlLine) -> None:
        """Keep the line to a receiver that may have got the state: its last word is yet to come."""
        self._unknown[line.peer] = line

    def wondered(self, peers: Iterable[int]) -> dict[int, ControlLine]:
        """The lines that were kept to these receivers; they are the caller's now."""
        return {peer: self._unknown.pop(peer) for peer in peers if peer in self._unknown}

    def settled(self, wondered: Mapping[int, ControlLine]) -> dict[int, bool]:
        """Which receivers have told meanwhile: whether they have it. The others are kept."""
        found = {}
        for peer, line in wondered.items():
            word = line.last_word()
            if word is None:
                self._unknown.setdefault(peer, line)
            else:
                found[peer] = isinstance(word, wire.Done)
        return found

    def first_message(self, peer: int) -> FirstMessage:
        """A posted receive from `peer`: one left unanswered by an earlier call, or a new one."""
        with self._lock:
            waiting = self._first_messages.get(peer, [])
            while waiting:
                first = waiting.pop(0)
                if first.fault is None:
                    return first
        return FirstMessage.post(self.group, peer)

    def keep_first_message(self, peer: int, first: FirstMessage) -> None:
        with self._lock:
            first.adopted = True
            self._first_messages.setdefault(peer, []).insert(0, first)


_group_lines: weakref.WeakKeyDictionary[Any, GroupLines] = weakref.WeakKeyDictionary()
_group_lines_lock = threading.Lock()


def lines_of(group: ProcessGroup) -> GroupLines:
    """The one `GroupLines` of a group in this process."""
    with _group_lines_lock:
        found = _group_lines.get(group)
        if found is None:
            found = _group_lines[group] = GroupLines(group)
            use(group)
        return found
