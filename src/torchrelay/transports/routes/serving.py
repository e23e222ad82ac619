"""The sender's part where receivers on its machine take the bytes themselves.

It says where they lie and keeps them there. What a receiver cannot read where it lies is put into a
ring of shared buffers, a chunk at a time, as the receiver asks for it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import cached_property
from operator import itemgetter

import torch

from torchrelay.memory import vectors
from torchrelay.memory.pool import cores
from torchrelay.memory.side import in_use, on_side_stream, side_stream
from torchrelay.plan.region import Region
from torchrelay.plan.snapshot import Snapshot
from torchrelay.transports.group.lines import Line
from torchrelay.transports.protocol import wire
from torchrelay.transports.routes import place
from torchrelay.transports.routes.choice import compares
from torchrelay.transports.routes.cuda_ipc import Exports, IpcError, packed_sums, word_sums
from torchrelay.transports.routes.ring import Rings, SharedRing
from torchrelay.transports.transfer.worker import Worker

FILLERS = 8  # threads that fill slots, at most


class Serving:
    """One state, offered to the receivers of one `send`."""

    def __init__(
        self, snapshot: Snapshot, rings: Rings, exports: Exports, *, verify: bool | None
    ) -> None:
        self._snapshot, self._rings, self._exports = snapshot, rings, exports
        self.verify = compares("host", verify)
        self._sum_up = compares("cuda_ipc", verify)
        self._chunks = snapshot.chunks
        self._lent: dict[int, SharedRing] = {}
        self._filling: set[tuple[int, int]] = set()  # rank and slot
        self._here = place.here()
        self._proofs: list[place.Proof] = []
        self._worker: Worker | None = None
        self._sums: list[torch.Tensor] | None = None
        self.filled_bytes = 0

    def get_ready(self) -> None:
        """Find out where things are, while nobody has asked yet."""
        self._host, self._apart, self._exported  # noqa: B018

    def memory(self, join: wire.Join, line: Line) -> wire.Memory:
        """Where the bytes lie, for a receiver that has joined; the least where it is elsewhere."""
        elsewhere = wire.Memory(self._here)
        if place.apart(self._here, join.place) or not join.nonce:
            return elsewhere
        me, them = line.group.rank(), line.peer
        try:
            proof = place.Proof(place.claim(join.nonce, me, them, line.transfer))
        except OSError:
            return elsewhere
        self._proofs.append(proof)
        exports, pieces, strays, why = self._exported
        if exports:
            # A handle opens memory without asking the kernel who it is that does.
            receiver = place.Process(join.place.pid, join.fd, 0)
            claim = place.claim(join.nonce, them, me, line.transfer)
            if place.cannot_open(receiver, claim):
                exports, pieces = (), ()
                why = "the sender cannot make sure that this process is of its user"
        return wire.Memory(
            self._here,
            proof.process.beacon,
            proof.process.fd,
            self._host,
            self._apart,
            self.verify,
            self._sum_up,
            exports,
            pieces,
            strays,
            why,
        )

    @cached_property
    def _host(self) -> bytes:
        return self._snapshot.stream.host.pack()

    @cached_property
    def _apart(self) -> tuple[int, ...]:
        """The chunks that have bytes where no address leads to them."""
        stream = self._snapshot.stream
        far = ((at, tensor.nbytes) for at, tensor in stream.far)
        return self._chunks_of([*far, *((at, region.nbytes) for at, region in stream.regions)])

    def _chunks_of(self, stretches: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        found: set[int] = set()
        offsets = self._chunks.offsets
        for at, nbytes in stretches:
            first = max(bisect_right(offsets, at) - 1, 0)
            found.update(range(first, bisect_left(offsets, at + nbytes)))
        return tuple(sorted(found))

    @cached_property
    def _exported(
        self,
    ) -> tuple[tuple[wire.Export, ...], tuple[wire.Piece, ...], tuple[int, ...], str]:
        """Device memory for receivers to open: exports, pieces, strays, or why there are none."""
        strays = self._chunks_of((at, region.nbytes) for at, region in self._pieces[1])
        if not self._pieces[0]:
            return (), (), strays, "no contiguous tensor of the state is on a GPU"
        try:
            exports, pieces = self._exports.of(self._pieces[0])
        except IpcError as fault:
            return (), (), strays, str(fault)
        return exports, pieces, strays, ""

    def start_sums(self) -> None:
        """Sum up device memory, for receivers that open it. Beside everything else."""
        if self._sum_up and self._sums is None:
            with side_stream():
                self._sums = word_sums(self._far, self._exports.tables)

    def sums(self) -> bytes:
        """Of each piece; waits for the device."""
        if self._sums is None:
            return b""
        with side_stream():
            return packed_sums(self._far, self._sums)

    @property
    def _far(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in self._pieces[0]]

    @cached_property
    def _pieces(self) -> tuple[list[tuple[int, torch.Tensor]], list[tuple[int, Region]]]:
        """Contiguous memory of GPUs, in the order of the stream, and what else no address on this
        host leads to."""
        stream = self._snapshot.stream
        found, others = list(stream.far), []
        for at, region in stream.regions:
            run = region.run(0, region.nbytes) if region.keep.is_cuda else None
            if run is None:
                others.append((at, region))
            else:
                found.append((at, run))
        return sorted(found, key=itemgetter(0)), others

    def open_ring(self, rank: int) -> wire.Ring:
        """A ring for one receiver. `MemoryError` if there is no memory for it."""
        ring = self._rings.take(max(self._chunks.sizes), len(self._chunks), pinned=in_use())
        self._lent[rank] = ring
        return ring.record

    def fill(self, line: Line, wanted: wire.Fill) -> bool:
        """Put a chunk into a slot and say so; whether both exist and the slot is free."""
        ring = self._lent.get(line.peer)
        if ring is None or not (
            0 <= wanted.slot < ring.record.slots and 0 <= wanted.chunk < len(self._chunks)
        ):
            return False
        place_in_ring = line.peer, wanted.slot
        if place_in_ring in self._filling:
            return False
        self._filling.add(place_in_ring)
        if self._worker is None:
            self._worker = Worker(min(cores(), FILLERS), niceness=0)
        size = self._chunks.sizes[wanted.chunk]
        slot = ring.slot(wanted.slot, size)

        def put() -> None:
            try:
                with on_side_stream():
                    self._snapshot.read(wanted.chunk, slot, vectors.copy)
            except Exception as fault:
                line.send(wire.Abort(wire.text(f"a chunk could not be read: {fault}")))
            else:
                self._filling.discard(place_in_ring)
                line.send(wire.Filled(wanted.chunk, wanted.slot))

        self.filled_bytes += size
        self._worker.submit(put)
        return True

    def close(self) -> None:
        """Nobody is served any more."""
        if self._worker is not None:
            self._worker.stop()
        for ring in self._lent.values():
            self._rings.give(ring)
        self._lent.clear()
        for proof in self._proofs:
            proof.close()
