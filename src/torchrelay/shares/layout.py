"""Which tensors go into which `.safetensors` file, and where in it. Pure: sizes in, plan out.

Tensors without elements are in the header alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from math import ceil, prod
from typing import NamedTuple

import msgspec
import numpy as np

from torchrelay.options import FILE_BYTES
from torchrelay.record.dtypes import itemsize
from torchrelay.record.kinds import KindTable
from torchrelay.record.schema import ImageKind, ObjectBytes, Record, VolumeRecord, column_of
from torchrelay.stores.safetensors import METADATA, header

CHUNK_BYTES = (4 << 10, 1 << 20)  # the least, and what files of a usual size have
CHUNKS = (1 << 8, 1 << 12)  # of a file: smaller chunks say better what is damaged, but are more
TOP = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_RANKED = re.compile(r"\.rank-(\d+)-of-\d+|^__(\d+)_\d+\.distcp$")  # ours, and DCP's
LOOSE = "0"  # the file of tensors that are in no group; no key of a group begins like this


class Entry(NamedTuple):
    """A box of a tensor to be written. `top`: the key of the state's root that it is under.
    `packed`: kind and size of an object that torch's planners gave as bytes, if it is one."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    top: str | None = None
    packed: tuple[str, int] | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.sizes) * itemsize(self.dtype)


class FileLayout(NamedTuple):
    """A file to be: name, first bytes, and (start, index of each entry that has bytes) in ascending
    order.

    `keys`: what the entries are called in the file.
    """

    name: str
    header: bytes
    placed: tuple[tuple[int, int], ...]
    nbytes: int
    chunk_bytes: int
    keys: tuple[str, ...] = ()

    @property
    def facts(self) -> tuple[str, int, int]:
        return self.name, self.nbytes, self.chunk_bytes


