"""Commit records that somebody has changed and then given a right digest."""

from __future__ import annotations

import base64
import contextlib
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash


def body_of(data: bytes) -> Any:
    """What stands in a commit record, as plain values."""
    return msgspec.json.decode(data)["checkpoint"]


def as_rows(body: Any) -> Any:
    """The same with a row for each tensor and a dict for each table, which are easier to forge."""
    tilings, names, numbers, files, starts = body["tensors"]
    which = column(numbers, len(names))
    counts = [tilings[number][2] for number in which]
    places = zip(column(files, sum(counts)), column(starts, sum(counts)), strict=True)
    body["tensors"] = []
    for name, number in zip(names, which, strict=True):
        dtype, shape, count, offsets, sizes = tilings[number]
        boxes = [([0] * len(shape), shape)]
        if offsets or sizes:
            rows = [in_rows(column(one, count * len(shape)), count) for one in (offsets, sizes)]
            boxes = list(zip(*rows, strict=True))
        shards = [[*box, *next(places)] for box in boxes]
        body["tensors"].append([name, dtype, shape, shards])
    for outline in body["outlines"]:
        outline[3] = {str(index): strides for index, strides in outline[3]}
    own = {}
    for rank, *tables in body["own"]:
        own[str(rank)] = [{str(index): item for index, item in table} for table in tables]
    body["own"] = own
    return body


def as_columns(body: Any) -> Any:
    """A record with rows as it stands in a file, whatever numbers are in it."""
    rows = body["tensors"]
    boxes = [box for _, _, _, shards in rows for box in shards]
    tilings = []
    for _, dtype, shape, shards in rows:
        whole = [shard[:2] for shard in shards] == [[[0] * len(shape), shape]]
        offsets, sizes = (
            "" if whole else packed([number for shard in shards for number in shard[at]])
            for at in (0, 1)
        )
        tilings.append([dtype, shape, len(shards), offsets, sizes])
    columns = [list(range(len(rows))), [box[2] for box in boxes], [box[3] for box in boxes]]
    body["tensors"] = [tilings, [row[0] for row in rows], *map(packed, columns)]
    for outline in body["outlines"]:
        outline[3] = [[int(index), strides] for index, strides in outline[3].items()]
    body["own"] = [
        [int(rank), *([[int(index), item] for index, item in table.items()] for table in tables)]
        for rank, tables in body["own"].items()
    ]
    return body


def column(text: str, count: int) -> list[int]:
    data = base64.b64decode(text)
    width = len(data) // max(1, count)
    return [int.from_bytes(data[at : at + width], "little") for at in range(0, len(data), width)]


def in_rows(numbers: list[int], count: int) -> list[list[int]]:
    width = len(numbers) // count
    return [numbers[at : at + width] for at in range(0, len(numbers), width)]


def packed(numbers: list[int], width: int = 8) -> str:
    """A column of numbers, which may be such as no writer writes."""
    data = b"".join((number % (1 << 8 * width)).to_bytes(width, "little") for number in numbers)
    return base64.b64encode(data).decode()


def forged(body: Any) -> bytes:
    """A commit record that says this, digest and all."""
    return forged_bytes(msgspec.json.encode(body))


def forged_bytes(text: bytes) -> bytes:
    digest = xxhash.xxh3_128_hexdigest(text)
    return b'{"checkpoint":' + text + b',"digest":"' + digest.encode() + b'"}'


def change(step: Path, how: Callable[[Any], Any]) -> None:
    """Rewrite a step's record. `how` changes the plain values, or returns others."""
    path = step / "manifest.json"
    body = body_of(path.read_bytes())
    path.write_bytes(forged(how(body) or body))


@contextlib.contextmanager
def little_memory(nbytes: int) -> Iterator[None]:
    """Within: no more than `nbytes` of address space beyond what this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def kept(step: Path) -> Iterator[Path]:
    """Within: the step may be damaged; afterwards it is as it was."""
    spare = step.parent.parent / f"{step.name}.spare"
    shutil.copytree(step, spare)
    try:
        yield step
    finally:
        shutil.rmtree(step, ignore_errors=True)
        spare.rename(step)


def flip(path: Path, offset: int, bits: int = 0xFF) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (old,) = file.read(1)
        file.seek(offset)
        file.write(bytes([old ^ bits]))
