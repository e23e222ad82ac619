"""Stopping a store's file calls one by one, and what a power cut then leaves on the medium.

`CutFiles` does what `Files` does and keeps a journal; from a chosen call on nothing happens any
more. `Disk` plays a journal back onto a copy of the directory as it was, and then writes out a
state that the medium may be in: what was synced is there, anything else may be.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from torchrelay.checkpointer import front
from torchrelay.stores.local.files import Files
from torchrelay.stores.local.store import LocalDraft, LocalStore


class Cut(BaseException):
    """The process ends here. No error: nothing is meant to handle it."""


class Call(NamedTuple):
    """A call that was made: `path` is its file or directory, `data` what else it took."""

    kind: str
    path: str
    data: Any = None


class CutFiles(Files):
    """Stops at call `at`, and at every call after it.

    `half`: a write that is stopped at has written half of its bytes. `error`: the call raises this
    errno instead, once, and the calls after it work.
    """

    def __init__(
        self, at: int | None = None, *, half: bool = False, error: int | None = None
    ) -> None:
        self.journal: list[Call] = []
        self._at = at
        self._half = half
        self._error = error
        self._count = 0
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}

    def _call(self, kind: str, path: str, data: Any = None) -> None:
        """To be called with the lock, before the act."""
        count = self._count
        self._count += 1
        if self._at is None or count < self._at:
            return
        if self._error is None:
            raise Cut(f"at call {count}: {kind} {path}")
        if count == self._at:
            raise OSError(self._error, os.strerror(self._error), path)

    def make_dir(self, path: str) -> None:
        with self._lock:
            self._call("make_dir", path)
            super().make_dir(path)
            self.journal.append(Call("make_dir", path))

    def create(self, path: str) -> int:
        with self._lock:
            self._call("create", path)
            fd = super().create(path)
            self._names[fd] = path
            self.journal.append(Call("create", path))
            return fd

    def reopen(self, path: str) -> int:
        fd = super().reopen(path)
        self._names[fd] = path
        return fd

    def write(self, fd: int, data: Any, position: int) -> None:
        data = bytes(data)
        path = self._names[fd]
        with self._lock:
            try:
                self._call("write", path)
            except BaseException:
                if self._half and self._count == (self._at or 0) + 1:
                    super().write(fd, data[: len(data) // 2], position)
                    self.journal.append(Call("write", path, (position, data[: len(data) // 2])))
                raise
            super().write(fd, data, position)
            self.journal.append(Call("write", path, (position, data)))

    def sync(self, fd: int) -> None:
        with self._lock:
            self._call("sync", self._names[fd])
            self.journal.append(Call("sync", self._names[fd]))

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            self._call("rename", old, new)
            super().rename(old, new)
            self.journal.append(Call("rename", old, new))

    def link(self, name: str, within: int | str, path: str) -> None:
        folder = Path(f"/proc/self/fd/{within}").readlink() if isinstance(within, int) else within
        with self._lock:
            self._call("link", path)
            super().link(name, within, path)
            self.journal.append(Call("link", path, f"{folder}/{name}"))

    def exchange(self, one: str, other: str) -> bool:
        with self._lock:
            self._call("exchange", one, other)
            done = super().exchange(one, other)
            if done:
                self.journal.append(Call("exchange", one, other))
            return done

    def unlink(self, path: str, within: int | None = None) -> None:
        with self._lock:
            self._call("unlink", path)
            super().unlink(path, within)
            self.journal.append(Call("unlink", path))

    def remove_dir(self, path: str) -> None:
        with self._lock:
            self._call("remove_dir", path)
            super().remove_dir(path)
            self.journal.append(Call("remove_dir", path))

    def sync_dir(self, path: str) -> None:
        with self._lock:
            self._call("sync_dir", path)
            self.journal.append(Call("sync_dir", path))


class NoExchange(CutFiles):
    """A file system that cannot swap two directories."""

    def exchange(self, one: str, other: str) -> bool:
        return False


class CutStore(LocalStore):
    """Knows its drafts, so that a test can end their locks as the end of a process does."""

    def __init__(self, root: str | os.PathLike[str], files: Files) -> None:
        super().__init__(root, files=files)
        self._drafts: list[LocalDraft] = []

    def draft(self, step: int, token: str, *, overwrite: bool = False) -> LocalDraft:
        draft = super().draft(step, token, overwrite=overwrite)
        self._drafts.append(draft)
        return draft

    def end(self) -> None:
        for draft in self._drafts:
            draft._release()


@contextmanager
def stores_with(files: Files) -> Any:
    """Within: checkpointers of this process write through these files. Their locks end with it."""
    opened: list[CutStore] = []

    def open_store(place: Any, *, timeout: float = 0.0) -> CutStore:
        opened.append(CutStore(place, files))
        return opened[-1]

    with mock.patch.object(front, "open_store", open_store):
        try:
            yield
        finally:
            for store in opened:
                store.end()


# The medium --------------------------------------------------------------------------------------


@dataclass
class _File:
    durable: bytes = b""
    now: bytearray = field(default_factory=bytearray)
    unsynced: list[tuple[int, int]] = field(default_factory=list)

    def write(self, position: int, data: bytes) -> None:
        self.now.extend(bytes(max(0, position + len(data) - len(self.now))))
        self.now[position : position + len(data)] = data
        self.unsynced.append((position, len(data)))

    def sync(self) -> None:
        self.durable, self.unsynced = bytes(self.now), []

    def left(self, how: str, rng: random.Random) -> bytes:
        """What the medium may hold of it."""
        if not self.unsynced or how == "kept":
            return bytes(self.now)
        if how == "lost":
            return self.durable
        if how == "truncated":
            return bytes(self.now[: len(self.now) // 2])
        out = bytearray(self.now)
        for position, nbytes in self.unsynced:
            fill = rng.randbytes(nbytes) if how == "garbage" else bytes(nbytes)
            out[position : position + nbytes] = fill
        return bytes(out)


CONTENTS = ("lost", "zeros", "garbage", "truncated", "kept")


@dataclass
class _Dir:
    durable: dict[str, _File | _Dir] = field(default_factory=dict)
    now: dict[str, _File | _Dir] = field(default_factory=dict)
    pending: list[tuple[str, str, Any]] = field(default_factory=list)

    def change(self, kind: str, name: str, more: Any = None) -> None:
        done = _applied(self.now, kind, name, more)
        assert done, f"{kind} {name}"
        self.pending.append((kind, name, more))

    def sync(self) -> None:
        self.durable, self.pending = dict(self.now), []

    def left(self, share: float, rng: random.Random) -> dict[str, _File | _Dir]:
        """What the medium may hold: each change since the last sync by chance, but none without
        those it builds on."""
        entries = dict(self.durable)
        for change in self.pending:
            if rng.random() < share:
                _applied(entries, *change)
        return entries


def _applied(entries: dict[str, Any], kind: str, name: str, more: Any) -> bool:
    if kind == "add" and name not in entries:
        entries[name] = more
        return True
    if kind == "drop" and name in entries:
        del entries[name]
        return True
    if kind == "rename" and name in entries and more not in entries:
        entries[more] = entries.pop(name)
        return True
    if kind == "exchange" and name in entries and more in entries:
        entries[name], entries[more] = entries[more], entries[name]
        return True
    return False


Tree = dict[str, Any]  # by name, the bytes of a file or the tree of a directory


class Disk:
    """A directory on a medium, everything in it durable at first."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._root = _read(base)
        self._open: dict[str, _File] = {}

    def play(self, journal: Sequence[Call]) -> Disk:
        for call in journal:
            self._do(call)
        return self

    def _parent(self, path: str) -> tuple[_Dir, str]:
        *above, name = Path(path).relative_to(self._base).parts
        return self._find(above), name

    def _find(self, parts: Sequence[str]) -> _Dir:
        node: Any = self._root
        for part in parts:
            node = node.now[part]
        assert isinstance(node, _Dir)
        return node

    def _do(self, call: Call) -> None:
        if call.kind == "sync_dir":
            self._find(Path(call.path).relative_to(self._base).parts).sync()
            return
        parent, name = self._parent(call.path)
        if call.kind == "make_dir":
            parent.change("add", name, _Dir())
        elif call.kind == "create":
            self._open[call.path] = _File()
            parent.change("add", name, self._open[call.path])
        elif call.kind == "link":
            beside, other = self._parent(call.data)
            parent.change("add", name, beside.now[other])
        elif call.kind == "write":
            self._open[call.path].write(*call.data)
        elif call.kind == "sync":
            self._open[call.path].sync()
        elif call.kind in ("rename", "exchange"):
            beside, other = self._parent(call.data)
            assert beside is parent, "between two directories"
            parent.change(call.kind, name, other)
        else:
            parent.change("drop", name)

    def left(self, *, names: float, contents: str, rng: random.Random) -> Tree:
        """What may be left: `names` is the chance of each name change since a sync, `contents`
        one of `CONTENTS`, or "any"."""
        return _left(self._root, names, contents, rng)


def _read(path: Path) -> _Dir:
    made = _Dir()
    for entry in path.iterdir():
        if entry.is_dir():
            made.now[entry.name] = _read(entry)
        else:
            data = entry.read_bytes()
            made.now[entry.name] = _File(data, bytearray(data))
    made.sync()
    return made


def _left(node: _Dir, names: float, contents: str, rng: random.Random) -> Tree:
    tree: Tree = {}
    for name, child in node.left(names, rng).items():
        if isinstance(child, _Dir):
            tree[name] = _left(child, names, contents, rng)
        else:
            how = rng.choice(CONTENTS) if contents == "any" else contents
            tree[name] = child.left(how, rng)
    return tree


def plant(tree: Tree, place: Path) -> None:
    """Make a directory of it."""
    place.mkdir()
    for name, content in tree.items():
        if isinstance(content, bytes):
            (place / name).write_bytes(content)
        else:
            plant(content, place / name)
