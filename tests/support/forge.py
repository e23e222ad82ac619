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
    return msgspec.json.decode(data)["record"]


def packed(numbers: list[int], width: int = 8) -> str:
    """A long column of numbers, which may be such as no writer writes."""
    data = b"".join((number % (1 << 8 * width)).to_bytes(width, "little") for number in numbers)
    return base64.b64encode(bytes([width]) + data).decode()


def forged(body: Any) -> bytes:
    """A commit record that says this, digest and all."""
    return forged_bytes(msgspec.json.encode(body))


def forged_bytes(text: bytes) -> bytes:
    digest = xxhash.xxh3_128_hexdigest(text)
    return b'{"record":' + text + b',"digest":"' + digest.encode() + b'"}'


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
