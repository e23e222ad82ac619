"""What a peer points at in memory is read only if it is the peer's own, and never passed on unseen.

Each test is an attack: on a rank that is read from, on the one that reads, or on the one behind it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.support.faults import CHUNK, Outcome, attempt, received, same, weights
from tests.support.ways import elsewhere, patched
from torchrelay.geometry.runs import Runs
from torchrelay.transports.group.lines import ControlLine
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.receiver import LastTables, off_schedule
from torchrelay.transports.routes import notes
from torchrelay.transports.routes.choice import GROUP
from torchrelay.transports.routes.host import HostServer, Memory
from torchrelay.transports.routes.nearby import place
from torchrelay.transports.routes.nearby.place import Process, Proof, claim
from torchrelay.transports.transfer import intake

OLD, NEW = 100, 1
TIMEOUT = 20.0
NONCE = b"n" * wire.NONCE_BYTES
CLAIM = claim(NONCE, 1, 0, 7)
SECRET = b"not for you " * 6_000


# Files and memory that another process shows


@contextlib.contextmanager
def fifo() -> Iterator[int]:
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(path := f"{folder}/fifo")
        yield os.open(path, os.O_RDWR)


@contextlib.contextmanager
def on_disk(folder: str | None) -> Iterator[int]:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(CLAIM)
        file.flush()
        yield file.fileno()


@contextlib.contextmanager
def memfd(content: bytes, seals: int = 0) -> Iterator[int]:
    fd = os.memfd_create("torchrelay-claim", os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    yield fd
    os.close(fd)


@contextlib.contextmanager
def proof(text: bytes) -> Iterator[int]:
    made = Proof(text)
    yield made.process.fd
    made.close()


NO_MEMFD, ANOTHER = "a file that is no memfd", "another process has the sender's number"
SHOWN: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[int]], str]] = {
    "its claim": (lambda: proof(CLAIM), ""),
    "a FIFO": (fifo, NO_MEMFD),
    "a device": (lambda: contextlib.nullcontext(os.open("/dev/zero", os.O_RDONLY)), NO_MEMFD),
    "a socket": (lambda: contextlib.nullcontext(os.pipe()[0]), NO_MEMFD),
    "a file": (lambda: on_disk(None), NO_MEMFD),
    "a file in shared memory": (lambda: on_disk("/dev/shm"), NO_MEMFD),
    "what can be changed": (lambda: memfd(CLAIM), ANOTHER),
    "what can grow": (lambda: memfd(CLAIM, place._SEALS & ~fcntl.F_SEAL_GROW), ANOTHER),
    "another rank's claim": (lambda: proof(claim(NONCE, 2, 0, 7)), ANOTHER),
    "a claim for another reader": (lambda: proof(claim(NONCE, 1, 2, 7)), ANOTHER),
    "a claim of another transfer": (lambda: proof(claim(NONCE, 1, 0, 8)), ANOTHER),
    "an older claim": (lambda: proof(claim(b"o" * 16, 1, 0, 7)), ANOTHER),
    "a longer claim": (lambda: proof(CLAIM + b"x"), ANOTHER),
    "nothing": (lambda: contextlib.nullcontext(-1), "does not say how to recognise"),
    "a closed file": (lambda: contextlib.nullcontext(1 << 20), "No such file"),
}


def look(rank: int, group: Any) -> dict[str, tuple[str, float]]:
    """Rank 1 shows everything that there is, one after the other; rank 0 looks at it."""
    found = {}
    for name, (show, _) in SHOWN.items():
        told: list[Any] = [None]
        with show() if rank == 1 else contextlib.nullcontext() as fd:
            told[0] = Process(os.getpid(), fd, 0) if rank == 1 else None
            dist.broadcast_object_list(told, 1, group=group)
            if rank == 0:
                begun = time.monotonic()
                found[name] = place.cannot_open(told[0], CLAIM), time.monotonic() - begun
            dist.barrier(group)
    return found


def test_only_a_sealed_claim_of_the_right_rank_is_recognised(pool2: Any) -> None:
    """A FIFO would wait for a writer for good, a device would give bytes without end."""
    found = pool2.run(look)[0]
    for name, (why, seconds) in found.items():
        expected = SHOWN[name][1]
        assert bool(why) == bool(expected) and expected in why, (name, why)
        assert seconds < 5, name


def test_a_process_does_not_take_itself_for_another() -> None:
    mine = Proof(CLAIM)
    assert "this process itself" in place.cannot_open(mine.process, CLAIM)
    there = threading.Event()
    thread = threading.Thread(target=there.wait, daemon=True)
    thread.start()
    by_thread = mine.process._replace(pid=thread.native_id)  # the kernel reads by these too
    assert "this process itself" in place.cannot_open(by_thread, CLAIM)
    there.set()
    mine.close()


def test_a_process_of_another_user_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everybody; what others say of their user does not count."""
    monkeypatch.setattr(place, "_users", lambda pid: (os.getuid() + 1, os.getuid() + 1))
    mine = Proof(CLAIM)
    monkeypatch.setattr(os, "access", lambda *_: False)  # as if it were another process
    assert "another user" in place.cannot_open(mine.process, CLAIM)
    mine.close()


