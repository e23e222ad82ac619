"""The commit record of a step, `manifest.json`: what the step holds and where its bytes are.

The file is one JSON object of two fields: `checkpoint`, the record below, and `digest`, the
xxh3-128 of the bytes of that field as they stand in the file. The encoded record is a contract:
docs/checkpoint-format.md describes it, and tests/golden holds steps that every version must read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import msgspec
import xxhash

from torchrelay.errors import ManifestError
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.geometry.strides import extent, packed
from torchrelay.plan.outline import Outline
from torchrelay.record.keys import check_keys
from torchrelay.record.manifest import Leaf
from torchrelay.record.pause import gc_paused
from torchrelay.record.stored import StoredTensor
from torchrelay.record.validation import check_leaves, check_outline, last_byte
from torchrelay.state.leaves import parts
from torchrelay.stores import file_places
from torchrelay.stores.file_places import FilePlaces
from torchrelay.stores.seam import MAX_MANIFEST_BYTES

FORMAT = (1, 0)
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class _StepRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Small records stand as arrays: field order is part of the format."""


class DataFile(_StepRecord, frozen=True):
    """`digests`: xxh3-128 of each `chunk_bytes` of the file, from its first byte to its last."""

    name: str
    nbytes: int
    chunk_bytes: int
    digests: bytes


class Blob(_StepRecord, frozen=True):
    """Bytes that a planner of torch made of an object; `kind` says how to read them back.

    "state": a packed state of plain values and tensors; "raw": as the planner wrote them.
    """

    name: str
    kind: str
    file: int
    start: int
    nbytes: int


class Own(_StepRecord, frozen=True):
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
    def planned(self) -> bool:
        """Whether a planner of torch's told the containers, as it does to the DCP writer: it takes
        tuples of tensors for lists, and drops empty containers."""
        return self.save_id is not None

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
        # Ranks of one outline have the same paths, and what the first of them has counts.
        ranks = {self.ranks[first]: first}
        for other, number in enumerate(self.ranks):
            ranks.setdefault(number, other)
        return [self.outline(other) for other in ranks.values()]


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    checkpoint: msgspec.Raw
    digest: str


class _StepVersion(msgspec.Struct):
    format: tuple[int, int]


class _OutlineNumbers(_StepRecord, frozen=True):
    tree: msgspec.Raw
    leaves: msgspec.Raw
    names: msgspec.Raw
    strides: dict[str, msgspec.Raw] = {}


class _OwnNumbers(_StepRecord, frozen=True):
    leaves: dict[str, msgspec.Raw]
    names: dict[str, msgspec.Raw]


class _Numbers(msgspec.Struct):
    """The numbers by which parts of a record are keyed, as text, which has a secret hash."""

    outlines: tuple[_OutlineNumbers, ...]
    own: dict[str, _OwnNumbers] = {}


_envelope = msgspec.json.Decoder(_Envelope)
_numbers = msgspec.json.Decoder(_Numbers)
_version = msgspec.json.Decoder(_StepVersion)
_checkpoint = msgspec.json.Decoder(Checkpoint)


def encode(checkpoint: Checkpoint) -> bytes:
    body = msgspec.json.encode(checkpoint)
    return msgspec.json.encode(_Envelope(msgspec.Raw(body), xxhash.xxh3_128_hexdigest(body)))


def content_digest(checkpoint: Checkpoint) -> str:
    """What a step holds, whenever and by whichever version it was saved, as a digest."""
    bare = msgspec.structs.replace(checkpoint, time="", torch="", torchrelay="")
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(bare))


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
            _check_numbers(body)
            checkpoint = _checkpoint.decode(body)
            check(checkpoint)
        except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as fault:
            raise ManifestError(f"not a commit record: {fault}") from None
    return checkpoint


def _check_numbers(body: bytes) -> None:
    """The decoder puts what is keyed by numbers into dicts: those have to be dicts that work."""
    found = _numbers.decode(body)
    tables: list[Mapping[str, object]] = [
        *(outline.strides for outline in found.outlines),
        found.own,
        *(table for own in found.own.values() for table in (own.leaves, own.names)),
    ]
    for table in tables:
        check_keys(tuple(map(int, table)))


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
        if file.chunk_bytes % file_places.ALIGN and chunk_count(file) > 1:
            raise ManifestError(f"{file.name}: chunks of {file.chunk_bytes} bytes cut elements")
        if len(file.digests) != DIGEST_BYTES * chunk_count(file):
            raise ManifestError(f"{file.name}: {len(file.digests)} bytes of digests")
    sizes: dict[str, int] = {}
    places = FilePlaces([(file.name, file.nbytes) for file in checkpoint.files])
    for tensor in checkpoint.tensors:
        if tensor.name in sizes:
            raise ManifestError(f"tensor {tensor.name[:80]!r} stands there twice")
        sizes[tensor.name] = places.check_tensor(
            tensor.name, tensor.dtype, tensor.shape, tensor.shards
        )
    for blob in checkpoint.blobs:
        if blob.kind not in ("state", "raw"):
            raise ManifestError(f"blob of kind {blob.kind[:40]!r}")
        places.check_range(blob.file, blob.start, blob.nbytes)
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
    needs: dict[int, _Needs] = {}  # by outline
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
        if own.names and number not in needs:
            needs[number] = _needs(shared)
        for index, name in own.names.items():
            for last, at in needs[number].get(index, ()):
                if at not in own.leaves:
                    if last > sizes[name]:
                        raise ManifestError(f"a leaf reaches past {name[:80]!r}")
                    break
        check_leaves(own.leaves.values(), _OwnSizes(shared.names, own.names, sizes))


class _OwnSizes(Sequence[int]):
    """The bytes of each tensor that an outline names, for a rank that has some names of its own."""

    def __init__(self, shared: Sequence[str], own: Mapping[int, str], sizes: Mapping[str, int]):
        self._shared, self._own, self._sizes = shared, own, sizes

    def __len__(self) -> int:
        return len(self._shared)

    def __getitem__(self, index: Any) -> Any:
        return self._sizes[self._own.get(index, self._shared[index])]


_Needs = dict[int, list[tuple[int, int]]]


def _needs(outline: Outline) -> _Needs:
    """By name, the last byte of it that each leaf reaches, and the leaf; those that reach furthest
    first."""
    found: _Needs = {}
    for at, leaf in enumerate(outline.leaves):
        for part in parts(leaf):
            if part.storage >= 0:
                found.setdefault(part.storage, []).append((last_byte(part), at))
    for leaves in found.values():
        leaves.sort(reverse=True)
    return found


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
