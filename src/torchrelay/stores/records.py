"""The commit record of a step, `manifest.json`: what the step holds and where its bytes are.

The file is one JSON object of two fields: `checkpoint`, the record below, and `digest`, the
xxh3-128 of the bytes of that field as they stand in the file. The encoded record is a contract:
docs/checkpoint-format.md describes it, and tests/golden holds steps that every version must read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product
from math import prod

import msgspec
import xxhash

from torchrelay.errors import ManifestError
from torchrelay.state.leaves import parts
from torchrelay.state.manifest import Leaf
from torchrelay.state.outline import Outline
from torchrelay.state.pause import gc_paused
from torchrelay.state.spans import extent, packed
from torchrelay.state.validation import check_leaves, check_outline, itemsize
from torchrelay.stores.seam import MAX_MANIFEST_BYTES

FORMAT = (1, 0)
DIGEST_BYTES = 16
ALIGN = 8  # of a tensor's first byte in its file, or its item size if that is less
MAX_CELLS = 1 << 20  # beyond one a shard, of the grids that the shards of all tensors span
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class _Record(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Small records stand as arrays: field order is part of the format."""


class Shard(_Record, frozen=True):
    """A box of a tensor: its elements, row-major, from byte `start` of a file on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    start: int


class StoredTensor(_Record, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]


class DataFile(_Record, frozen=True):
    """`digests`: xxh3-128 of each `chunk_bytes` of the file, from its first byte to its last."""

    name: str
    nbytes: int
    chunk_bytes: int
    digests: bytes


class Blob(_Record, frozen=True):
    """Bytes that a planner of torch made of an object; `kind` says how to read them back.

    "state": a packed state of plain values and tensors; "raw": as the planner wrote them.
    """

    name: str
    kind: str
    file: int
    start: int
    nbytes: int


class Own(_Record, frozen=True):
    """Where one rank's outline differs from the one it shares: leaves and names, by index."""

    leaves: dict[int, Leaf]
    names: dict[int, str]


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A committed step. `ranks` says for each rank that saved which outline it has, `own` how its
    outline differs from that, `save_id` what a writer of torch's DCP called the save."""

    format: tuple[int, int] = FORMAT
    step: int
    time: str
    torch: str
    torchrelay: str
    outlines: tuple[Outline, ...]
    ranks: tuple[int, ...]
    own: dict[int, Own] = {}
    tensors: tuple[StoredTensor, ...]
    files: tuple[DataFile, ...]
    blobs: tuple[Blob, ...] = ()
    save_id: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    @property
    def world(self) -> int:
        """Ranks that saved it."""
        return len(self.ranks)

    def outline(self, rank: int) -> Outline:
        """The outline of a rank that saved it."""
        shared = self.outlines[self.ranks[rank]]
        own = self.own.get(rank)
        if own is None:
            return shared
        leaves = [own.leaves.get(index, leaf) for index, leaf in enumerate(shared.leaves)]
        names = [own.names.get(index, name) for index, name in enumerate(shared.names)]
        return Outline(shared.tree, tuple(leaves), tuple(names), shared.strides)

    def outlines_for(self, rank: int, world: int) -> list[Outline]:
        """The outlines that a rank of a group of `world` loads from, the first of them first.

        Its own where the group is as large as the one that saved. Else that of the same rank, and
        those of the others, laid over each other.
        """
        if world == self.world or (len(self.outlines) == 1 and not self.own):
            return [self.outline(min(rank, self.world - 1))]
        first = rank if rank < self.world else 0
        return [self.outline(r) for r in dict.fromkeys((first, *range(self.world)))]


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    checkpoint: msgspec.Raw
    digest: str


class _Version(msgspec.Struct):
    format: tuple[int, int]


_envelope = msgspec.json.Decoder(_Envelope)
_version = msgspec.json.Decoder(_Version)
_checkpoint = msgspec.json.Decoder(Checkpoint)


def encode(checkpoint: Checkpoint) -> bytes:
    body = msgspec.json.encode(checkpoint)
    return msgspec.json.encode(_Envelope(msgspec.Raw(body), xxhash.xxh3_128_hexdigest(body)))