def test_the_user_of_a_process_is_what_the_kernel_says() -> None:
    assert place._users(os.getpid()) == (os.getuid(), os.geteuid())


def test_numbers_of_a_process_that_cannot_be() -> None:
    for numbers in ([-1, 3, 5], [1 << 32 | 7, 3, 5], [1, 1 << 31, 5], [1, -2, 5], [1, 3, -5]):
        with pytest.raises(tr.RemoteProtocolError):
            notes.read_process(numbers)


# A sender that names memory which is not its own


def secret_here(group: Any, owner: int) -> tuple[Process, Any]:
    """Where `owner` has something that nobody else should see."""
    buffer = ctypes.create_string_buffer(SECRET)
    told: list[Any] = [Process(os.getpid(), 0, ctypes.addressof(buffer))]
    dist.broadcast_object_list(told, owner, group=group)
    return told[0], buffer


def naming(victim: Process, fd: int | None) -> contextlib.AbstractContextManager[None]:
    """Within: this sender says that its state lies in the victim's secret."""
    original = HostServer.memory

    def memory(self: HostServer, join: wire.Join, line: ControlLine) -> Memory:
        true = original(self, join, line)
        size = min(self._stream_bytes, len(SECRET))
        return msgspec.structs.replace(
            true,
            place=msgspec.structs.replace(true.place, pid=victim.pid),
            beacon=victim.beacon,
            fd=true.fd if fd is None else fd,
            host=Runs([0], [victim.beacon], [size]).pack(),
        )

    return patched(HostServer, memory=memory)


def steals(rank: int, group: Any, owner: int, shown: bool) -> Any:
    """Rank 0 points rank 1 at the memory of `owner`; `shown`: at a claim that is there, too."""
    victim, buffer = secret_here(group, owner)
    made = Proof(claim(NONCE, owner, 1, 7)) if rank == owner else None
    told: list[Any] = [made.process.fd if made is not None else 0]
    dist.broadcast_object_list(told, owner, group=group)
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    result = None
    if rank == 0:
        with naming(victim, told[0] if shown else None):
            relay.send(weights(NEW), 1)
    elif rank == 1:
        got = relay.recv(0)
        result = same(got.state, weights(NEW)), got.report.route, got.report.instead["host"]
    dist.barrier(group)
    del buffer, made
    return result


@pytest.mark.parametrize("shown", [True, False])
def test_a_receiver_does_not_read_itself_on_a_senders_word(pool4: Any, shown: bool) -> None:
    right, route, why = pool4.run(steals, 1, shown)[1]
    assert right and route == "group" and "this process itself" in why


@pytest.mark.parametrize("shown", [True, False])
def test_a_receiver_does_not_read_a_third_process_on_a_senders_word(
    pool4: Any, shown: bool
) -> None:
    right, route, why = pool4.run(steals, 2, shown)[1]
    assert right and route == "group"
    assert "another process" in why or "no memfd" in why or "No such file" in why


