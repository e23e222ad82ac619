"""The messages of route "memory" that say where bytes lie, and whether this process reaches them.

Route "cuda_ipc" has the same ones, with a table of device memory in addition.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from torchrelay.transports.routes import route as r
from torchrelay.transports.routes.cuda.handles import MAX_EXPORTS, Export
from torchrelay.transports.routes.host import claims, location
from torchrelay.transports.routes.host.claims import Claimant
from torchrelay.transports.wire import messages as m


class MemoryTable(msgspec.Struct, array_like=True, frozen=True):
    """Where the bytes of a state lie in the sender's memory: on the host, and on route "cuda_ipc"
    in exported GPU memory."""

    host: m.Blob = b""  # `geometry.runs.Runs.pack`
    elsewhere: m.ChunkRanges = ()  # chunks that have bytes on a device, or strided
    device: m.Blob = b""  # `handles.pack`
    exports: Annotated[tuple[Export, ...], Meta(max_length=MAX_EXPORTS)] = ()
    unexported: m.ChunkRanges = ()  # of `elsewhere`: chunks that have bytes in no export


class MemoryFacts(msgspec.Struct, array_like=True, frozen=True):
    """Where the sender's process is.

    Its claim (`claims.claim`) is at address `beacon` of its memory and in its file `fd`: a receiver
    that finds it there reads the process of the rank that it talks to.
    """

    location: m.ProcessLocation
    beacon: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    fd: m.Descriptor = -1
    verify: bool = False  # digests are compared
    table: MemoryTable = MemoryTable()  # of all of the state

    @property
    def claimant(self) -> Claimant:
        return Claimant(self.location.pid, self.fd, self.beacon)


read_facts, read_table = m.reader(MemoryFacts), m.reader(MemoryTable)


class Reachable(NamedTuple):
    """The sender's process, which is on this machine and is the one that it says it is."""

    facts: MemoryFacts
    reads: bool  # its memory can be read where it lies


def reach(facts: MemoryFacts, incoming: r.Incoming) -> Reachable | r.Unavailable:
    """Find out whether the sender's process is on this machine, and can be read."""
    talk = incoming.conversation
    if why := location.unreachable(location.here(), facts.location):
        return r.Unavailable(why)
    incoming.member.resources.watch(talk.process, facts.claimant.pid)
    claim = claims.claim(incoming.nonce, talk.sender, talk.me, incoming.offer.transfer)
    if why := claims.cannot_open(facts.claimant, claim):
        return r.Unavailable(why)
    return Reachable(facts, not claims.cannot_read(facts.claimant, claim))
