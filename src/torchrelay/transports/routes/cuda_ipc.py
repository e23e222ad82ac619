"""Route "cuda_ipc": the receiver opens the sender's GPU memory and copies it itself.

What of a state is not in GPU memory at both ends comes as on route "host".
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from torchrelay.geometry.runs import Runs
from torchrelay.memory.gpu.kernels import by_device
from torchrelay.transports.protocol import wire
from torchrelay.transports.routes.host import (
    HostPull,
    HostServer,
    Memory,
    Ways,
    find_ways,
    reach,
)
from torchrelay.transports.routes.nearby import device_digests, place
from torchrelay.transports.routes.nearby.chunk_ways import stretches
from torchrelay.transports.routes.nearby.device_digests import DeviceDigests, Sources
from torchrelay.transports.routes.nearby.ipc_handles import (
    Export,
    Exported,
    Exports,
    IpcError,
    Openings,
)
from torchrelay.transports.routes.seam import (
    Incoming,
    Line,
    Mover,
    Outgoing,
    Route,
    Server,
    Unavailable,
)

WHICH = b"digests"  # what a receiver says that wants to know them one by one


class DeviceMemory(msgspec.Struct, array_like=True, frozen=True):
    """Device memory of the sender, and what of the state lies elsewhere."""

    memory: Memory  # without its table
    digests: bool = False  # of device memory come with the trailer
    strays: wire.Stretches = ()  # chunks that have bytes elsewhere which no export reaches
    no_exports: wire.Text = ""  # why there are none


class DeviceTables(msgspec.Struct, array_like=True, frozen=True):
    """The fixed part of the offer: what lies where."""

    host: wire.Blob = b""  # as of `Memory`
    device: wire.Blob = b""  # `ipc_handles.pack`
    exports: Annotated[tuple[Export, ...], Meta(max_length=1 << 20)] = ()


class CudaServer(HostServer):
    """Exports device memory, and hashes it beside everything else."""

    name = "cuda_ipc"

    def __init__(self, outgoing: Outgoing) -> None:
        super().__init__(outgoing)
        self._exports = outgoing.resources.of(Exports)
        self._hash_devices = outgoing.options.verify is not False
        self._hash_early = False  # a receiver that has a GPU was told of this one
        self._digests: DeviceDigests | None = None
        self._exported: Exported | str | None = None

    def get_ready(self) -> None:
        if self._exports.taken and isinstance(self._export(), Exported):
            # It will be asked for again; and the device has nothing else to do before it is.
            self._start_digests()

    def _export(self) -> Exported | str:
        """Device memory for receivers to open, or why there is none."""
        if self._exported is None:
            try:
                device = self._layout.device
                found = self._exports.of(device) if len(device.starts) else None
                self._exported = found or "no contiguous tensor of the state is on a GPU"
            except IpcError as fault:
                self._exported = str(fault)
        return self._exported

    def offer(self, join: wire.Join, line: Line) -> wire.RouteOffer | Unavailable:
        memory = Memory(self._here)
        if place.apart(self._here, join.place) or not join.nonce:
            return wire.RouteOffer(msgspec.msgpack.encode(DeviceMemory(memory)))
        found = self._export()
        if isinstance(found, Exported):
            # A handle opens memory without asking the kernel who it is that does.
            receiver = place.Process(join.place.pid, join.fd, 0)
            claim = place.claim(join.nonce, line.peer, line.group.rank(), line.transfer)
            if place.cannot_open(receiver, claim):
                found = "the sender cannot make sure that this process is of its user"
        if isinstance(found, str):
            told = DeviceMemory(memory, no_exports=found)
            return wire.RouteOffer(msgspec.msgpack.encode(told))
        self._hash_early = self._hash_early or bool(join.place.devices)
        memory = self.memory(join, line)
        tables = DeviceTables(memory.host, found.device, found.exports)
        memory = msgspec.structs.replace(memory, host=b"")
        told = DeviceMemory(memory, self._hash_devices, stretches(self._layout.strays))
        return wire.RouteOffer(msgspec.msgpack.encode(told), msgspec.msgpack.encode(tables))

    def offered(self) -> None:
        if self._hash_early:
            self._start_digests()

    def begin(self, rank: int) -> bytes | Unavailable:
        self._start_digests()
        return super().begin(rank)

    def trailer(self, rank: int) -> bytes:
        """The digests of all that receivers have opened, as one; waits for the device."""
        self._exports.taken = True
        return b"" if self._digests is None else device_digests.summary(self._digests.packed())

    def hear(self, line: Line, word: bytes) -> str:
        if word != WHICH:
            return super().hear(line, word)
        if self._digests is None:
            return "asked for digests that there are not"
        line.send(wire.Word(self._digests.packed()))
        return ""

    def _start_digests(self) -> None:
        if self._hash_devices and self._digests is None:
            self._digests = self._exports.grid.digests(self._layout.device, self._stream_bytes)


class CudaPull(HostPull):
    """Copies device memory to device memory by itself; the rest comes as on route "host"."""

    def __init__(
        self,
        incoming: Incoming,
        memory: Memory,
        ways: Ways,
        opened: Sources,
        *,
        digests: bool,
    ) -> None:
        super().__init__(incoming, memory, ways)
        self._opened, self._device_digests = opened, digests
        self.verified = memory.verify or digests
        self._copied: device_digests.Copied | None = None
        self._told: bytes | None = None  # the sender's digests, where they were asked for

    def _begin(self, go: wire.Go) -> None:
        super()._begin(go)
        self._copy_device_memory()

    def _copy_device_memory(self) -> None:
        """Returns when all of it is in its place."""
        self._copied = self._incoming.resources.of(Openings).copier.copy(
            self._opened,
            by_device(self._ways.places.device),
            self._chunks.stream_bytes,
            digests=self._device_digests,
        )
        self.messages += self._copied.pieces
        self._count(self._copied.nbytes)

    def _hear(self, word: bytes) -> None:
        if self._asked or self._outstanding:
            super()._hear(word)
        else:
            self._told = word

    def _use_wait(self) -> None:
        super()._use_wait()
        if self._copied is not None and self._device_digests:
            self._copied.summary  # noqa: B018

    def _check(self, word: bytes) -> None:
        if self._copied is None or not self._device_digests or self._copied.summary == word:
            return
        self._line.send(wire.Word(WHICH))
        while self._told is None:
            self._handle(self._next())
        if (at := self._copied.differs(self._told)) is not None:
            total = self._chunks.stream_bytes
            end = min(at + device_digests.cell_bytes(total), total)
            raise self._differs(f"device memory with {self._incoming.named(at, end)}")


class CudaIpcRoute(Route):
    name = "cuda_ipc"
    pulls = True

    def server(self, outgoing: Outgoing) -> Server:
        return CudaServer(outgoing)

    def accept(self, offer: wire.RouteOffer | None, incoming: Incoming) -> Mover | Unavailable:
        if offer is None:
            return Unavailable("the sender does not say where its memory is")
        device = wire.read_as(DeviceMemory, offer.fresh)
        if why := place.apart(place.here(), device.memory.place) or device.no_exports:
            return Unavailable(why)
        if not incoming.landing.on_device:
            return Unavailable("the destination is in host memory")
        tables = wire.read_as(DeviceTables, offer.fixed)
        found = reach(msgspec.structs.replace(device.memory, host=tables.host), incoming)
        if isinstance(found, Unavailable):
            return found
        exported = Exported(tables.exports, tables.device)
        try:
            openings = incoming.resources.of(Openings)
            total = incoming.landing.chunks.stream_bytes
            opened = openings.sources(incoming.line.peer, exported, total)
        except IpcError as fault:
            return Unavailable(str(fault))
        ways = find_ways(
            incoming,
            found.memory,
            reads=found.reads,
            exported=Runs.merged(*(runs.stretches for runs in opened.values())),
            strays=device.strays,
        )
        return CudaPull(incoming, found.memory, ways, opened, digests=device.digests)


ROUTE = CudaIpcRoute()