def test_no_receiver_tells_where_its_memory_is() -> None:
    """Before it knows who asks: joining says a nonce, which is good for being read by others, and
    a digest of what this very sender has said."""
    assert wire.Join.__struct_fields__ == ("step", "place", "nonce", "fd", "knows")
    tables = LastTables()
    tables.keep(2, {"host": wire.RouteOffer(b"", b"addresses")})
    assert wire.tables(tables.of(2)) == [b"host", b"addresses"] and not tables.of(1)
    tables.keep(2, {"host": wire.RouteOffer(b"", bytes(LastTables.limit + 1))})
    assert not tables.of(2)
    assert not any("token" in name or "beacon" in name for name in wire.Join.__struct_fields__)


# A chain in which one rank lies to the next


class Watching:
    """A group that keeps what it sends as data."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.sent: list[bytes] = []

    def rank(self) -> int:
        return int(self.group.rank())

    def size(self) -> int:
        return int(self.group.size())

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        return self.group.recv(tensors, src, tag)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        if tag >> 30 and tag % wire.LANES:
            self.sent.append(tensors[0].numpy().tobytes())
        return self.group.send(tensors, dst, tag)


def pretending(victim: Process) -> contextlib.AbstractContextManager[None]:
    """Within: this rank says that it is the victim's process, and that its chunks lie there."""

    class Pretended(Proof):
        def __init__(self, claim: bytes) -> None:
            super().__init__(claim)
            self.process = victim._replace(fd=self.process.fd)

    def note(chunks: Any) -> list[int]:
        told = [(victim.beacon, size) for _, size in chunks]
        numbers = [len(told), *(number for one in told for number in one)]
        return numbers + [0] * (notes.NOTE_NUMBERS - len(numbers))

    stack = contextlib.ExitStack()
    stack.enter_context(patched(place, Proof=Pretended))
    stack.enter_context(patched(notes, note=note))
    return stack


@contextlib.contextmanager
def spoiling() -> Iterator[None]:
    """Within: what this rank passes on as messages is not what it got."""
    original = intake.way_on

    def way_on(group: Any, downstream: int, *args: Any, notes: bool = False) -> Any:
        way = original(group, downstream, *args, notes=False)
        put = way.put
        way.put = lambda data, report: put(torch.full_like(data, 0x5A), report)  # type: ignore
        return way

    with patched(intake, way_on=way_on):
        yield


def in_a_chain(rank: int, group: Any, victim: int, lie: str) -> Any:
    """0 sends to 1, 2, 3. Rank 1 lies to rank 2, which passes on to rank 3."""
    there, buffer = secret_here(group, victim)
    watching = Watching(group)
    options: dict[str, Any] = {"chunk_bytes": CHUNK, "join_window": 5.0}
    lies: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if rank == 1:
        lies = pretending(there) if lie == "memory" else spoiling()
    if lie == "messages":
        options["route"] = "group"
    with elsewhere(machine="another") if rank == 0 else contextlib.nullcontext(), lies:
        relay = tr.Relay(watching, timeout=TIMEOUT, **options)
        if rank == 0:
            report = relay.send(weights(NEW), [1, 2, 3])
            return report.receivers, report.failed, report.rerouted
        got = relay.recv(0)
    right = same(got.state, weights(NEW))
    leaked = any(SECRET[:32] in data or b"\x5a" * 64 in data for data in watching.sent)
    del buffer
    return right, leaked, len(watching.sent), got.report.handed_bytes


@pytest.mark.parametrize("victim", [2, 3])
def test_a_chain_does_not_read_where_another_rank_points(pool4: Any, victim: int) -> None:
    """At the reader itself, or at the one behind it, which would get its own memory."""
    ours, *theirs = pool4.run(in_a_chain, victim, "memory")
    assert ours[0] == (1, 2, 3) and ours[1] == {}
    assert [right for right, *_ in theirs] == [True] * 3
    assert not any(leaked for _, leaked, *_ in theirs)
    assert theirs[1][3] == 0  # rank 2 has read nothing


