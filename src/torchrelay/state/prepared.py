"""A destination looked over before anything is offered for it.

A receiver waits for a manifest anyway. What depends on its own tensors alone is found out in that
time by `prepare`, and `landing.land` takes the result in place of the destination itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torchrelay.state import manifest as m
from torchrelay.state.containers import Flat, Matched, Path, flatten, match, slots
from torchrelay.state.pause import gc_paused
from torchrelay.state.plain import Plain, survey
from torchrelay.state.spans import overlapping


class Prepared:
    """What `prepare` found. Between it and the end of the landing the caller leaves the containers
    as they are: an object put in a slot meanwhile is not seen. A tensor that got other memory is.
    """

    def __init__(self, into: object) -> None:
        self.into = into
        self.flat: Flat = flatten(into)
        self._slots = slots(self.flat.tree)
        # By leaf; only those whose memory no other one of them shares.
        self.plain: list[Plain | None] = list(survey(self.flat.leaves))
        self._separate()

    def _separate(self) -> None:
        """Leave plain tensors that reach into each other to the general path, sort the others."""
        spans = [
            (plain[1], plain[1] + plain[0][4], leaf)
            for leaf, plain in enumerate(self.plain)
            if plain is not None
        ]
        spans.sort()
        if any(low < high for (_, high, _), (low, _, _) in pairwise(spans)):
            for group in overlapping([(low, high) for low, high, _ in spans]):
                for place in group if len(group) > 1 else ():
                    self.plain[spans[place][2]] = None
            spans = [span for span in spans if self.plain[span[2]] is not None]
        self._lows = [low for low, _, _ in spans]
        self._highs = [high for _, high, _ in spans]
        self._leaves = [leaf for _, _, leaf in spans]

    def reached(self, low: int, high: int) -> list[int]:
        """The plain leaves that have some of the host's bytes [low, high)."""
        return self._leaves[bisect_right(self._highs, low) : bisect_left(self._lows, high)]

    @property
    def moved(self) -> bool:
        """Whether a plain tensor no longer lies where it did."""
        leaves: list[Any] = self.flat.leaves
        for leaf, plain in zip(leaves, self.plain, strict=True):
            if plain is not None and leaf.data_ptr() != plain[1]:
                return True
        return False

    def match(self, tree: m.Node, *, strict: bool) -> Matched:
        """Pair the slots of an offered tree with those here."""
        if tree == self.flat.tree:
            return Matched([(index, path, index) for path, index in self._slots], [], [])
        return match(slots(tree), self._slots, strict=strict)


def prepare(into: object) -> Prepared:
    """Look a destination over, for `land(manifest, into=prepare(into))`.

    `UnsupportedLeafError` for a container that cannot be filled.
    """
    with gc_paused():
        return Prepared(into)


Pair = tuple[int, Path, int]
# Where in the stream, at which address, how many bytes; storage offered, leaf of the destination.
Piece = tuple[int, int, int, int, int]


def split(
    pairs: list[Pair], manifest: m.Manifest, prepared: Prepared, starts: Sequence[int]
) -> tuple[list[Piece], list[Pair]]:
    """The fast path of `fitting.fit`: a contiguous tensor offered to a plain one like it.

    Returns what goes straight to such tensors, in the order of the stream, and the pairs that are
    left for the general path. Those are all if a piece of the stream has several places to go.
    `starts` are those of the storages in the stream.
    """
    leaves, known = manifest.leaves, prepared.plain
    tensor, odd = m.TensorLeaf, m.CONJ | m.NEG | m.META
    pieces: list[Piece] = []
    rest: list[Pair] = []
    for pair in pairs:
        index, _, here = pair
        leaf, there = leaves[index], known[here]
        if there is not None and type(leaf) is tensor:
            (dtype, shape, _, _, nbytes), address, _ = there
            storage = leaf.storage
            if (
                storage >= 0
                and leaf.strides is None
                and leaf.shape == shape
                and leaf.dtype == dtype
                and not leaf.flags & odd
            ):
                pieces.append((starts[storage] + leaf.offset, address, nbytes, storage, here))
                continue
        rest.append(pair)
    pieces.sort()
    if _overlap(pieces):
        pieces = sorted(set(pieces))  # a tied tensor stands there more than once
    # A tensor here that stands for several offered ones is for `check_ties` to refuse.
    tied = len({piece[4] for piece in pieces}) < len(pieces)
    return ([], pairs) if tied or _overlap(pieces) else (pieces, rest)


def _overlap(pieces: list[Piece]) -> bool:
    return any(after[0] < piece[0] + piece[2] for piece, after in pairwise(pieces))
