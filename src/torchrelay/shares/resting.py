"""Which tensors rest from save to save, and have files of their own for it. Pure.

A file that did not change is taken from the step before as a whole. So tensors that rest are kept
separate from those that change. Letters stand for tensors, and a file for each bracket:

    step   changed    files           written
    1      -          [a b c d]       all of it: nothing is known
    2      c d        [a b] [c d]     both, once: the digests tell that a and b rest
    3      c d        [a b] [c d]     [c d]
    4      b c d      [a] [b c d]     both: b does not rest any more
    5      b c d      [a] [b c d]     [b c d]

A tensor that has changed after it rested must rest for longer the next time before it is moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from torchrelay.geometry import DIGEST_BYTES
from torchrelay.shares.layout import Entry, FileLayout, groups_of, split

Marks = np.ndarray[Any, np.dtype[np.bool_]]
Column = np.ndarray[Any, np.dtype[np.int64]]

LEAST_BYTES = 1 << 20  # of a file of tensors that rest: a smaller one costs as much to take over
SMALL_BYTES = 64 << 20  # files of this size are not joined with others
MOST_WAITS = 10  # of the doublings of the time that a tensor has to rest


class Resting:
    """The files of tensors that rest, on one rank."""

    def __init__(self, file_bytes: int | None) -> None:
        self._file_bytes = file_bytes
        self._files: list[tuple[Entry, ...]] = []
        self.revision = 0  # another one whenever the files are others
        self._changes: Counter[Entry] = Counter()  # of a tensor that had rested
        self._rests: Counter[Entry] = Counter()  # saves in which it did not change, one by one

    def files(self, entries: Sequence[Entry]) -> list[list[int]]:
        """The files that have these entries, by their places."""
        if not self._files:
            return []
        places = {entry: place for place, entry in enumerate(entries)}
        found = [[places[one] for one in file if one in places] for file in self._files]
        files = [file for file in found if sum(entries[n].nbytes for n in file) >= LEAST_BYTES]
        # Entries without bytes are in headers alone, and need no file of their own.
        groups = groups_of(entries)
        separate = {n for file in files for n in file}
        moving = {groups[n] for n, one in enumerate(entries) if n not in separate and one.nbytes}
        for file in files:
            if (group := groups[file[0]]) not in moving:
                file += [n for n, one in enumerate(groups) if one == group and n not in separate]
                moving.add(group)
        return files

    def begin(self, files: Iterable[Sequence[Entry]]) -> None:
        """Take over the files of another step: a save finds out whether they rest."""
        known = {entry for file in self._files for entry in file}
        self._files += [tuple(file) for file in files if known.isdisjoint(file)]
        self.revision += 1

    def begin_with(self, entries: Collection[Entry], among: Sequence[Entry]) -> None:
        """Entries that are not trained rest from the start. `among`: all of the state."""
        known = {entry for file in self._files for entry in file}
        some = [entry for entry in entries if entry not in known]
        self._add(dict(zip(among, groups_of(among), strict=True)), some)

    def rested(self, file: FileLayout, among: Sequence[Entry], places: Sequence[int]) -> None:
        """In a file that was written, the entries at these places did not change."""
        if not places and not self._rests:  # as where all of a model is trained
            return
        members = {among[n] for _, n in file.placed}
        still = {among[n] for n in places}
        for entry in members - still:
            self._rests.pop(entry, None)
        self._rests.update(still)
        ready = [one for one in still if self._rests[one] >= 1 << self._changes[one]]
        if ready:
            order = {one: n for n, one in enumerate(among)}
            ready.sort(key=order.__getitem__)
            self._add(dict(zip(among, groups_of(among), strict=True)), ready)

    def changed(self, entries: Collection[Entry]) -> None:
        """These rested, and do not any more."""
        for entry in entries:
            self._changes[entry] = min(self._changes[entry] + 1, MOST_WAITS)
        self.forget(entries)

    def forget(self, entries: Collection[Entry]) -> None:
        """These are not known to rest."""
        gone = set(entries)
        if not gone:
            return
        for entry in gone:
            self._rests.pop(entry, None)
        left = [tuple([one for one in file if one not in gone]) for file in self._files]
        self._files = [file for file in left if _nbytes(file) >= LEAST_BYTES]
        self.revision += 1

    def _add(self, groups: dict[Entry, str], entries: Sequence[Entry]) -> None:
        """New files of entries that rest. Smaller files of their groups are joined with them, so
        that there are few, and a tensor is written again a few times at most."""
        by_group: dict[str, list[Entry]] = {}
        for entry in entries:
            by_group.setdefault(groups[entry], []).append(entry)
        for group, members in by_group.items():
            small, total = [], _nbytes(members)
            for file in sorted(self._files, key=_nbytes):
                if groups.get(file[0]) == group and _nbytes(file) < min(2 * total, SMALL_BYTES):
                    small.append(file)
                    total += _nbytes(file)
            if total < LEAST_BYTES:
                continue
            members[:0] = [one for file in small for one in file]
            self._files = [file for file in self._files if file not in small]
            self.revision += 1
            for places in split([one.nbytes for one in members], self._file_bytes):
                self._files.append(tuple([members[n] for n in places]))
            for one in members:
                self._rests.pop(one, None)


def own_chunks(file: FileLayout, sizes: Sequence[int]) -> tuple[Column, Column, Column, Column]:
    """Of each entry of a file, in its order: the chunks that have some of it, from a first to a
    last, and those that have nothing else. Each range is without its end."""
    starts, places = np.array(file.placed, np.int64).T
    stops = starts + np.array([sizes[n] for n in places.tolist()], np.int64)
    first, stop = starts // file.chunk_bytes, -(-stops // file.chunk_bytes)
    own, own_stop = -(-starts // file.chunk_bytes), stops // file.chunk_bytes
    ends = stops == file.nbytes
    own_stop[ends] = stop[ends]  # the last chunk is shorter
    return first, stop, own, np.maximum(own, own_stop)


def unchanged(file: FileLayout, sizes: Sequence[int], before: bytes, now: bytes) -> list[int]:
    """The places of the entries of a file that seem not to have changed, by the digests of its
    chunks. `sizes`: bytes of each entry, by its place.

    Chunks that an entry has alone tell. One that it shares does not, if another entry of it has
    changed: else a large tensor would never rest next to a small one that is trained.

        chunks of 4 bytes    0..3    4..7    8..11    12..15
        the same as before   yes     no      no       yes
        entries              a: 0..5   b: 6..11   c: 12..15     b has changed, a and c have not

    This says only which file an entry goes to. Whether that file changed, all its bytes decide.
    """
    one, other = (np.frombuffer(data, f"V{DIGEST_BYTES}") for data in (before, now))
    if len(one) != len(other) or not file.placed:
        return []
    differs = one != other
    if differs[-(-file.placed[0][0] // file.chunk_bytes) :].all():  # all but those of the header
        return []
    places = np.array([place for _, place in file.placed])
    *touched, own, own_stop = own_chunks(file, sizes)
    changed = np.where(own < own_stop, _any(differs, own, own_stop), _any(differs, *touched))
    # A chunk that differs has an entry that changed: all of its entries, if nothing else tells.
    edges = np.zeros(len(differs) + 1, np.int64)
    np.add.at(edges, touched[0][changed], 1)
    np.add.at(edges, touched[1][changed], -1)
    unexplained = differs & (np.cumsum(edges[:-1]) == 0)
    still: list[int] = places[~(changed | _any(unexplained, *touched))].tolist()
    return still


def _any(marks: Marks, first: Column, stop: Column) -> Marks:
    """Whether any of the marks [first, stop) is set, for each pair with first <= stop."""
    ahead = np.concatenate([[0], np.cumsum(marks)])
    found: Marks = ahead[stop] > ahead[first]
    return found


def _nbytes(entries: Iterable[Entry]) -> int:
    return sum(entry.nbytes for entry in entries)
