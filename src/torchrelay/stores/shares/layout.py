"""Which tensors go into which `.safetensors` file, and where in it. Pure: sizes in, plan out.

Tensors without elements are in the header alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil, prod
from typing import NamedTuple

import msgspec

from torchrelay.record.dtypes import itemsize
from torchrelay.stores.safetensors import METADATA, HeaderEntry, described, header

FILE_BYTES = 1 << 30  # a group of tensors larger than this is split
CHUNK_BYTES = (4 << 10, 1 << 20)  # the least, and what files of a usual size have
CHUNKS = (1 << 8, 1 << 12)  # of a file: smaller chunks say better what is damaged, but are more
TOP = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_RANKED = re.compile(r"\.rank-(\d+)-of-\d+")
LOOSE = "0"  # the file of tensors that are in no group; no key of a group begins like this


class Entry(NamedTuple):
    """A box of a tensor to be written. `top`: the key of the state's root that it is under."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    top: str | None = None

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


def arrange(
    entries: Sequence[Entry], rank: int = 0, world: int = 1, file_bytes: int | None = FILE_BYTES
) -> list[FileLayout]:
    """The files of one rank.

    Each top-level entry of the state has its own: `model.safetensors` holds what is under "model",
    by names that start below it, so that a model saved by one process is an ordinary model file.
    A state that is all tensors at its root goes to `model.safetensors` as it is.
    """
    tops = {entry.top for entry in entries}
    groups: dict[str, list[int]] = {}
    for index, entry in enumerate(entries):
        if tops == {None}:
            group = "model"
        else:
            group = entry.top if entry.top and TOP.fullmatch(entry.top) else LOOSE
        groups.setdefault(group, []).append(index)
    files = []
    for group, members in groups.items():
        split = _split([entries[index].nbytes for index in members], file_bytes)
        ranked = group if world == 1 else f"{group}.rank-{rank:05}-of-{world:05}"
        for part, places in enumerate(split, 1):
            name = ranked if len(split) == 1 else f"{ranked}-{part:05}-of-{len(split):05}"
            chosen = [members[place] for place in places]
            below = "" if group == LOOSE else group
            files.append(_file(f"{name}.safetensors", below, chosen, entries))
        if len(split) > 1 and world == 1:
            files.append(_index(group, files[-len(split) :], entries))
    return files


def _index(group: str, files: Sequence[FileLayout], entries: Sequence[Entry]) -> FileLayout:
    """The index file that loaders of models in several files expect: tensor names to files."""
    names = {key: file.name for file in files for key in file.keys}
    total = sum(entries[index].nbytes for file in files for _, index in file.placed)
    text = msgspec.json.encode({"metadata": {"total_size": total}, "weight_map": names})
    return FileLayout(
        f"{group}.safetensors.index.json", text, (), len(text), _chunk_bytes(len(text))
    )


def rank_of(name: str) -> int | None:
    """The rank that wrote a file, by its name; None where the step was written by one process."""
    match = _RANKED.search(name)
    return int(match[1]) if match else None


def _split(sizes: Sequence[int], file_bytes: int | None) -> list[list[int]]:
    """Consecutive places, in as many parts of about the same size as keep under the limit."""
    total = sum(sizes)
    parts = 1 if file_bytes is None else max(1, ceil(total / file_bytes))
    split: list[list[int]] = [[]]
    done = 0
    for place, size in enumerate(sizes):
        if split[-1] and len(split) < parts and done + size / 2 > total * len(split) / parts:
            split.append([])
        split[-1].append(place)
        done += size
    return split


def _file(name: str, group: str, members: list[int], entries: Sequence[Entry]) -> FileLayout:
    ordered = sorted(members, key=lambda index: -itemsize(entries[index].dtype))
    keys: dict[str, int] = {METADATA: -1}
    for index in ordered:
        key, count = _key(entries[index], group), 1
        while key in keys:
            count += 1
            key = f"{_key(entries[index], group)}~{count}"
        keys[key] = index
    del keys[METADATA]
    head = header(
        HeaderEntry(key, *described(entry.dtype, entry.sizes), entry.nbytes)
        for key, entry in ((key, entries[index]) for key, index in keys.items())
    )
    placed, end = [], len(head)
    for index in ordered:
        if nbytes := entries[index].nbytes:
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
