"""One rank's share of a step: which files it writes from which memory, and what it reports."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from torchrelay.errors import CheckpointError, ManifestError
from torchrelay.plan.region import Region
from torchrelay.plan.stream import Stream
from torchrelay.record.checkpoint.commit import decode, encode
from torchrelay.record.checkpoint.joined import joined
from torchrelay.record.checkpoint.places import check_tensors
from torchrelay.record.checkpoint.schema import Blob, Checkpoint, DataFile, Outline, Own
from torchrelay.record.checkpoint.stored import Shard, StoredTensor, Tensors
from torchrelay.record.manifest import DTensorLeaf, Leaf, ShardedLeaf, TensorLeaf, parts
from torchrelay.state.tensors import versions_of
from torchrelay.stores.seam import Draft
from torchrelay.stores.shares.device_hashing import DeviceHashing
from torchrelay.stores.shares.layout import Entry, FileLayout
from torchrelay.stores.shares.plans import Drafted, Outlines, with_objects
from torchrelay.stores.writer.ranges import FileSpec, Range, Staged

PASS_BYTES = 64 << 20


class Written(msgspec.Struct, array_like=True, frozen=True):
    """What a rank has written: the coordinator makes the commit record of these."""

    files: list[DataFile]
    tensors: Tensors  # in these files
    blobs: list[Blob]
    values: dict[str, Outline] = {}  # objects that are plain values, by name
    origins: tuple[tuple[str, str], ...] = ()  # see `Drafted`
    dtypes: tuple[tuple[str, str], ...] = ()


class Share:
    """The files of one rank, ready to be written."""

    def __init__(self, drafted: Drafted, layouts: Sequence[FileLayout]) -> None:
        entries, tensors = with_objects(drafted), list(drafted.tensors)
        for _, data in drafted.objects.values():
            tensors.append(torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8))
        plain = len(drafted.entries)
        self.layouts = layouts
        self._drafted = drafted
        self._versions = versions_of(drafted.tensors)
        self.files = [FileSpec(file.name, file.nbytes, file.chunk_bytes) for file in layouts]
        self.streams: list[Stream] = []
        self._own = tensors[plain:]  # memory of no tensor: objects and headers
        self._blobs: list[Blob] = []
        self._hashing: DeviceHashing | None = None
        for number, layout in enumerate(layouts):
            head = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
            placed = [(0, Region.row_major(head))]
            for start, index in layout.placed:
                entry = entries[index]
                placed.append((start, Region.row_major(tensors[index])))
                if index >= plain:
                    kind, data = drafted.objects[entry.name]
                    self._blobs.append(Blob(entry.name, kind, number, start, len(data)))
            self._own.append(head)
            self.streams.append(Stream.of(placed, layout.nbytes))

    def _tensors(self) -> Tensors:
        """Where each tensor lies. Worked out when all is written: a trainer waits for what is done
        before."""
        entries = self._drafted.entries
        boxes: dict[str, tuple[Entry, list[Shard]]] = {}
        for number, layout in enumerate(self.layouts):
            for start, index in layout.placed:
                if index < len(entries):
                    entry = entries[index]
                    shard = Shard(entry.offsets, entry.sizes, number, start)
                    boxes.setdefault(entry.name, (entry, []))[1].append(shard)
        return Tensors.of(
            StoredTensor(entry.name, entry.dtype, entry.shape, shards)
            for entry, shards in boxes.values()
        )

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def on_host(self) -> bool:
        """Whether everything can be written from where it lies."""
        return all(stream.on_host for stream in self.streams)

    def ranges(self) -> list[Range]:
        """Everything, where it lies; for shares that are `on_host`."""
        return [
            Range(index, 0, file.nbytes, stream.host)
            for index, (file, stream) in enumerate(zip(self.files, self.streams, strict=True))
        ]

    def hash_on_devices(self) -> None:
        """Have GPUs make the digests that they can: what is written need not be hashed again."""
        self._hashing = DeviceHashing(self.files, self.streams)
        self.files = self._hashing.hashed()

    def check_unchanged(self) -> None:
        """Called when everything has been copied: `CheckpointError` where a tensor was written to
        meanwhile, as far as autograd knows, or memory of a GPU is not what its digests were made
        of, so that they might not be those of what is written."""
        entries, tensors = self._drafted.entries, self._drafted.tensors
        for entry, old, new in zip(entries, self._versions, versions_of(tensors), strict=True):
            if old != new:
                raise _changed(path=entry.name)
        if self._hashing is None or not any(file.digests for file in self.files):
            return
        for before, now in zip(self.files, self._hashing.hashed(), strict=True):
            if before.digests != now.digests:
                raise _changed(file=before.name)

    def passes(self) -> Iterator[list[Range]]:
        """Everything, in as many passes as it takes to bring what is not on the host there."""
        if self.on_host:
            yield self.ranges()
            return
        for index, (file, stream) in enumerate(zip(self.files, self.streams, strict=True)):
            size = -(-PASS_BYTES // file.chunk_bytes) * file.chunk_bytes
            buffer = torch.empty(min(size, file.nbytes), dtype=torch.uint8, device="cpu")
            for start in range(0, file.nbytes, size):
                stop = min(start + size, file.nbytes)
                stream.read(start, stop, buffer)
                yield [Range(index, start, stop, Staged(start, buffer.data_ptr()))]

    def written(self, digests: Sequence[bytes]) -> Written:
        files = [
            DataFile(file.name, file.nbytes, file.chunk_bytes, known)
            for file, known in zip(self.files, digests, strict=True)
        ]
        told = self._drafted
        return Written(
            files, self._tensors(), self._blobs, origins=told.origins, dtypes=told.dtypes
        )


def commit_record(
    step: int,
    shares: Sequence[Written],
    outlines: Outlines,
    version: str,
    save_id: str | None = None,
) -> Checkpoint:
    """The commit record of a step that all ranks have written."""
    files: list[DataFile] = []
    firsts: list[int] = []
    blobs: list[Blob] = []
    for rank, share in enumerate(shares):
        first = len(files)
        with _as_said(step, rank):
            check_tensors(share.tensors, [file.nbytes for file in share.files], whole=False)
        files += share.files
        firsts.append(first)
        blobs += [msgspec.structs.replace(blob, file=first + blob.file) for blob in share.blobs]
    with _as_said(step):
        tensors = joined([share.tensors for share in shares], firsts)
    _check_covered(tensors, [file.nbytes for file in files], step)
    outlines = _as_written(shares, outlines, set(tensors.names))
    torch_version: Any = torch.__version__
    return Checkpoint(
        step=step,
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        torch=str(torch_version),
        torchrelay=version,
        outlines=outlines.outlines,
        ranks=outlines.ranks,
        own=outlines.own,
        tensors=tensors,
        files=tuple(files),
        blobs=tuple(blobs),
        save_id=save_id,
    )


def _check_covered(tensors: Tensors, files: Sequence[int], step: int) -> None:
    """`CheckpointError` unless the ranks have each tensor whole: nobody could read it."""
    try:
        check_tensors(tensors, files)
    except ManifestError as fault:
        raise CheckpointError(
            f"the step would not be whole, {fault.message}: all ranks that have a part of the "
            "tensor are in the group that saves it",
            step=step,
            phase="commit",
            path=fault.path,
        ) from fault


@contextmanager
def _as_said(step: int, rank: int | None = None) -> Iterator[None]:
    try:
        yield
    except ManifestError as fault:
        raise CheckpointError(
            f"what was said of a share of the step cannot be: {fault.message}",
            rank=rank,
            step=step,
            phase="commit",
            path=fault.path,
        ) from fault


def _changed(*, path: str | None = None, file: str | None = None) -> CheckpointError:
    return CheckpointError(
        "the state was changed while it was saved, and is not committed: save it again, and keep "
        "it as it is until the save returns",
        phase="stage",
        path=path,
        file=file,
    )


def sealed(record: Checkpoint) -> bytes:
    """The record as it is to be committed: read back from its own bytes, whole and checked.

    `CheckpointError` where a reader would refuse it, or not find in it what was written.
    """
    data = encode(record)
    try:
        found = decode(data)
    except ManifestError as fault:
        raise _not_sealed(record, f"it cannot be read back: {fault.message}") from fault
    if encode(found) != data:
        raise _not_sealed(record, "it reads back as another one")
    held = {name for outline in found.outlines for name in outline.names}
    held.update(name for own in found.own for _, name in own.names)
    lost = next((name for name in found.tensors.names if name not in held), None)
    if lost is not None:
        raise _not_sealed(record, "a tensor that was written is in no rank's state", path=lost)
    return data


def check_files(draft: Draft, record: Checkpoint) -> None:
    """`CheckpointError` unless the data files that a record names are in the draft, whole."""
    there = draft.sizes()
    for file in record.files:
        if (found := there.get(file.name)) != file.nbytes:
            what = "is gone from it" if found is None else f"has {found} bytes in it"
            raise CheckpointError(
                f"the draft was changed after it was written: {file.name}, {file.nbytes} bytes, "
                f"{what}. The step was not committed: save it again",
                step=record.step,
                phase="commit",
                file=file.name,
            )


def _not_sealed(record: Checkpoint, why: str, path: str | None = None) -> CheckpointError:
    return CheckpointError(
        f"the step was not committed, its commit record is wrong: {why}",
        step=record.step,
        phase="commit",
        path=path,
    )


def _as_written(shares: Sequence[Written], outlines: Outlines, names: set[str]) -> Outlines:
    """The outlines with what planners made of tensors: other names and other dtypes."""
    called = {old: new for share in shares for new, old in share.origins}
    dtypes = {name: dtype for share in shares for name, dtype in share.dtypes}

    def name_of(name: str) -> str:
        found = name if name in names else called.get(name, name)
        if found not in names:
            raise CheckpointError(
                "the planner left a tensor out, or renamed it and copied it at once: it could not "
                "be found again",
                phase="commit",
                path=name,
            )
        return found

    def leaf_of(leaf: Leaf, known: Sequence[str]) -> Leaf:
        part = next(parts(leaf), None)
        if part is None or part.storage < 0 or known[part.storage] not in dtypes:
            return leaf
        path, dtype = known[part.storage], dtypes[known[part.storage]]
        part = msgspec.structs.replace(part, dtype=dtype)
        if isinstance(leaf, TensorLeaf) and part.strides is None and not part.offset:
            return part
        if isinstance(leaf, DTensorLeaf):
            return msgspec.structs.replace(leaf, local=part)
        if isinstance(leaf, ShardedLeaf):
            return msgspec.structs.replace(leaf, shards=(part,), dtype=dtype)
        raise CheckpointError("the planner converted a part of a leaf", phase="commit", path=path)

    bases = []
    own = []
    for base in outlines.outlines:
        known = tuple(map(name_of, base.names))
        leaves = tuple(leaf_of(leaf, known) for leaf in base.leaves) if dtypes else base.leaves
        bases.append(msgspec.structs.replace(base, names=known, leaves=leaves))
    for held in outlines.own:
        named = tuple((index, name_of(name)) for index, name in held.names)
        known = bases[outlines.ranks[held.rank]].names
        changed = dict(named)
        known = tuple(changed.get(index, name) for index, name in enumerate(known))
        kept = tuple((index, leaf_of(leaf, known)) for index, leaf in held.leaves)
        own.append(Own(held.rank, kept, named))
    return Outlines(tuple(bases), outlines.ranks, tuple(own))
