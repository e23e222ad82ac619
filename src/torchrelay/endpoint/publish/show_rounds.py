"""The second half of a publish, in the background: a step that is copied is hashed and shown.

    write   every rank hashes its volumes; the coordinator makes the record of all of them
    lend    processes of this host may read the step in memory of its GPU, if it is there
    show    everybody may read it, from host memory

In `lend` and `show` the coordinator is the last: what it lists can be read on every rank.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from torchrelay.coordination.call import Call
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.coordination.messages import COORDINATOR, decoded
from torchrelay.deadlines import Deadline
from torchrelay.endpoint.publish.device_path import DevicePath
from torchrelay.endpoint.publish.device_slots import DeviceSlot
from torchrelay.endpoint.publish.host_slots import HostSlots
from torchrelay.endpoint.publish.known_plan import KnownPlan, RecordedStep, again
from torchrelay.endpoint.publish.server_process import ServerProcess
from torchrelay.endpoint.server import messages as m
from torchrelay.record.encoding import content_digest, encode, encode_at_rest, state_digest
from torchrelay.shares.commit_record import decode_shares
from torchrelay.shares.planner import PlannedShare

# The record of all parts: its digest, and for ranks that list it all of it.
_recorded = msgspec.msgpack.Decoder(tuple[str, m.StepRecord | None])
_encode = msgspec.msgpack.encode


class StagedStep(NamedTuple):
    """A step that is copied here, on its way to be shown."""

    step: int
    slot: int
    planned: PlannedShare
    volumes: list[m.Volume]
    urls: list[str]
    seconds: float
    on_device: DeviceSlot | None  # where it is copied to; else in host memory


class ShowRounds:
    """The rounds of one rank. `changes`: whether the server is to find changed elements."""

    def __init__(
        self,
        ranks: Coordinator,
        server: ServerProcess,
        known: KnownPlan,
        host: HostSlots,
        device: DevicePath,
        *,
        changes: bool,
    ) -> None:
        self._ranks, self._server, self._known = ranks, server, known
        self._host, self._device, self._changes = host, device, changes

    def run(self, call: Call, staged: StagedStep, deadline: Deadline) -> None:
        """Returns when the step is shown on every rank. Those whose server lists it have the record
        of all parts."""
        listing = self._server.listing(staged.urls)
        on_device, written = staged.on_device, list[bytes]()  # the digests of this rank's volumes
        last = self._known.like(staged.planned)  # meanwhile a GPU hashes

        def hash_mine() -> bytes:
            written.extend(
                on_device.digests(staged.volumes) if on_device else self._hashed(staged, deadline)
            )
            return b"" if last else encode(staged.planned.share.written(written))

        def decide(sent: list[bytes]) -> list[bytes]:
            if last is not None:
                made, places = again(last, staged.step, written), [COORDINATOR] * len(written)
            else:
                shares = decode_shares(staged.step, sent)
                made = self._known.made(staged.step, staged.planned, shares)
                places = [rank for rank, share in enumerate(shares) for _ in share.volumes]
            snapshot = content_digest(made.record)
            whole = _whole(made, staged.urls, places)
            brief, full = _encode((snapshot, None)), _encode((snapshot, whole))
            return [full if rank in listing else brief for rank in range(len(sent))]

        answer = call.round("write", hash_mine, decide, deadline)
        snapshot, whole = decoded(_recorded, answer, COORDINATOR)
        own = [
            msgspec.structs.replace(volume, digests=digests)
            for volume, digests in zip(staged.volumes, written, strict=True)
        ]
        shown = m.Show(staged.slot, staged.step, snapshot, own, whole)
        if on_device is not None:
            lent = msgspec.structs.replace(shown, slot=on_device.number, export=on_device.export)
            self._show_in_turn(call, "lend", lent, deadline)
            moved = staged._replace(volumes=own)
            share, host = staged.planned.share, staged.slot
            self._hashed(moved, deadline, self._device.copy_to_host(share, own, on_device, host))
            self._device.published(on_device, share, snapshot)
        self._show_in_turn(call, "show", shown, deadline)

    def _show_in_turn(self, call: Call, phase: str, shown: m.Show, deadline: Deadline) -> None:
        def show() -> bytes:
            self._server.ask(shown, m.Obeyed, deadline.left())
            return b""

        mine = (lambda: b"") if self._ranks.coordinates else show
        call.round(phase, mine, lambda sent: [show()] * len(sent), deadline)

    def _hashed(
        self, staged: StagedStep, deadline: Deadline, changes: m.FoundChanges | None = None
    ) -> list[bytes]:
        """Have the server take the memory of a slot, and make the digests that it lacks."""
        arena = self._host[staged.slot]
        request = m.StageSlot(staged.slot, arena.nbytes, staged.volumes, attached=True)
        if self._changes:
            request.fields = self._known.fields(staged.planned.share.layout)
            request.found = changes
        return self._server.stage(request, arena.fd, deadline.left()).digests


def _whole(made: RecordedStep, urls: list[str], places: list[int]) -> m.StepRecord:
    """A record with everything that it lists, wherever that is."""
    volumes = [
        m.Volume(file.name, -1, file.nbytes, file.chunk_bytes, file.digests)
        for file in made.record.volumes
    ]
    data, state = encode_at_rest(made.record), state_digest(made.record)
    return m.StepRecord(data, volumes, made.tensors, urls, places, state, made.layout)
