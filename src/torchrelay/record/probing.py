"""The cost of building a dict or a set of keys that a peer chose.

Python hashes numbers, and tuples of them, alike in every process. A peer can choose keys so that
each new one has to pass all those before it, which takes the square of their number. So the work is
counted before a table is built. The functions here go through the slots that CPython would try, for
all keys at once: a slot goes to the first key in order that tries it, and a key that loses its slot
tries its next one. At the end each key is where one insertion after the other puts it, and it took
the same number of tries to get there.

A dict of 8 slots: keys 0, 8, 16 all try slot 0 first. Key 0 stays; 8 and 16 try slot 1 next
(5 * 0 + 0 + 1), where 8 stays; 16 tries slot 6 (5 * 1 + 0 + 1). That is 6 tries for 3 keys.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchrelay.errors import ManifestError

Hashes = np.ndarray[Any, np.dtype[np.uint64]]
_Slots = np.ndarray[Any, np.dtype[np.int64]]

# Regular numbers, such as multiples of a large power of two, take up to 90 tries for each key of a
# dict, and 105 of a set.
TRIES = 128
# Of these, the first are free; random numbers take 5 for each key, regular ones 20. All dicts of a
# record together have some more, so that a long record is refused in time linear in its length.
FREE_TRIES = 16
MORE_TRIES = 1 << 27
FEW = 256  # this number of keys costs little even if all of them collide
_ROUND = 256  # tries that take about as long as the fixed cost of a round
_SLACK = 1 << 14
_FREE_SLACK = 1 << 13  # rounds of a dict of a few hundred keys
_SHIFT = np.uint64(5)
_LINEAR = 9  # slots that a set tries after each one


def hashes_of(numbers: _Slots) -> Hashes:
    """The hashes that Python gives whole numbers of 64 bits."""
    modulus = np.uint64(sys.hash_info.modulus)
    magnitudes = np.where(numbers < 0, -(numbers.astype(np.uint64)), numbers.astype(np.uint64))
    found = (magnitudes % modulus).astype(np.int64)
    found = np.where(numbers < 0, -found, found)
    found[found == -1] = -2  # as Python does: -1 stands for an error there
    hashes: Hashes = found.astype(np.uint64)
    return hashes


class MoreTries:
    """Tries that all dicts of one record may take beyond the free ones of each."""

    def __init__(self) -> None:
        self.left = MORE_TRIES


def check_dict(
    hashes: Hashes, items: Sequence[int] | None = None, more: MoreTries | None = None
) -> None:
    """Raise `ManifestError` unless a dict of keys with these hashes, in this order, is built in
    time linear in their number. `items`: how many parts of each key may have to be compared to tell
    it from another, one by default. `more`: what the dicts of a record share."""
    if len(hashes) <= FEW:
        return
    budget = _Budget(len(hashes), more)
    budget.spend_on_equal(hashes, items)
    # A dict grows when two thirds of it are taken; then all its keys are inserted again.
    slots = 8
    while True:
        usable = slots * 2 // 3
        if usable > FEW or usable >= len(hashes):
            _insert(hashes[:usable], slots, budget, linear=0)
        if usable >= len(hashes):
            return
        slots *= 2


def check_set(hashes: Hashes, items: Sequence[int] | None = None) -> None:
    """The same for a set that is made of a dict with these keys, and for that dict."""
    if len(hashes) <= FEW:
        return
    check_dict(hashes, items)
    slots = 8
    while slots <= 2 * len(hashes):
        slots *= 2
    _insert(hashes, slots, _Budget(2 * len(hashes)), linear=_LINEAR)


class _Budget:
    """The tries of one dict: `TRIES` for each key. Those after the first `FREE_TRIES` of each also
    count for the record."""

    def __init__(self, keys: int, more: MoreTries | None = None) -> None:
        self._left = TRIES * keys + _SLACK
        self._free = FREE_TRIES * keys + _FREE_SLACK
        self._more = more or MoreTries()

    def spend(self, tries: int) -> None:
        self._left -= tries
        self._free -= tries
        self._more.left -= max(0, min(tries, -self._free))
        if self._left < 0 or self._more.left < 0:
            raise ManifestError(
                "keys whose hashes collide, so that a dict or a set of them would take far longer "
                "to build than to read: use text in their place"
            )

    def spend_on_equal(self, hashes: Hashes, items: Sequence[int] | None) -> None:
        """Keys of equal hashes are compared with each other, item by item; a long key costs those
        that have its hash, and no others."""
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        if len(starts) == len(hashes):
            return
        counts = np.diff(starts, append=len(hashes)).astype(np.float64)
        sums = counts
        if items is not None:
            sums = np.add.reduceat(np.asarray(items, np.float64)[order], starts)
        shared = counts > 1
        self.spend(int(min((counts * sums)[shared].sum(), float(1 << 60))))


def _insert(hashes: Hashes, slots: int, budget: _Budget, *, linear: int) -> None:
    """Spend the tries that keys with these hashes take in an empty table. After each slot, a key
    tries `linear` slots next to it, unless the table ends before."""
    count, mask = len(hashes), slots - 1
    owner: _Slots = np.full(slots, count, np.int64)
    slot: _Slots = (hashes & np.uint64(mask)).astype(np.int64)
    perturb = hashes.copy()
    step: _Slots = np.zeros(count, np.int64)  # past the slot
    trying: _Slots = np.arange(count)
    while len(trying):
        budget.spend(max(len(trying), _ROUND))
        target = slot[trying] + step[trying]
        before = owner[target]
        np.minimum.at(owner, target, trying)
        won = owner[target] == trying
        evicted = before[won]
        trying = np.concatenate([trying[~won], evicted[evicted < count]])
        going = trying
        if linear:
            step[trying] += 1
            over = (step[trying] > linear) | (slot[trying] + linear > mask)
            going = trying[over]
            step[going] = 0
        perturb[going] >>= _SHIFT
        more = (perturb[going] & np.uint64(mask)).astype(np.int64)
        slot[going] = (slot[going] * 5 + 1 + more) & mask
