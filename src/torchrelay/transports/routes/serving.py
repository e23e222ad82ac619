"""The sender's part where receivers on its machine take the bytes themselves.

It says where they lie and keeps them there. What a receiver cannot read where it lies is put into a
ring of shared buffers, a chunk at a time, as the receiver asks for it.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from torchrelay.geometry.runs import Runs, reached
from torchrelay.memory import vectors
from torchrelay.memory.pool import cores
from torchrelay.memory.side import in_use, on_side_stream
from torchrelay.plan.snapshot import Snapshot
from torchrelay.transports.group.lines import ControlLine
from torchrelay.transports.protocol import wire
from torchrelay.transports.routes import place
from torchrelay.transports.routes.choice import compares
from torchrelay.transports.routes.cuda_ipc import Exports, IpcError
from torchrelay.transports.routes.device_digests import DeviceDigests
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
        self._hash_devices = compares("cuda_ipc", verify)
        self._chunks = snapshot.chunks
        self._lent: dict[int, SharedRing] = {}
        self._filling: set[tuple[int, int]] = set()  # rank and slot
        self._here = place.here()
        self._proofs: list[place.Proof] = []
        self._worker: Worker | None = None
        self._digests: DeviceDigests | None = None
        self.filled_bytes = 0

    def get_ready(self) -> None:
        """Find out where things are, while nobody has asked yet."""
        self._host, self._apart, self._exported  # noqa: B018
        if self._exports.taken and self._exported[0]:
            self.start_digests()  # it will be so again

    def memory(self, join: wire.Join, line: ControlLine) -> wire.Memory:
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
        exports, device, strays, why = self._exported
        if exports:
            # A handle opens memory without asking the kernel who it is that does.
            receiver = place.Process(join.place.pid, join.fd, 0)
            claim = place.claim(join.nonce, them, me, line.transfer)
            if place.cannot_open(receiver, claim):
                exports, device = (), b""
                why = "the sender cannot make sure that this process is of its user"
        return wire.Memory(
            self._here,
            proof.process.beacon,
            proof.process.fd,
            self._host,
            self._apart,
            self.verify,
            self._hash_devices,
            exports,
            device,
            strays,
            why,
        )

    @cached_property
    def _host(self) -> bytes:
        return self._snapshot.stream.host.pack()

    @cached_property
    def _apart(self) -> tuple[int, ...]:
        """The chunks that have bytes where no address leads to them."""
        device, others = self._device
        return self._chunks_of(Runs.merged(device.stretches, others))

    def _chunks_of(self, memory: Runs) -> tuple[int, ...]:
        offsets = np.array(self._chunks.offsets, np.uint64)
        first = np.searchsorted(offsets, memory.starts, side="right") - 1
        last = np.searchsorted(offsets, memory.stops - np.uint64(1), side="right") - 1
        return tuple(np.flatnonzero(reached(first, last, len(offsets))).tolist())

    @cached_property
    def _exported(self) -> tuple[tuple[wire.Export, ...], bytes, tuple[int, ...], str]:
        """Device memory for receivers to open: exports, what lies in them, strays, or why there
        are none."""
        device, others = self._device
        strays = self._chunks_of(others)
        if not len(device.starts):
            return (), b"", strays, "no contiguous tensor of the state is on a GPU"
        try:
            exports, packed = self._exports.of(device)
        except IpcError as fault:
            return (), b"", strays, str(fault)
        return exports, packed, strays, ""

    def start_digests(self) -> None:
        """Hash device memory, for receivers that open it. Beside everything else."""
        if self._hash_devices and self._digests is None:
            self._digests = self._exports.grid.digests(self._device[0], self._chunks.stream_bytes)

    def device_digests(self) -> bytes:
        """Of all that receivers have opened; waits for the device."""
        self._exports.taken = True
        return b"" if self._digests is None else self._digests.packed()

    @cached_property
    def _device(self) -> tuple[Runs, Runs]:
        """Contiguous memory of GPUs, and which bytes of the stream lie elsewhere where no address
        of this host leads."""
        stream = self._snapshot.stream
        found, others = [], []
        for at, region in stream.regions:
            run = region.run(0, region.nbytes) if region.keep.is_cuda else None
            if run is None:
                others.append((at, at, region.nbytes))
            else:
                found.append((at, run.data_ptr(), run.nbytes))
        device = Runs.merged(stream.device, Runs.of(found)) if found else stream.device
        return device, Runs.of(others)

    def open_ring(self, rank: int) -> wire.Ring:
        """A ring for one receiver. `MemoryError` if there is no memory for it."""
        ring = self._rings.take(max(self._chunks.sizes), len(self._chunks), pinned=in_use())
        self._lent[rank] = ring
        return ring.record

    def fill(self, line: ControlLine, wanted: wire.Fill) -> bool:
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
