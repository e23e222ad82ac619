"""Which files of a save are taken from the last committed step, because they did not change.

Only digests decide: those of the files to be are made from the memory that they would be written
from, and compared with those of the committed files, whatever names they have. How tensors come
into files that do not change is `resting`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from torchrelay.geometry import DIGEST_BYTES
from torchrelay.planning.stored import stored_tensors
from torchrelay.record.schema import Record
from torchrelay.shares import resting
from torchrelay.shares.file_hashing import FileHashing
from torchrelay.shares.layout import Entry, FileLayout, ShareLayout, arrange
from torchrelay.shares.resting import Resting, own_chunks, unchanged
from torchrelay.shares.share import Share
from torchrelay.state.frozen import storage_of
from torchrelay.stores.draft import CommittedFile, DataFiles


class KnownFile(NamedTuple):
    name: str
    digests: bytes


class KnownStep:
    """A committed step, as far as files are taken from it. `own`: the files that this rank wrote of
    it, by their headers. `record`: what is known of a step that another process saved."""

    def __init__(
        self,
        step: int,
        version: str,
        *,
        own: Mapping[bytes, tuple[FileLayout, bytes]] | None = None,
        record: Record | None = None,
    ) -> None:
        self.step, self.version, self.record = step, version, record
        self._own = own or {}
        self._alike: defaultdict[tuple[int, int], list[KnownFile]] = defaultdict(list)
        for file, digests in self._own.values():
            self._alike[file.nbytes, file.chunk_bytes].append(KnownFile(file.name, digests))
        for volume in record.volumes if record is not None else ():
            if len(volume.digests) == volume.chunks * DIGEST_BYTES:
                known = KnownFile(volume.name, volume.digests)
                self._alike[volume.nbytes, volume.chunk_bytes].append(known)

    def alike(self, file: FileLayout) -> list[KnownFile]:
        """Files of the same size, in the same chunks."""
        return self._alike.get((file.nbytes, file.chunk_bytes), [])

    def before(self, file: FileLayout) -> KnownFile | None:
        """The file that had the same tensors in the same places, if this rank wrote it."""
        found = self._own.get(file.header)
        return None if found is None else KnownFile(found[0].name, found[1])

    def source(self, file: KnownFile) -> CommittedFile:
        return CommittedFile(self.step, self.version, file.name)

    def files_of(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        """Of a step that another process saved: its files that have nothing but these entries."""
        if self.record is None:
            return []
        known = {(one.name, one.offsets, one.sizes): one for one in entries}
        files: defaultdict[int, list[Entry]] = defaultdict(list)
        others = set()
        for tensor in stored_tensors(self.record):
            for box in tensor.shards:
                entry = known.get((tensor.name, tuple(box.offsets), tuple(box.sizes)))
                if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
                    others.add(box.file)
                else:
                    files[box.file].append(entry)
        order = {entry: place for place, entry in enumerate(entries)}
        found = [
            sorted(some, key=order.__getitem__) for n, some in files.items() if n not in others
        ]
        return found


class _Arrangement(NamedTuple):
    """The layout that keeps separate what rests, for one list of entries."""

    entries: Sequence[Entry]
    revision: int
    layout: ShareLayout
    separate: Collection[int]


class Reuse:
    """Decides for one rank, from save to save."""

    def __init__(self, rank: int, world: int, file_bytes: int | None) -> None:
        self._rank, self._world, self._file_bytes = rank, world, file_bytes
        self._resting = Resting(file_bytes)
        self.begun = False
        self._last: dict[bytes, tuple[FileLayout, bytes]] = {}  # of the last committed step
        self._token = ""  # of its draft
        self._looked = False  # for what rests, before the first save that might reuse it
        self._differing: dict[str, int] = {}  # by file, a chunk that has changed
        self._arrangement: _Arrangement | None = None

    def known(self, step: int, version: str, token: str) -> KnownStep | None:
        """The step that was saved with a token, as this rank knows it, if that was the last."""
        if token and token == self._token:
            return KnownStep(step, version, own=self._last)
        return None

    def begin(self, share: Share, frozen: Collection[int], step: KnownStep | None) -> None:
        """Before the first save: tensors in these storages are not trained."""
        if self.begun:
            return
        self.begun = True
        entries = share.layout.entries
        if step is not None:
            self._resting.begin(step.files_of(entries))
        pairs = zip(entries, share.tensors, strict=False)  # tensors without elements have no memory
        some = [one for one, tensor in pairs if storage_of(tensor) in frozen] if frozen else []
        self._resting.begin_with(some, entries)

    def decide(self, share: Share, step: KnownStep | None, draft: DataFiles) -> Share:
        """The same share, with files that are taken from a step."""
        share, separate = self._arranged(share)
        if step is None:
            return share
        share.hash_on_devices()
        taken, changed = self._compare_resting(share, separate, step)
        if self._look(share, separate, step) or changed:
            share, separate = self._arranged(share)
            share.hash_on_devices()
        for number, file in enumerate(share.layout.files):
            found = taken.get(file.header)
            if found is None and not _has(file, separate):
                found = self._found(share, number, step)
            if found is not None and draft.holds(step.source(found), file.nbytes):
                share.reuse(number, found.digests, step.source(found))
        return share

    def _arranged(self, share: Share) -> tuple[Share, Collection[int]]:
        """The share, with what rests in files of its own; and the places of those entries."""
        entries, revision = share.layout.entries, self._resting.revision
        known = self._arrangement
        if known is None or known.entries is not entries or known.revision != revision:
            files = self._resting.files(entries)
            separate = {place for file in files for place in file}
            layout = arrange(entries, self._rank, self._world, self._file_bytes, files)
            known = self._arrangement = _Arrangement(entries, revision, layout, separate)
        if known.layout is share.layout or (not known.separate and not share.layout.separate):
            return share, known.separate
        return Share(known.layout, share.tensors, share.cast), known.separate

    def _compare_resting(
        self, share: Share, separate: Collection[int], step: KnownStep
    ) -> tuple[dict[bytes, KnownFile], bool]:
        """The files of tensors that rest, by their headers, as the step has them; and whether some
        of those tensors have changed."""
        taken: dict[bytes, KnownFile] = {}
        entries, sizes = share.layout.entries, share.layout.sizes
        gone: list[Entry] = []
        changed: list[Entry] = []
        for number, file in enumerate(share.layout.files):
            if not _has(file, separate):
                continue
            before = step.before(file)
            if before is None:
                found = self._found(share, number, step)
                if found is not None:
                    taken[file.header] = found
                elif step.record is not None:  # one that was assumed to rest
                    gone += [entries[n] for _, n in file.placed]
                continue
            now = FileHashing(share, number).all()
            if now == before.digests:
                taken[file.header] = before
            else:
                still = set(unchanged(file, sizes, before.digests, now))
                changed += [entries[n] for _, n in file.placed if n not in still]
        self._resting.forget(gone)
        self._resting.changed(changed)
        return taken, bool(gone or changed)

    def _look(self, share: Share, separate: Collection[int], step: KnownStep) -> bool:
        """Once, at the second save of a job: find what rests before everything is written again.
        Whether there is something.

        A chunk in the middle of each tensor tells that it has changed, as nearly all have where all
        of a model is trained. Only the others are hashed whole.
        """
        entries, sizes = share.layout.entries, share.layout.sizes
        rested = False
        for number, file in enumerate(share.layout.files):
            before = step.before(file)
            if self._looked or before is None or _has(file, separate) or not file.placed:
                continue
            hashing = FileHashing(share, number)
            first, stop, own, own_stop = own_chunks(file, sizes)
            probes = np.where(own < own_stop, (own + own_stop) // 2, first)
            now = hashing.some(np.unique(probes).tolist())
            alike = [n for n in range(len(probes)) if _same(before.digests, now, probes[n])]
            rest = {n for one in alike for n in range(first[one], stop[one])}
            still = unchanged(file, sizes, before.digests, hashing.some(sorted(rest)))
            if len(still) == len(file.placed):  # it is taken over as it is
                continue
            self._resting.rested(file, entries, still)
            rested = rested or bool(still)
        self._looked = self._looked or bool(self._last)
        return rested

    def _found(self, share: Share, number: int, step: KnownStep) -> KnownFile | None:
        """The file of the step that has the same bytes."""
        file = share.layout.files[number]
        alike = step.alike(file)
        if file.nbytes < resting.LEAST_BYTES or not alike:
            return None
        hashing = FileHashing(share, number)
        first = min(self._differing.get(file.name, hashing.chunks // 2), hashing.chunks - 1)
        index, chunk = hashing.find([one.digests for one in alike], first)
        if index is None:
            self._differing[file.name] = chunk
            return None
        return alike[index]

    def committed(self, token: str, share: Share, digests: Sequence[bytes]) -> None:
        """A save with this token was committed: what did it write that rests?"""
        entries, sizes = share.layout.entries, share.layout.sizes
        separate = self._arranged(share)[1]
        for number in share.to_write:
            file = share.layout.files[number]
            before = self._last.get(file.header)
            if before is None or file.nbytes < resting.LEAST_BYTES or _has(file, separate):
                continue
            still = unchanged(file, sizes, before[1], digests[number])
            self._resting.rested(file, entries, still)
        self._last = {
            file.header: (file, made)
            for file, made in zip(share.layout.files, digests, strict=True)
        }
        self._token = token


def _same(one: bytes, other: bytes, chunk: int) -> bool:
    at = slice(chunk * DIGEST_BYTES, (chunk + 1) * DIGEST_BYTES)
    return one[at] == other[at]


def _has(file: FileLayout, places: Collection[int]) -> bool:
    """Whether a file is one of tensors that rest."""
    return bool(file.placed) and file.placed[0][1] in places
