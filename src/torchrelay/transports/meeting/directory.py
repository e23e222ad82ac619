"""Where the ranks of a group are found: each publishes an `Identity` and looks up the others'.

They do so in a store: the group's, or one that the caller names. A library that has its own way to
hand identities around (torchft's metadata) passes them in.
"""

from __future__ import annotations

import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

import msgspec
import torch.distributed as dist
import xxhash
from msgspec import Meta

from torchrelay.coordination.group_store import pause_after
from torchrelay.coordination.groups import store_of
from torchrelay.deadlines import TICK, Deadline
from torchrelay.errors import DigestError, PeerLostError, RemoteProtocolError, TransferTimeoutError
from torchrelay.machine import machine
from torchrelay.memory import threads
from torchrelay.memory.idle import idle_memory, processes_by_hint
from torchrelay.transports.c10d import inside_backend
from torchrelay.transports.wire import handshake
from torchrelay.transports.wire.messages import Id, Key, Name, NodeAddress


class Identity(msgspec.Struct, array_like=True, frozen=True):
    """How to reach a process and be admitted. A process that has it is trusted as a group member.

    `node` tells the groups of a process apart; the process knows itself by it. Behind the fields
    comes their digest.
    """

    version: Annotated[int, Meta(ge=0, le=1 << 16)]
    host: Name
    port: Annotated[int, Meta(ge=1, le=0xFFFF)]
    node: Id
    token: Key

    def encode(self) -> bytes:
        return msgspec.msgpack.encode([*msgspec.structs.astuple(self), _digest(self)])

    @property
    def address(self) -> NodeAddress:
        """How to reach the process, without what admits a caller."""
        return NodeAddress(self.node, self.host, self.port)

    def as_text(self) -> str:
        return urlsafe_b64encode(self.encode()).decode()


def _digest(identity: Identity) -> bytes:
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode(identity))


_fields = msgspec.msgpack.Decoder(list[Any])
_identity = msgspec.msgpack.Decoder(Identity)


def read_identity(data: bytes, rank: int) -> Identity:
    """`RemoteProtocolError` for bytes that no process of this version published, `DigestError` for
    bytes that changed on their way."""
    try:
        version, *_, digest = _fields.decode(data)
        if version == handshake.VERSION:
            found = _identity.decode(data)
            if digest != _digest(found):
                text = f"the identity of rank {rank} has other bytes than were published"
                raise DigestError(f"{text}: check the network", rank=rank)
            return found
    except (msgspec.MsgspecError, ValueError, LookupError, RecursionError) as fault:
        raise RemoteProtocolError(f"an unreadable identity: {fault}", rank=rank) from None
    raise RemoteProtocolError(
        f"rank {rank} speaks wire version {version}, this side {handshake.VERSION}: use the same "
        "version of torchrelay on both sides",
        rank=rank,
    )


def identity_from_text(text: str, rank: int) -> Identity:
    try:
        data = urlsafe_b64decode(text.encode())
    except ValueError:
        data = b""
    return read_identity(data, rank)


class Directory:
    """The identities of ranks, as it was given them. Threads may share it."""

    def __init__(self) -> None:
        self._found: dict[int, Identity] = {}

    def give(self, rank: int, identity: Identity) -> None:
        self._found[rank] = identity

    def find(self, rank: int, deadline: Deadline) -> Identity:
        """`TransferTimeoutError` if the rank has published nothing by the deadline."""
        return self._found[rank]

    def knows(self, rank: int) -> bool:
        """Whether a rank has published its identity, as far as can be said without waiting."""
        return rank in self._found

    def forget(self, rank: int) -> None:
        """The address that was found did not work: look it up again next time."""


def _wait_until(found: Callable[[], bool], rank: int, deadline: Deadline, waiting: int) -> None:
    """Look again and again; `TransferTimeoutError` if it is not so by the deadline. `waiting`: how
    many ranks may do so at once."""
    begun = time.monotonic()
    while not found():
        if deadline.passed:
            raise TransferTimeoutError(
                f"timed out: rank {rank} made no Relay on this group within {deadline.seconds:.3g} "
                "s (a sender that uses torch's PGTransport is received with "
                "torchrelay.dropin.PGTransport)"
            )
        time.sleep(min(pause_after(time.monotonic() - begun, waiting), deadline.left()))


class StoreDirectory(Directory):
    """Identities in the store of a group."""

    def __init__(self, store: Any, rank: int, size: int = 1) -> None:
        super().__init__()
        self._store: Any = dist.PrefixStore("torchrelay/ranks", store)  # type: ignore[attr-defined]
        self._rank, self._size = rank, size
        self.processes_here = size  # at most, as far as the store has said

    def publish(self, identity: Identity) -> None:
        """Let the other ranks find this process."""
        self._count(1)
        self._store.set(str(self._rank), identity.encode())
        idle_memory.count_by(self)

    def _count(self, more: int) -> None:
        """Count processes of the group in the store: `more` of them have published an identity.

        Of 8 ranks 5 have, 2 of them on this host: there are at most 2 + 3 here.
        """
        # Each counts on its host first, and looks there last: whoever is known of is counted there.
        key = f"published on {machine()}"
        if more:
            self._store.add(key, more)
        everywhere = self._store.add("published", more)
        here = self._store.add(key, 0)
        unknown = max(0, self._size - everywhere)
        # torchrun says how many it has started here; some may have published nothing yet.
        self.processes_here = max(here, min(here + unknown, processes_by_hint() or self._size))

    def knows(self, rank: int) -> bool:
        with suppress(dist.DistError):
            return super().knows(rank) or bool(self._store.check([str(rank)]))
        return False

    def forget(self, rank: int) -> None:
        self._found.pop(rank, None)

    def find(self, rank: int, deadline: Deadline) -> Identity:
        if (found := self._found.get(rank)) is not None:
            return found
        answers: list[Any] = []

        def look() -> None:
            key = str(rank)
            try:
                with inside_backend():
                    # Not by the store's own wait, which keeps all other users of it waiting.
                    is_there = partial(self._store.check, [key])
                    _wait_until(is_there, rank, deadline, waiting=self._size)
                    published = bytes(self._store.get(key))
                    self._count(0)
                    answers.append(published)
            except Exception as fault:
                answers.append(fault)

        # A store that is out of reach does not answer for minutes. The thread that asks it is left
        # behind then.
        looking = threads.run_anyway(look, "worker")
        try:
            while not looking.wait(TICK):
                if deadline.passed and not looking.wait(TICK):
                    raise TransferTimeoutError(
                        f"timed out: the group's store did not say where rank {rank} is; can the "
                        "host of the store be reached?"
                    )
        except BaseException:
            deadline.hasten(0.0)  # the call is over, whatever ended it
            raise
        (answer,) = answers
        if isinstance(answer, dist.DistError):
            raise PeerLostError(
                f"the group's store does not say where rank {rank} is: {answer}; has the process "
                "that hosts the store ended?"
            ) from answer
        if isinstance(answer, Exception):
            raise answer
        found = read_identity(answer, rank)
        self.give(rank, found)
        return found  # another call may have forgotten it by now


def directory_of(group: Any, store: Any = None) -> StoreDirectory:
    """Where the ranks of a group find each other: in this store, or in the group's own.
    `UsageError` if there is neither."""
    return StoreDirectory(store_of(group, store), group.rank(), group.size())
