"""Route "cuda_ipc": the receiver opens the sender's GPU memory and copies it itself.

Bytes that are not in GPU memory at both ends come as on route "memory".
"""

from __future__ import annotations

import msgspec
import torch

from torchrelay.geometry.runs import Moves, Runs, moves
from torchrelay.memory.gpu import kernels
from torchrelay.memory.gpu.kernels import CudaError
from torchrelay.memory.gpu.side import side_stream
from torchrelay.transports.routes import route as r
from torchrelay.transports.routes.cuda.handles import Exported, Openings, Sources
from torchrelay.transports.routes.host import claims
from torchrelay.transports.routes.host.chunk_paths import ChunkPath
from torchrelay.transports.routes.host.facts import MemoryTable, Reachable, reach, read_facts
from torchrelay.transports.routes.memory import MemoryFetch, MemoryService
from torchrelay.transports.routes.outgoing import Outgoing
from torchrelay.transports.wire import messages as m


class CudaService(MemoryService):
    """Exports device memory. The sender's devices hash it while the receiver copies it."""

    def offer(self, outgoing: Outgoing) -> bytes | r.Unavailable:
        receiver = self._receiver
        if self.is_elsewhere:
            return super().offer(outgoing)
        try:
            outgoing.exported  # noqa: B018  # whether it can be
        except CudaError as fault:
            return r.Unavailable(str(fault))
        # A handle opens memory without asking the kernel whose process does: so this side asks.
        claimant = claims.Claimant(receiver.join.location.pid, receiver.join.fd, 0)
        claim = claims.claim(receiver.join.nonce, receiver.rank, receiver.member.rank, bytes(16))
        if claims.cannot_open(claimant, claim):
            return r.Unavailable("the sender cannot make sure that this process is of its user")
        return super().offer(outgoing)

    def table(self, outgoing: Outgoing) -> MemoryTable:
        if not len(outgoing.device.starts):  # a receiver's reads may be of host memory alone
            return super().table(outgoing)
        try:
            exported = outgoing.exported
        except CudaError as fault:
            raise r.RouteFault(str(fault)) from fault
        return msgspec.structs.replace(
            super().table(outgoing),
            device=exported.device,
            exports=exported.exports,
            unexported=m.to_ranges(list(outgoing.unexported)),
        )


class CudaFetch(MemoryFetch):
    """Copies device memory to device memory itself; the rest comes as on route "memory"."""

    def __init__(self, incoming: r.Incoming, reachable: Reachable) -> None:
        super().__init__(incoming, reachable)
        self._digests = self.verified = incoming.offer.verify
        self._opened: Sources = {}

    def _plan(self, table: MemoryTable) -> None:
        openings = self._incoming.member.resources.of(Openings)
        theirs = Exported(table.exports, table.device)
        try:
            opening = openings.borrowed(self._talk.process, theirs, self._chunks.stream_bytes)
            self._opened = self._open.enter_context(opening)
        except CudaError as fault:
            raise self._wrong(str(fault)) from fault
        self._exported = Runs.merged(*(runs.stretches for runs in self._opened.values()))
        self._hashed = frozenset(self._on_gpu) if self._digests else None
        super()._plan(table)

    def _compared(self) -> list[int]:
        return [*super()._compared(), *(self._on(ChunkPath.OPENED) if self._digests else ())]

    def _read_chunks(self, chunks: list[int]) -> None:
        super()._read_chunks(chunks)
        self._copy_device_memory([i for i in sorted(chunks) if self._paths[i] is ChunkPath.OPENED])

    def _copy_device_memory(self, chunks: list[int]) -> None:
        """Returns when all of it is in its place, and hashed if it should be."""
        for here, ours in kernels.by_device(self._of(self._places.device, chunks)).items():
            mine = sorted(self._on_gpu.on(here).intersection(chunks))
            same_device = self._opened.get(here)
            with torch.cuda.device(here), side_stream() as stream:
                both = None if same_device is None else moves(same_device, ours)
                if self._digests and both is not None and len(self._opened) == 1:
                    hashed = self._copied_and_hashed(both, mine, here)
                else:
                    hashed = False
                    for there, theirs in self._opened.items():
                        kernels.copy_one_by_one(moves(theirs, ours), there, here)
                stream.synchronize()
            if self._digests and not hashed:
                self._mine |= self._on_gpu.digests(mine)
            self.messages += len(ours.starts)
            self._count(int((ours.stops - ours.starts).sum()))

    def _copied_and_hashed(self, both: Moves, chunks: list[int], device: int) -> bool:
        """Copy within a device and hash on the way, if that is faster than one after the other."""
        if kernels.kernels(device) is None or not kernels.in_words(both):
            kernels.copy(both, device)
            return False
        offsets, sizes = self._chunks.offsets, self._chunks.sizes
        starts, lengths = [offsets[i] for i in chunks], [sizes[i] for i in chunks]
        sources = Runs(both.positions, both.sources, both.nbytes)
        to = Runs(both.positions, both.destinations, both.nbytes)
        made = kernels.digests_of(sources, starts, lengths, device, to)
        self._mine.update(zip(chunks, made, strict=True))
        return True


def _fetch(facts: bytes, incoming: r.Incoming) -> CudaFetch | r.Unavailable:
    found = reach(read_facts(facts), incoming)
    if isinstance(found, r.Unavailable):
        return found
    if not incoming.target.on_device:
        return r.Unavailable("the destination is in host memory")
    return CudaFetch(incoming, found)


ROUTE = r.Route(
    "cuda_ipc",
    CudaService,
    _fetch,
    reads=True,
    of_gpus=True,
    in_offer=True,
    comparison=r.DigestComparison.BY_DEFAULT,
)
