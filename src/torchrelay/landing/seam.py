"""Landing: the only code that writes into a caller's tensors.

Chunks come in any order, each once, by `write`, or a transport writes them itself to `places`.
`commit` ends the receive and returns the state. Three landings share that seam: new tensors
(`fresh`), the caller's tensors all at once after everything has arrived (weights are old or new),
and the caller's tensors as the bytes come in (least memory; both `inplace`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from torchrelay.geometry.chunks import Chunks
from torchrelay.landing.commit.ending import Act, Together, Watch
from torchrelay.landing.destination import PreparedDestination, prepare
from torchrelay.landing.fresh import NewTensors
from torchrelay.landing.inplace import ExistingTensors
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.pairing import Pairing
from torchrelay.landing.places import ImageMemory, Landed, OwnTensor, Places
from torchrelay.landing.workspace import PlainWorkspace, Workspace
from torchrelay.plan.offer import OfferedShare
from torchrelay.record.pause import gc_paused
from torchrelay.record.schema import Record


class Landing(Protocol):
    """The side of a landing that a transport uses."""

    chunks: Chunks
    on_device: bool  # whether any of it goes to a device
    torn: bool  # whether the caller's tensors have been written to, but not all of them

    def write(self, index: int, data: torch.Tensor) -> None:
        """Take chunk `index`, whose bytes are in the buffer `data`, on the host or a device.

        Several threads may, each with another chunk, once `places().host` has been asked for.
        """

    def put(self, start: int, stop: int, data: torch.Tensor) -> None:
        """The same of any bytes [start, stop) of the stream."""

    def places(self) -> Places:
        """Where chunks go, for a transport that writes to memory itself instead of `write`."""

    def arrived(self) -> None:
        """All bytes are in their places; whether they hold is not known yet. What can be done
        before it is, is done while the transport waits for that."""

    def commit(self) -> Landed:
        """All chunks have arrived and hold: make them the state. It is `make` and `end`."""


class StateLanding(Landing, Protocol):
    """A landing for a source that has boxes of tensors and no stream: images by number.

    Held memory is filled before `make`; the caller's own tensors are filled by the `bring` of
    `end`, which sets `torn` when it begins.
    """

    record: Record

    def held(self) -> Iterator[ImageMemory]:
        """Memory of the landing's own, for images."""

    def memory_of(self, image: int) -> ImageMemory | None:
        """The memory of the landing's own that one image goes to, if it goes to such."""

    def own(self) -> Iterator[OwnTensor]:
        """The caller's tensors that take images as they are; none where they are staged."""

    @property
    def touched(self) -> bool:
        """Whether anything of the caller's has been written to, but for objects."""

    def make(self) -> None:
        """Work everything out that can fail. Nothing of the caller's has changed by then."""

    def end(self, bring: Act = ..., together: Together = ..., watch: Watch = ...) -> Landed:
        """The state, after `make`; see `LandingEnd`, which every landing has."""


def land(
    record: Record,
    into: object = None,
    options: LandingOptions | None = None,
    workspace: Workspace | None = None,
) -> Landing:
    """The landing for the state of one rank. Everything that can be refused is refused here.

    `into=None` makes new tensors. `into` may be what `prepare` made of a destination, which leaves
    less to do here. Modules in it are filled in place; other objects with `load_state_dict` are
    given what is offered for them.
    """
    options, workspace = options or LandingOptions(), workspace or PlainWorkspace()
    with gc_paused():
        if into is None:
            return NewTensors(record, options, workspace)
        pairing = Pairing(record.outlines[0].tree, prepared(into), options)
        return ExistingTensors(record, pairing, options, workspace)


def land_share(
    share: OfferedShare,
    into: object,
    options: LandingOptions,
    workspace: Workspace | None = None,
) -> StateLanding:
    """The landing for this rank's share of a recorded state, which depends on the destination."""
    workspace = workspace or PlainWorkspace()
    with gc_paused():
        if into is None:
            return NewTensors(share.new(), options, workspace, share.filled)
        pairing = Pairing(share.tree, prepared(into), options, share.choice)
        record, pairing.matched, late = share.fitted(
            pairing.into.flat.leaves, pairing.into.layout, pairing.matched, pairing.likes
        )
        return ExistingTensors(record, pairing, options, workspace, late)


def prepared(into: object) -> PreparedDestination:
    """A destination as it is now; looked over again if tensors have moved since."""
    if not isinstance(into, PreparedDestination):
        return prepare(into)
    return prepare(into.into) if into.moved else into