def decode(data: bytes) -> Checkpoint:
    """The record in `data`, its digest and every number in it checked, or `ManifestError`."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"commit record of {len(data)} bytes, the cap is {MAX_MANIFEST_BYTES}")
    with gc_paused():
        try:
            envelope = _envelope.decode(data)
            body = bytes(envelope.checkpoint)
            # Byte for byte: nothing beside the two fields, and those in one spelling.
            if data != msgspec.json.encode(envelope):
                raise ManifestError(
                    "not a commit record: bytes that were not written by torchrelay"
                )
            if envelope.digest != xxhash.xxh3_128_hexdigest(body):
                raise ManifestError(
                    "the commit record does not have the digest it was written with"
                )
            major, minor = _version.decode(body).format
            if major != FORMAT[0]:
                raise ManifestError(
                    f"a checkpoint of format {major}.{minor}, this version reads {FORMAT[0]}.x"
                )
            checkpoint = _checkpoint.decode(body)
            check(checkpoint)
        except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as fault:
            raise ManifestError(f"not a commit record: {fault}") from None
    return checkpoint


def chunk_count(file: DataFile) -> int:
    return -(-file.nbytes // file.chunk_bytes)


def check(checkpoint: Checkpoint) -> None:
    """Raise `ManifestError` unless all parts of the record agree with each other."""
    names = set()
    for file in checkpoint.files:
        if not PLAIN_NAME.fullmatch(file.name) or file.name in names:
            raise ManifestError(f"file name {file.name[:80]!r}")
        names.add(file.name)
        if file.nbytes < 1 or file.chunk_bytes < 1:
            raise ManifestError(f"{file.name}: {file.nbytes} bytes in chunks of {file.chunk_bytes}")
        if file.chunk_bytes % ALIGN and chunk_count(file) > 1:
            raise ManifestError(f"{file.name}: chunks of {file.chunk_bytes} bytes cut elements")
        if len(file.digests) != DIGEST_BYTES * chunk_count(file):
            raise ManifestError(f"{file.name}: {len(file.digests)} bytes of digests")
    sizes: dict[str, int] = {}
    room = MAX_CELLS
    for tensor in checkpoint.tensors:
        if tensor.name in sizes:
            raise ManifestError(f"tensor {tensor.name[:80]!r} stands there twice")
        sizes[tensor.name], cells = _check_tensor(tensor, checkpoint.files, room)
        room -= cells
    for blob in checkpoint.blobs:
        if blob.kind not in ("state", "raw"):
            raise ManifestError(f"blob of kind {blob.kind[:40]!r}")
        _check_range(blob.file, blob.start, blob.nbytes, checkpoint.files)
    if not checkpoint.ranks:
        raise ManifestError("a step of no rank")
    if not all(0 <= index < len(checkpoint.outlines) for index in checkpoint.ranks):
        raise ManifestError("a rank has no outline")
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors}
    for outline in checkpoint.outlines:
        _check_names(outline.names, sizes)
        for index, strides in outline.strides.items():
            if not 0 <= index < len(outline.names):
                raise ManifestError("strides of no tensor")
            _check_strides(shapes[outline.names[index]], strides)
        check_outline(outline.tree, outline.leaves, [sizes[name] for name in outline.names])
    _check_own(checkpoint, sizes, shapes)


def _check_own(
    checkpoint: Checkpoint, sizes: dict[str, int], shapes: dict[str, tuple[int, ...]]
) -> None:
    """What ranks have of their own; no more of an outline is looked at than it changes."""
    users: dict[int, dict[int, list[int]]] = {}  # by outline and name, the leaves that lie there
    for rank, own in checkpoint.own.items():
        if not 0 <= rank < checkpoint.world:
            raise ManifestError(f"leaves of rank {rank} of {checkpoint.world}")
        number = checkpoint.ranks[rank]
        shared = checkpoint.outlines[number]
        if not all(0 <= index < len(shared.leaves) for index in own.leaves):
            raise ManifestError("a rank's own leaf that has no place")
        if not all(0 <= index < len(shared.names) for index in own.names):
            raise ManifestError("a rank's own name that has no place")
        _check_names(own.names.values(), sizes)
        for index in own.names.keys() & shared.strides.keys():
            _check_strides(shapes[own.names[index]], shared.strides[index])
        if number not in users:
            users[number] = _users(shared)
        moved = {at for index in own.names for at in users[number].get(index, ())}
        leaves = [shared.leaves[at] for at in moved.difference(own.leaves)]
        names = [own.names.get(index, name) for index, name in enumerate(shared.names)]
        check_leaves((*leaves, *own.leaves.values()), [sizes[name] for name in names])


def _users(outline: Outline) -> dict[int, list[int]]:
    users: dict[int, list[int]] = {}
    for at, leaf in enumerate(outline.leaves):
        for part in parts(leaf):
            users.setdefault(part.storage, []).append(at)
    return users


def _check_names(names: Iterable[str], sizes: dict[str, int]) -> None:
    for name in names:
        if name not in sizes:
            raise ManifestError(f"no tensor {name[:80]!r}")


def _check_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Strides are those of a tensor without holes: they take no more memory than its elements."""
    if len(strides) == len(shape) and all(0 <= stride < 1 << 62 for stride in strides):
        layout = packed(shape, strides)
        if layout is not None and layout.numel == extent(shape, strides) == prod(shape):
            return
    raise ManifestError(f"strides {strides[:8]} of a tensor of shape {shape[:8]}")


