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
import torch.distributed as dist

import torchrelay as tr
from tests.support.faults import CHUNK, Outcome, attempt, received, same, weights
from tests.support.messages import altering, read_as
from tests.support.ways import patched
from torchrelay.deadlines import Deadline
from torchrelay.geometry.runs import Runs
from torchrelay.transports.routes.host import claims
from torchrelay.transports.routes.host.claims import Claimant, Proof, claim
from torchrelay.transports.routes.host.facts import MemoryFacts, MemoryTable
from torchrelay.transports.routes.memory import MemoryService
from torchrelay.transports.routes.outgoing import Outgoing
from torchrelay.transports.routes.route import Unavailable
from torchrelay.transports.routes.tcp import TcpGo
from torchrelay.transports.streams.sockets import DataSocket
from torchrelay.transports.wire.messages import NONCE_BYTES, Digests, Go, Join, NodeAddress, write

OLD, NEW = 100, 1
TIMEOUT = 20.0
NONCE = b"n" * NONCE_BYTES
TRANSFER = b"t" * 16
CLAIM = claim(NONCE, 1, 0, TRANSFER)
ALL_BUT_GROW = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
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
    yield made.claimant.fd
    made.close()


NO_MEMFD, ANOTHER = "the file is not a memfd", "another process has the sender's number"
SHOWN: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[int]], str]] = {
    "its claim": (lambda: proof(CLAIM), ""),
    "a FIFO": (fifo, NO_MEMFD),
    "a device": (lambda: contextlib.nullcontext(os.open("/dev/zero", os.O_RDONLY)), NO_MEMFD),
    "a socket": (lambda: contextlib.nullcontext(os.pipe()[0]), NO_MEMFD),
    "a file": (lambda: on_disk(None), NO_MEMFD),
    "a file in shared memory": (lambda: on_disk("/dev/shm"), NO_MEMFD),
    "what can be changed": (lambda: memfd(CLAIM), ANOTHER),
    "what can grow": (lambda: memfd(CLAIM, ALL_BUT_GROW), ANOTHER),
    "another rank's claim": (lambda: proof(claim(NONCE, 2, 0, TRANSFER)), ANOTHER),
    "a claim for another reader": (lambda: proof(claim(NONCE, 1, 2, TRANSFER)), ANOTHER),
    "a claim of another transfer": (lambda: proof(claim(NONCE, 1, 0, b"u" * 16)), ANOTHER),
    "an older claim": (lambda: proof(claim(b"o" * 16, 1, 0, TRANSFER)), ANOTHER),
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
            told[0] = Claimant(os.getpid(), fd, 0) if rank == 1 else None
            dist.broadcast_object_list(told, 1, group=group)
            if rank == 0:
                begun = time.monotonic()
                found[name] = claims.cannot_open(told[0], CLAIM), time.monotonic() - begun
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
    assert "this process itself" in claims.cannot_open(mine.claimant, CLAIM)
    there = threading.Event()
    thread = threading.Thread(target=there.wait, daemon=True)
    thread.start()
    by_thread = mine.claimant._replace(pid=thread.native_id)  # the kernel reads by these too
    assert "this process itself" in claims.cannot_open(by_thread, CLAIM)
    there.set()
    mine.close()


def test_a_process_of_another_user_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everybody; what others say of their user does not count."""
    monkeypatch.setattr(claims, "_users", lambda pid: (os.getuid() + 1, os.getuid() + 1))
    mine = Proof(CLAIM)
    monkeypatch.setattr(os, "access", lambda *_: False)  # as if it were another process
    assert "another user" in claims.cannot_open(mine.claimant, CLAIM)
    mine.close()


def test_the_user_of_a_process_is_what_the_kernel_says() -> None:
    assert claims._users(os.getpid()) == (os.getuid(), os.geteuid())


# A sender that names memory which is not its own


def secret_here(group: Any, owner: int) -> tuple[Claimant, Any]:
    """Where `owner` has something that nobody else should see."""
    buffer = ctypes.create_string_buffer(SECRET)
    told: list[Any] = [Claimant(os.getpid(), 0, ctypes.addressof(buffer))]
    dist.broadcast_object_list(told, owner, group=group)
    return told[0], buffer


@contextlib.contextmanager
def naming(victim: Claimant, fd: int | None) -> Iterator[None]:
    """Within: this sender says that its state lies in the victim's secret."""
    offer, table = MemoryService.offer, MemoryService.table

    def lied(self: MemoryService, outgoing: Outgoing) -> bytes | Unavailable:
        said = offer(self, outgoing)
        assert isinstance(said, bytes)
        true = read_as(MemoryFacts, said)
        return write(
            msgspec.structs.replace(
                true,
                location=msgspec.structs.replace(true.location, pid=victim.pid),
                beacon=victim.beacon,
                fd=true.fd if fd is None else fd,
            )
        )

    def there(self: MemoryService, outgoing: Outgoing) -> MemoryTable:
        size = min(outgoing.snapshot.chunks.stream_bytes, len(SECRET))
        memory = Runs([0], [victim.beacon], [size]).pack()
        return msgspec.structs.replace(table(self, outgoing), host=memory)

    with patched(MemoryService, offer=lied, table=there):
        yield


def steals(rank: int, group: Any, owner: int, shown: bool) -> Any:
    """Rank 0 points rank 1 at the memory of `owner`; `shown`: at a claim that is there, too."""
    victim, buffer = secret_here(group, owner)
    made = Proof(claim(NONCE, owner, 1, TRANSFER)) if rank == owner else None
    told: list[Any] = [made.claimant.fd if made is not None else 0]
    dist.broadcast_object_list(told, owner, group=group)
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    result = None
    if rank == 0:
        with naming(victim, told[0] if shown else None):
            relay.send(weights(NEW), 1)
    elif rank == 1:
        got = relay.recv(0)
        result = same(got.state, weights(NEW)), got.report.route, got.report.instead["memory"]
    dist.barrier(group)
    del buffer, made
    return result


@pytest.mark.parametrize("shown", [True, False])
def test_a_receiver_does_not_read_itself_on_a_senders_word(pool4: Any, shown: bool) -> None:
    right, route, why = pool4.run(steals, 1, shown)[1]
    assert right and route == "tcp" and "this process itself" in why


@pytest.mark.parametrize("shown", [True, False])
def test_a_receiver_does_not_read_a_third_process_on_a_senders_word(
    pool4: Any, shown: bool
) -> None:
    right, route, why = pool4.run(steals, 2, shown)[1]
    assert right and route == "tcp"
    # Whichever file of the third process has the number.
    assert any(reason in why for reason in (ANOTHER, NO_MEMFD, "No such file"))


def test_no_receiver_tells_where_its_memory_is() -> None:
    """A receiver joins before it knows who answers: it says a nonce, by which others are read."""
    fields = ("step", "parts", "location", "nonce", "fd", "committed", "address")
    assert Join.__struct_fields__ == fields


# A chain in which one rank lies to the next


class Passed:
    """What this process sends as chunks: the tail of each."""

    def __init__(self, spoils: bool) -> None:
        self.tails: list[bytes] = []
        self._spoils = spoils

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        original = DataSocket.send_chunk

        def send_chunk(
            sock: DataSocket, index: int, data: memoryview, *args: Any, **how: Any
        ) -> Any:
            self.tails.append(bytes(data[-64:]))
            if self._spoils:
                data = memoryview(b"\x5a" * data.nbytes)
            return original(sock, index, data, *args, **how)

        with patched(DataSocket, send_chunk=send_chunk):
            yield


def in_a_chain(rank: int, group: Any) -> Any:
    """0 sends to 1, 2, 3. Rank 1 passes on to rank 2 what it did not get."""
    passed = Passed(spoils=rank == 1)
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK, join_window=5.0, route="tcp")
    with passed.watch():
        if rank == 0:
            report = relay.send(weights(NEW), [1, 2, 3])
            return report.receivers, report.failed, len(passed.tails)
        got = relay.recv(0)
    spoilt = sum(tail == b"\x5a" * len(tail) for tail in passed.tails)
    return same(got.state, weights(NEW)), spoilt, len(passed.tails)


