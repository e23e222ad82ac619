"""Pairs of leaves offered and leaves here, in columns, and numbers for the leaves of a share."""

from __future__ import annotations

import numpy as np

from torchrelay.geometry.boxes import Numbers
from torchrelay.plan.share.whole_leaves import NONE
from torchrelay.state.matching import Matched
from torchrelay.state.paths import LeafPaths
from torchrelay.state.tree import show

WHOLE = -1  # in place of the number of a box


class Pairs:
    """Pairs of leaves in columns: the one offered, the one here, that of the share; and the
    recorded image and box that are all of it, or -1."""

    def __init__(self, matched: Matched, leaves: int) -> None:
        self._matched = matched
        self.tree = matched.tree
        if matched.tree is not None:
            self.offered: Numbers = np.arange(leaves)
            self.here: Numbers = self.offered
        else:
            self.offered = np.array([pair[0] for pair in matched.pairs], np.int64)
            self.here = np.array([pair[2] for pair in matched.pairs], np.int64)
        self.leaf: Numbers = self.offered.copy()
        self.source: Numbers = np.full(len(self.here), NONE, np.int64)
        self.box: Numbers = np.full(len(self.here), WHOLE, np.int64)

    def path(self, row: int) -> str:
        if self.tree is None:
            return show(self._matched.pairs[row][1])
        return show(LeafPaths(self.tree)[int(self.offered[row])])

    def matched(self, dropped: set[int]) -> Matched:
        """The pairs with the leaves of the share, but for those that are dropped."""
        found = self._matched
        if not dropped and np.array_equal(self.leaf, self.offered):
            return found
        if self.tree is None:
            paths = [pair[1] for pair in found.pairs]
        else:
            steps = LeafPaths(self.tree)
            paths = [steps.steps(leaf) for leaf in self.offered.tolist()]
        rows = zip(self.leaf.tolist(), paths, self.here.tolist(), strict=True)
        pairs = [pair for row, pair in enumerate(rows) if row not in dropped]
        return Matched(pairs, found.missing, found.extra)


class LeafNumbers:
    """The leaves of a share: the recorded ones, and more where one is needed in several forms."""

    def __init__(self, leaves: int) -> None:
        self.count = leaves
        self._taken = np.zeros(leaves, bool)

    def take(self, leaves: Numbers) -> Numbers:
        """A number for each of some leaves: its own, unless that is taken."""
        found: Numbers = leaves.copy()
        _, first = np.unique(leaves, return_index=True)
        again = np.ones(len(leaves), bool)
        again[first] = self._taken[leaves[first]]
        self._taken[leaves] = True
        more = int(again.sum())
        found[again] = np.arange(self.count, self.count + more)
        self.count += more
        return found

    def free(self) -> list[int]:
        found: list[int] = np.flatnonzero(~self._taken).tolist()
        return found
