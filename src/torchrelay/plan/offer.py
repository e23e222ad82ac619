"""What is offered to a destination: a state that a rank sends, or this rank's share of a record."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence, Set
from typing import NamedTuple, Protocol

import torch

from torchrelay.plan.selection import Selection
from torchrelay.record import manifest as m
from torchrelay.state.matching import Matched


class Beside(NamedTuple):
    """An offer as it looks beside one destination.

    The leaves of `matched` are those of `manifest`. What goes to the leaves in `late` comes by way
    of whole images, which are not written to the destination as they are.
    """

    manifest: m.Manifest
    matched: Matched
    late: Set[int] = frozenset()


class OfferedState(Protocol):
    tree: m.Node
    choice: Selection

    def anew(self) -> m.Manifest:
        """What it consists of where all of it is made anew."""

    def filled(self, image: int) -> torch.Tensor | None:
        """Memory that has the bytes of an image of `anew` already, to be kept; mostly none has."""

    def beside(
        self,
        leaves: Sequence[object],
        plain: Container[int],
        matched: Matched,
        told: Mapping[int, torch.Tensor | None],
    ) -> Beside:
        """What it consists of beside the `leaves` of a destination, of which the `plain` ones share
        no memory with each other. `told` has the leaves that objects are told, each with the tensor
        that it is to be like."""


class SentState:
    """The state of one rank, as that rank has it."""

    choice = Selection()

    def __init__(self, manifest: m.Manifest) -> None:
        self._manifest = manifest
        self.tree = manifest.tree

    def anew(self) -> m.Manifest:
        return self._manifest

    def filled(self, image: int) -> torch.Tensor | None:
        return None

    def beside(
        self,
        leaves: Sequence[object],
        plain: Container[int],
        matched: Matched,
        told: Mapping[int, torch.Tensor | None],
    ) -> Beside:
        return Beside(self._manifest, matched)