def test_what_is_not_right_is_not_passed_on(pool4: Any) -> None:
    ours, first, second, third = pool4.run(in_a_chain, fresh_group=True)
    assert ours[0] == (1, 2, 3) and ours[1] == {}
    assert first[0] and second[0] and third[0]
    assert first[2] > 0 and second[2] > 0 and not second[1]  # rank 2 passes on what is right


# A chain that is none


def astray(go: TcpGo, name: str, receiver: NodeAddress) -> TcpGo:
    nobody = NodeAddress(b"n" * 16, "127.0.0.1", 1)
    upstream, ticket = {"from itself": (receiver, None), "from nobody": (nobody, None)}.get(
        name, (None, (b"t" * 16, b"k" * 32))
    )
    return msgspec.structs.replace(go, upstream=upstream, downstream=ticket)


def gone_astray(rank: int, group: Any, name: str) -> Any:
    """Rank 2 is told to take its chunks from a rank that has none, or to pass them on to one that
    never comes."""
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK, route="tcp")
    if rank == 2:
        live = weights(OLD)
        out = received(relay, 0, live, OLD, NEW, TIMEOUT / 2)
        return out, received(relay, 0, live, OLD, 2, TIMEOUT)
    if rank != 0:
        return None

    def alter(message: Any) -> Any:
        if not isinstance(message, Go):
            return message
        receiver = relay._member().meeting.directory.find(2, Deadline(TIMEOUT)).address
        return Go(write(astray(read_as(TcpGo, message.data), name, receiver)))

    with altering(alter):
        out = attempt(lambda: relay.send(weights(NEW), 2, step=NEW, timeout=TIMEOUT / 2))
    return out, attempt(lambda: relay.send(weights(2), 2, step=2))


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(f"from {who}", marks=pytest.mark.slow) for who in ("itself", "nobody")),
        "to nobody",
    ],
)
def test_a_chain_that_cannot_be_leaves_old_or_new_weights_in_time(pool4: Any, name: str) -> None:
    (ours, after), _, (theirs, again), _ = pool4.run(gone_astray, name, fresh_group=True)
    assert theirs.weights == (OLD if theirs.error else NEW), theirs
    assert max(ours.seconds, theirs.seconds) < TIMEOUT / 2 + 2
    assert after.error is None and again.weights == 2