def test_what_is_not_right_is_not_passed_on(pool4: Any) -> None:
    ours, *theirs = pool4.run(in_a_chain, 3, "messages")
    assert ours[0] == (1, 2, 3) and ours[1] == {}
    assert [right for right, *_ in theirs] == [True] * 3
    assert theirs[0][2] > 0 and not theirs[1][1]  # rank 1 spoils what it passes on, rank 2 nothing


# A schedule that is none


GOES = {
    "from itself": wire.Go(2),
    "to itself": wire.Go(0, 2, 5),
    "back to the sender": wire.Go(1, 0, 5),
    "back where it came from": wire.Go(1, 1, 5),
    "only receiver, with one behind": wire.Go(0, 3, 5),
    "only receiver, with one before": wire.Go(1),
    "reads without digests": wire.Go(1, reads=True),
    "notes without digests": wire.Go(0, 3, 5, notes=True),
    "reads the sender": wire.Go(0, reads=True),
    "notes to nobody": wire.Go(0, notes=True),
}


@pytest.mark.parametrize("name", GOES)
def test_a_chain_that_cannot_be_is_refused(name: str) -> None:
    offer = wire.Offer(
        b"", verify="without digests" not in name, threads=4 if "only" in name else 0
    )
    assert off_schedule(GOES[name], offer, GROUP, me=2, sender=0)
    for good in (
        wire.Go(0),
        wire.Go(1, 3, 5),
        wire.Go(1, reads=True),
        wire.Go(0, 3, 5, notes=True),
    ):
        assert not off_schedule(good, wire.Offer(b""), GROUP, me=2, sender=0)


def gone_astray(rank: int, group: Any, name: str) -> Outcome | None:
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK, route="group")
    if rank == 2:
        return received(relay, 0, weights(OLD), OLD, NEW, TIMEOUT)
    if rank != 0:
        return None
    original, word = ControlLine.send, GOES[name]

    def send(self: ControlLine, message: wire.Message) -> None:
        original(self, word if isinstance(message, wire.Go) else message)

    with patched(ControlLine, send=send):
        return attempt(lambda: relay.send(weights(NEW), 2, step=NEW))


@pytest.mark.parametrize("name", ["from itself", "back to the sender", "notes to nobody"])
def test_a_receiver_does_not_follow_a_chain_that_cannot_be(pool4: Any, name: str) -> None:
    ours, _, theirs, _ = pool4.run(gone_astray, name, fresh_group=True)
    assert theirs.error == "RemoteProtocolError" and theirs.weights == OLD
    assert ours.error == "PeerLostError" and max(ours.seconds, theirs.seconds) < TIMEOUT / 2


def withholds(rank: int, group: Any, name: str) -> Any:
    """The sender tells the first of the chain wrong digests, too many of them, or none."""
    timeout = 8.0
    relay = tr.Relay(group, timeout=timeout, chunk_bytes=CHUNK, route="group", join_window=3.0)
    if rank == 3:
        return None
    if rank:
        live = weights(OLD)
        return received(relay, 0, live, OLD, NEW, timeout)
    original = ControlLine.send

    def send(self: ControlLine, message: wire.Message) -> None:
        if isinstance(message, wire.Hashes):
            if name == "none":
                return
            if name == "too many":
                message = wire.Hashes(message.first, message.digests * 100)
            if name == "wrong":
                message = wire.Hashes(message.first, (b"x" * 16,) * len(message.digests))
        original(self, message)

    with patched(ControlLine, send=send):
        return attempt(lambda: relay.send(weights(NEW), [1, 2], step=NEW))


@pytest.mark.parametrize("name", ["none", "too many", "wrong"])
def test_digests_that_are_withheld_or_wrong_hang_nobody(pool4: Any, name: str) -> None:
    _, one, two, _ = pool4.run(withholds, name, fresh_group=True)
    for out in (one, two):
        assert out.weights in (OLD, NEW) and out.seconds < 12, out
        assert (out.error is None) == (out.weights == NEW), out
    if name == "too many":
        assert one.error == "RemoteProtocolError"
    if name == "wrong":
        assert two.weights == NEW  # the sender feeds it
