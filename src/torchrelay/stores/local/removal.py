"""Removing a step or a draft: its own files and no others, without following a link.

Its own files are those that its commit record names. Without a readable record, they are those that
are named like data files. All other files stay.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from torchrelay.files import is_symlink
from torchrelay.stores.listing import DATA_NAME, MANIFEST
from torchrelay.stores.local.files import Files
from torchrelay.stores.local.step import read_manifest
from torchrelay.system import DIRECTORY, NO_FOLLOW

_DIRECTORY = os.O_RDONLY | DIRECTORY | NO_FOLLOW

logger = logging.getLogger("torchrelay")


class _Doomed(msgspec.Struct, array_like=True):
    name: str


class _Volumes(msgspec.Struct):
    volumes: list[_Doomed] = []


class _NamedFiles(msgspec.Struct):
    """As much of a commit record as says which files there are."""

    record: _Volumes


_record = msgspec.json.Decoder(_NamedFiles)


def ownership(manifest: bytes | None) -> Callable[[str], bool]:
    """Tells by its name whether a file is one of a step with this record, or of a draft."""
    if manifest is not None:
        with suppress(msgspec.MsgspecError, RecursionError):
            names = {file.name for file in _record.decode(manifest).record.volumes}
            return names.__contains__
    return lambda name: DATA_NAME.fullmatch(name) is not None


def remove_directory(path: str, files: Files) -> bool:
    """Remove what is a step's or a draft's own, the commit record first, and then the directory,
    if nothing is left in it. A link in its place is removed, and what it leads to is not touched.

    Another process may be removing it too: what is gone already counts as removed. Returns whether
    the name is gone.
    """
    if is_symlink(path):
        with suppress(FileNotFoundError):
            files.unlink(path)
        return True
    try:
        directory = os.open(path, _DIRECTORY)
    except FileNotFoundError:
        return True
    with closing(directory) as within:
        manifest = None
        with suppress(OSError, EOFError):
            manifest = read_manifest(within, path)
        own = ownership(manifest)
        with os.scandir(within) as entries:
            names = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        for name in sorted(names, key=lambda name: (name != MANIFEST, name)):
            if not names[name] and (name == MANIFEST or own(name)):
                with suppress(FileNotFoundError):
                    files.unlink(f"{path}/{name}", within)
                del names[name]
    if names:
        logger.warning("%s stays, for what is none of a step's: %s", path, ", ".join(sorted(names)))
        return False
    with suppress(FileNotFoundError):
        files.remove_dir(path)
    return True


@contextmanager
def closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)