# Digests


def lies_about_digests(rank: int, group: Any, name: str) -> Outcome | None:
    """The sender of two that read its memory tells digests that are wrong, too many, or none."""
    timeout = 4.0 if name == "none" else 8.0
    relay = tr.Relay(group, timeout=timeout, chunk_bytes=CHUNK, verify="all", join_window=3.0)
    if rank == 3:
        return None
    if rank:
        return received(relay, 0, weights(OLD), OLD, NEW, timeout - 2)

    def alter(message: Any) -> Any:
        if not isinstance(message, Digests):
            return message
        count = len(message.chunks)
        return {
            "none": None,
            "too many": Digests(message.chunks, message.digests * 100),
            "not asked for": Digests(tuple(range(1000, 1000 + count)), message.digests),
            "wrong": Digests(message.chunks, b"x" * (16 * count)),
        }[name]

    with altering(alter):
        return attempt(lambda: relay.send(weights(NEW), [1, 2], step=NEW))


DIGESTS = {
    "none": "TransferTimeoutError",
    "too many": "RemoteProtocolError",
    "not asked for": "RemoteProtocolError",
    "wrong": "DigestError",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_digests_that_are_withheld_or_wrong_hang_nobody(pool4: Any, name: str) -> None:
    ours, one, two, _ = pool4.run(lies_about_digests, name, fresh_group=True)
    for out in (one, two):
        assert out.error == DIGESTS[name] and out.weights == OLD, out
        assert out.seconds < 12 and ours.seconds < 12, out