def _check_range(file: int, start: int, nbytes: int, files: tuple[DataFile, ...]) -> None:
    if not 0 <= file < len(files):
        raise ManifestError(f"file {file} of {len(files)}")
    if start < 0 or nbytes < 0 or start + nbytes > files[file].nbytes:
        raise ManifestError(f"{files[file].name}: bytes {start} to {start + nbytes} are not in it")


def _check_tensor(tensor: StoredTensor, files: tuple[DataFile, ...], room: int) -> tuple[int, int]:
    """The tensor's bytes, and the cells of its grid beyond one a shard: no more than `room`."""
    size = itemsize(tensor.dtype)
    shape = tensor.shape
    if len(shape) > 64 or any(not 0 < length < 1 << 62 for length in shape):
        raise ManifestError(f"tensor {tensor.name[:80]!r} of shape {shape}")
    for shard in tensor.shards:
        if not len(shard.offsets) == len(shard.sizes) == len(shape):
            raise ManifestError(f"{tensor.name[:80]!r}: a shard of other dimensions")
        for offset, length, whole in zip(shard.offsets, shard.sizes, shape, strict=True):
            if offset < 0 or length < 0 or offset + length > whole:
                raise ManifestError(f"{tensor.name[:80]!r}: a shard reaches out of it")
        _check_range(shard.file, shard.start, prod(shard.sizes) * size, files)
        if shard.start % min(size, ALIGN):
            raise ManifestError(f"{tensor.name[:80]!r}: elements at odd bytes of its file")
    covered = sum(prod(shard.sizes) for shard in tensor.shards)
    overlap, cells = _overlap(tensor.shards, room) if covered == prod(shape) else (True, 0)
    if overlap:
        raise ManifestError(f"{tensor.name[:80]!r}: its shards do not cover it once")
    return prod(shape) * size, cells


def _overlap(shards: Iterable[Shard], room: int) -> tuple[bool, int]:
    """Whether two boxes share an element, by the cells of the grid that all their edges make; and
    how many cells there are beyond one a box."""
    boxes = [shard for shard in shards if prod(shard.sizes)]
    if len(boxes) < 2:
        return False, 0
    edges = [
        sorted(
            {
                edge
                for box in boxes
                for edge in (box.offsets[dim], box.offsets[dim] + box.sizes[dim])
            }
        )
        for dim in range(len(boxes[0].offsets))
    ]
    place = [{edge: index for index, edge in enumerate(line)} for line in edges]
    spans = [
        [
            range(place[dim][offset], place[dim][offset + length])
            for dim, (offset, length) in enumerate(zip(box.offsets, box.sizes, strict=True))
        ]
        for box in boxes
    ]
    more = sum(prod(map(len, span)) for span in spans) - len(boxes)
    if more > room:
        raise ManifestError(f"{len(boxes)} shards that cut a tensor into too many cells")
    seen: set[tuple[int, ...]] = set()
    for span in spans:
        for cell in product(*span):
            if cell in seen:
                return True, more
            seen.add(cell)
    return False, more