class ShareLayout:
    """The boxes that one rank writes, and its files. `separate`: whether some were asked to have
    files of their own."""

    def __init__(
        self, entries: Sequence[Entry], files: list[FileLayout], *, separate: bool = False
    ) -> None:
        self.entries, self.files, self.separate = entries, files, separate

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each entry."""
        return [entry.nbytes for entry in self.entries]

    @cached_property
    def record(self) -> Record:
        """The report that all is written, but for the digests: boxes by the names of their tensors,
        and volumes. Made when it is first needed, which a trainer does not wait for."""
        boxes: dict[str, list[tuple[Entry, int, int]]] = {}
        objects = []
        for number, file in enumerate(self.files):
            for start, index in file.placed:
                entry = self.entries[index]
                if entry.packed is not None:
                    kind, nbytes = entry.packed
                    objects.append(ObjectBytes(entry.name, kind, number, start, nbytes))
                else:
                    boxes.setdefault(entry.name, []).append((entry, number, start))
        kinds = KindTable()
        known: dict[object, int] = {}
        kind_of = []
        for placed in boxes.values():
            key = tuple([entry[1:5] for entry, _, _ in placed])  # dtype, shape and box of each
            if key not in known:
                dtype, shape, _, _ = key[0]
                cut = [(offsets, sizes) for _, _, offsets, sizes in key]
                known[key] = kinds.images.number(ImageKind.of_boxes(dtype, shape, cut))
            kind_of.append(known[key])
        places = np.array([row[1:] for placed in boxes.values() for row in placed], np.int64)
        return kinds.record(
            (),
            np.array(kind_of, np.int64),
            ranks=(),
            volumes=tuple([VolumeRecord(*file.facts) for file in self.files]),
            volume_of=column_of(places[:, 0]) if boxes else None,
            starts=places[:, 1] if boxes else None,
            names=tuple(enumerate(boxes)),
            objects=tuple(objects),
        )


def arrange(
    entries: Sequence[Entry],
    rank: int = 0,
    world: int = 1,
    file_bytes: int | None = FILE_BYTES,
    alone: Sequence[Sequence[int]] = (),
) -> ShareLayout:
    """The files of one rank.

    Each top-level entry of the state has its own: `model.safetensors` holds what is under "model",
    by names that start below it, so that a model saved by one process is an ordinary model file.
    A state that is all tensors at its root goes to `model.safetensors` as it is. Entries of `alone`
    have a file for each of its lists; all of a list are in one group.
    """
    sizes = [entry.nbytes for entry in entries]
    groups = groups_of(entries)
    separate: dict[str, list[list[int]]] = {}
    for members in alone:
        separate.setdefault(groups[members[0]], []).append(list(members))
    placed = {index for members in alone for index in members}
    rest: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        together = rest.setdefault(group, [])
        if index not in placed:
            together.append(index)
    files = []
    for group, members in rest.items():
        parts = separate.get(group, [])
        if members:
            cut = split([sizes[index] for index in members], file_bytes)
            parts = [*parts, *([members[place] for place in places] for places in cut)]
        ranked = group if world == 1 else f"{group}.rank-{rank:05}-of-{world:05}"
        below = "" if group == LOOSE else group
        for part, chosen in enumerate(parts, 1):
            name = ranked if len(parts) == 1 else f"{ranked}-{part:05}-of-{len(parts):05}"
            files.append(_file(f"{name}.safetensors", below, chosen, entries, sizes))
        if len(parts) > 1 and world == 1:
            files.append(_index(group, files[-len(parts) :], sizes))
    return ShareLayout(entries, files, separate=bool(alone))


def groups_of(entries: Sequence[Entry]) -> list[str]:
    """The group of each entry, which its file is named after."""
    if {entry.top for entry in entries} == {None}:
        return ["model"] * len(entries)
    tops = [entry.top for entry in entries]
    return [top if top and TOP.fullmatch(top) else LOOSE for top in tops]


def _index(group: str, files: Sequence[FileLayout], sizes: Sequence[int]) -> FileLayout:
    """The index file that loaders of models in several files expect: tensor names to files."""
    names = {key: file.name for file in files for key in file.keys}
    total = sum(sizes[index] for file in files for _, index in file.placed)
    text = msgspec.json.encode({"metadata": {"total_size": total}, "weight_map": names})
    return FileLayout(
        f"{group}.safetensors.index.json", text, (), len(text), _chunk_bytes(len(text))
    )


def rank_of(name: str) -> int | None:
    """The rank that wrote a file, by its name; None where the step was written by one process."""
    match = _RANKED.search(name)
    return int(match[1] or match[2]) if match else None


def split(sizes: Sequence[int], file_bytes: int | None) -> list[list[int]]:
    """Consecutive places, in as many parts of about the same size as keep under the limit."""
    total = sum(sizes)
    parts = 1 if file_bytes is None else max(1, ceil(total / file_bytes))
    if parts == 1:
        return [list(range(len(sizes)))]
    split: list[list[int]] = [[]]
    done = 0
    for place, size in enumerate(sizes):
        if split[-1] and len(split) < parts and done + size / 2 > total * len(split) / parts:
            split.append([])
        split[-1].append(place)
        done += size
    return split


def _file(
    name: str, group: str, members: list[int], entries: Sequence[Entry], sizes: Sequence[int]
) -> FileLayout:
    ordered = sorted(members, key=lambda index: -itemsize(entries[index].dtype))
    keys: dict[str, int] = {METADATA: -1}
    for index in ordered:
        key, count = _key(entries[index], group), 1
        while key in keys:
            count += 1
            key = f"{_key(entries[index], group)}~{count}"
        keys[key] = index
    del keys[METADATA]
    head = header((key, entries[n].dtype, entries[n].sizes) for key, n in keys.items())
    placed, end = [], len(head)
    for index in ordered:
        if nbytes := sizes[index]:
            placed.append((end, index))
            end += nbytes
    return FileLayout(name, head, tuple(placed), end, _chunk_bytes(end), tuple(keys))


def _chunk_bytes(nbytes: int) -> int:
    least, usual = CHUNK_BYTES
    few, many = CHUNKS
    if nbytes > usual * many:
        return usual * ceil(nbytes / (usual * many))
    chunk = usual
    while chunk > least and nbytes < chunk * few:
        chunk //= 2
    return chunk


def _key(entry: Entry, group: str) -> str:
    """The key of an entry in its file: its name below the group, and its box if it has one."""
    name = entry.name
    if group == entry.top and name.startswith(group + "."):
        name = name[len(group) + 1 :]
    if entry.sizes != entry.shape:
        name += "@" + ",".join(map(str, entry.offsets))
    return name
