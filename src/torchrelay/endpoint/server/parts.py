"""The parts of a snapshot that a request asks for, checked. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torchrelay.endpoint.server.changes import ChangeHistory
from torchrelay.endpoint.server.http.requests import Refusal
from torchrelay.endpoint.server.snapshots import ServedSnapshot
from torchrelay.errors import RemoteProtocolError
from torchrelay.parts.runs import MAX_RUNS, PartRuns, PartsRequest
from torchrelay.parts.stream import WantedPart


def wanted_parts(
    request: PartsRequest, snapshot: ServedSnapshot, changes: ChangeHistory | None
) -> Iterator[WantedPart]:
    """The parts, one volume after the other. `RemoteProtocolError` for malformed runs, `Refusal`
    for volumes that are not here, both before the first part is taken."""
    if not snapshot.complete:
        raise Refusal(404, "the step is still arriving here")
    found: dict[str, tuple[PartRuns, str | None]] = {}
    count = 0
    for wanted in request.volumes:
        place = snapshot.place(wanted.name)
        if place is None:
            raise Refusal(404, "a volume is not here: /places.json says where it is")
        runs = PartRuns.decoded(wanted.columns, place[1].nbytes)
        found[wanted.name] = runs, wanted.base
        count += len(runs)
        if count > MAX_RUNS:
            raise RemoteProtocolError(f"a request has at most {MAX_RUNS} runs")

    def opened() -> Iterator[WantedPart]:
        """To be used while the snapshot is read, so that its memory is not taken back."""
        if changes is not None:
            changes.ask()
        for name, (runs, base) in found.items():
            if (place := snapshot.place(name)) is None:
                raise ConnectionResetError("the step was replaced")
            slot, volume = place
            # A view of its own: the slot may be given back while this one is in use.
            view = slot.view[volume.start : volume.start + volume.nbytes]
            known, same = None, base == snapshot.id
            if base is not None and changes is not None and not same:
                known = changes.between(base, snapshot.id, name)
            yield WantedPart(np.frombuffer(view, np.uint8), runs, known, same)

    return opened()
