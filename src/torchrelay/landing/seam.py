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
from torchrelay.landing.checks.shards import Shards
from torchrelay.landing.commit.ending import Act, Together, Watch
from torchrelay.landing.destination import PreparedDestination, prepare
from torchrelay.landing.fresh import NewTensors
from torchrelay.landing.inplace import ExistingTensors
from torchrelay.landing.places import ImageMemory, Landed, OwnTensor, Places
from torchrelay.landing.terms import Terms
from torchrelay.landing.workspace import Plainly, Workspace
from torchrelay.plan.offer import OfferedState, SentState
from torchrelay.record import manifest as m
from torchrelay.record.pause import gc_paused


class Landing(Protocol):
    """What a transport needs of a place to land."""

    chunks: Chunks
    on_device: bool  # whether any of it goes to a device
    torn: bool  # whether the caller's tensors have been written to, but not all of them

    def write(self, index: int, data: torch.Tensor) -> None:
        """Take chunk `index`, whose bytes are in the buffer `data`, on the host or a device.

        Several threads may, each with another chunk, once `places().host` has been asked for.
        """

    def places(self) -> Places:
        """Where chunks go, for a transport that writes to memory itself instead of `write`."""

    def arrived(self) -> None:
        """All bytes are in their places; whether they hold is not known yet. What can be done
        before it is, is done while the transport waits to hear."""

    def commit(self) -> Landed:
        """All chunks have arrived and hold: make them the state. It is `make` and `end`."""

    # For a source that has boxes of tensors and no stream: images by number. What is held is filled
    # before `make`; the caller's own tensors are filled by what `end` is given, and whoever begins
    # to do that sets `torn`.

    def held(self) -> Iterator[ImageMemory]:
        """Memory of the landing's own, for images."""

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
    offer: m.Manifest | OfferedState,
    *,
    into: object = None,
    strict: bool = True,
    atomic: bool = True,
    staged: bool | None = None,
    device: torch.device | None = None,
    rank: int = 0,
    make_missing: bool = False,
    shards: Shards = "own",
    means: Workspace | None = None,
) -> Landing:
    """The landing for an offered state. Everything that can be refused is refused here.

    `into=None` makes new tensors, on `device` or on the kind of device they come from. With
    `make_missing`, leaves that `into` lacks are made anew, and the state is a new tree of the
    offered containers around the caller's tensors and the new ones. `into` may be what `prepare`
    made of a destination, which leaves less to do here. Modules in `into` are filled in place;
    other objects with `load_state_dict` are told what is offered for them. `shards` says which
    distributed tensors may be made as they were sent. `staged` is `atomic` unless it is given.
    """
    with gc_paused():
        means = means or Plainly()
        offer = SentState(offer) if isinstance(offer, m.Manifest) else offer
        staged = atomic if staged is None else staged
        terms = Terms(strict, atomic, staged, device, rank, make_missing, shards)
        if into is None:
            return NewTensors(offer, terms, means)
        if not isinstance(into, PreparedDestination):
            into = prepare(into)
        elif into.moved:
            into = prepare(into.into)
        return ExistingTensors(offer, into, terms, means)
