"""Checkpoints in a directory: one below it for each step.

    root/step-100/manifest.json            the commit record
    root/step-100/model.safetensors        data
    root/step-200.tmp-host-4711-9f2c/...   a draft; its writer holds a lock on it
    root/step-100.old-...                  a step moved away for its successor, where the file
                                           system cannot swap two directories
    root/step-300.aside-host-4711-9f2c     a step that was set aside by a rollback

A draft becomes a step by a rename, after its data and then its manifest are on the medium. A step
leaves by a rename too, so no reader finds half of one.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from torchrelay.steps import MAX_STEP
from torchrelay.stores.local.files import Files, lock, named
from torchrelay.stores.local.final_act import FinalAct, unknown
from torchrelay.stores.local.handles import Handles
from torchrelay.stores.local.reader import LocalStep, data_sizes
from torchrelay.stores.local.removal import closing, remove_directory
from torchrelay.stores.retry import ONCE, Retry
from torchrelay.stores.seam import MANIFEST, Buffer

WRITE_OUT_BYTES = 8 << 20
_TRIES = 100
FOREIGN_AGE = 24 * 3600.0  # seconds after which another host's draft counts as left behind

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})")
_DRAFT = re.compile(r"step-(\d+)\.(tmp|old)-(.+)-(\d+)-[0-9a-f]+")
_REPLACED = re.compile(r"step-(0|[1-9][0-9]{0,18})\.old-.+-\d+-[0-9a-f]+")
_ASIDE = re.compile(r"(step-\d+)\.aside-[A-Za-z0-9_.-]+")


def token() -> str:
    """A name for a draft that no other has; says whose it is."""
    host = re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())[:60] or "host"
    return f"{host}-{os.getpid()}-{os.urandom(4).hex()}"


class LocalStore:
    """A directory with checkpoints; made when the first step is begun."""

    def __init__(self, root: str | os.PathLike[str], *, files: Files | None = None) -> None:
        self.root = Path(root).absolute()
        self.url = str(self.root)
        self._files = files or Files()
        self._made = False

    def make(self) -> None:
        """Make the root and what is above it; the first time, see to it that its name lasts."""
        if self._made and self.root.exists():
            return
        above = [place for place in self.root.parents if not place.exists()]
        for place in (*reversed(above), self.root):
            if not place.exists():
                with suppress(FileExistsError):  # another process is as fast
                    self._files.make_dir(str(place))
            self._files.sync_dir(str(place.parent))
        self._made = True

    def path(self, step: int) -> Path:
        return self.root / f"step-{step}"

    def _at(self, step: int) -> Path:
        """Where a step lies: in its place, or where it was moved for a successor that is not there
        yet, or never came."""
        place = self.path(step)
        if not place.exists():
            place = next(iter(self._replaced(step)), place)
        return place

    def _replaced(self, step: int) -> list[Path]:
        matches = self._replacements(self._names())
        return [self.root / match[0] for match in matches if int(match[1]) == step]

    def _settled(self, step: int) -> str:
        """The name of a step's directory, once nothing else is left that could count as it."""
        place = self._at(step)
        for path in self._replaced(step):
            if path != place:
                self._delete(path.name, step=f"step-{step}")
        return place.name

    def steps(self) -> list[int]:
        folders = self._step_folders()
        while True:
            steps = [step for step, name in folders if _is_committed(self.root / name)]
            # One that was removed since it was listed has a successor, which may not be listed.
            if len(steps) == len(folders) or (again := self._step_folders()) == folders:
                return sorted(set(steps))
            folders = again

    def _step_folders(self) -> list[tuple[int, str]]:
        names = self._names()
        matches = [match for match in map(_STEP.fullmatch, names) if match]
        matches += self._replacements(names)
        found = [(int(match[1]), match[0]) for match in matches]
        return sorted(place for place in found if place[0] <= MAX_STEP)

    def _replacements(self, names: list[str]) -> list[re.Match[str]]:
        """Steps that were moved for their successors. A link with such a name is none of ours."""
        matches = map(_REPLACED.fullmatch, names)
        return [match for match in matches if match and not (self.root / match[0]).is_symlink()]

    def _names(self) -> list[str]:
        try:
            return [entry.name for entry in self.root.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            _check_way(self.root)
            return []

    def open(self, step: int, patience: Retry = ONCE) -> LocalStep:
        return LocalStep(str(self._at(step)), patience)

    def mark(self, step: int) -> str:
        return _mark(self._at(step))

    def draft(self, step: int, token: str, *, overwrite: bool = False) -> LocalDraft:
        return LocalDraft(self, step, token, overwrite, self._files)

    def delete(self, step: int) -> None:
        self._delete(self._settled(step), step=f"step-{step}")

    def _delete(self, name: str, step: str) -> None:
        away = self._move(name, f"{step}.tmp-{token()}")
        remove_directory(str(self.root / away), self._files)

    def _move(self, name: str, new: str) -> str:
        self._files.rename(str(self.root / name), str(self.root / new))
        self._files.sync_dir(str(self.root))
        return new

    def set_aside(self, step: int) -> str:
        return self._move(self._settled(step), f"step-{step}.aside-{token()}")

    def aside(self) -> list[str]:
        return sorted(filter(_ASIDE.fullmatch, self._names()))

    def remove_aside(self, name: str) -> None:
        match = _ASIDE.fullmatch(name)
        if match is None:
            raise FileNotFoundError(2, "nothing was set aside under this name", name)
        self._delete(name, step=match[1])

    def clean(self) -> list[str]:
        self._restore_replaced()
        removed = []
        for name in self._names():
            match = _DRAFT.fullmatch(name)
            if match and match[2] == "old" and not self.path(int(match[1])).exists():
                continue  # it is the step
            held = self._claimed(self.root / name, host=match[3]) if match else None
            if held is not None:
                with closing(held), suppress(OSError):  # another process may be cleaning too
                    if remove_directory(str(self.root / name), self._files):
                        removed.append(name)
        return removed

    def _restore_replaced(self) -> None:
        """Put back a step that was moved aside for its successor, which then never came."""
        for name in self._names():
            match = _DRAFT.fullmatch(name)
            if not match or match[2] != "old" or self.path(int(match[1])).exists():
                continue
            held = self._claimed(self.root / name, host=match[3])
            if held is not None:
                # Another process was faster, or nothing can be changed here: it counts as it is.
                with closing(held), suppress(OSError):
                    self._files.rename(str(self.root / name), str(self.path(int(match[1]))))
                    self._files.sync_dir(str(self.root))

    def _claimed(self, path: Path, host: str) -> int | None:
        """The lock of a draft, if no live writer may own it. Locks of other hosts may not be
        visible here."""
        try:
            held = lock(str(path))
        except OSError:  # it just became a step, or was removed; or there are no locks
            return None
        if held is None or token().rsplit("-", 2)[0] == host:
            return held
        with suppress(OSError):
            if time.time() - path.stat().st_mtime >= FOREIGN_AGE:
                return held
        os.close(held)
        return None

    def free_bytes(self) -> int | None:
        place = self.root
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free


class LocalDraft:
    """See `seam.Draft`. The process that calls `begin` holds the draft's lock until it ends."""

    def __init__(
        self, store: LocalStore, step: int, token: str, overwrite: bool, files: Files
    ) -> None:
        self._store = store
        self._step = step
        self._token = token
        self._overwrite = overwrite
        self._files = files
        self._lock: int | None = None
        self._act = FinalAct()
        self.mark = ""
        self._handles: Handles[_Written] = Handles()
        self.path = f"{store.path(step)}.tmp-{token}"

    def begin(self) -> None:
        place = self._store._at(self._step)
        if place.exists() and not self._overwrite:
            if not _is_committed(place):
                reason = f"it is there and is no step, for it has no {MANIFEST}: move it away"
                raise OSError(errno.ENOTEMPTY, reason, str(place))
            raise FileExistsError(17, "the step is committed", str(place))
        self._store.make()
        for _ in range(_TRIES):
            with suppress(FileExistsError):
                self._files.make_dir(self.path)
            if self._locked():
                self.mark = _mark(Path(self.path))
                return
            time.sleep(0.001)
        raise OSError(16, "another process has locked the draft", self.path)

    def _locked(self) -> bool:
        """Hold the draft. Not, where a process that starts found it unheld and removes it."""
        try:
            held = lock(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # a file system without locks
        if held is None:
            return False
        with suppress(FileNotFoundError):
            if Path(self.path).stat().st_ino == os.fstat(held).st_ino:
                self._lock = held
                return True
        os.close(held)
        return False

    def open(self, name: str, nbytes: int) -> LocalSink:
        return LocalSink(f"{self.path}/{name}", self._files, nbytes, self._handles)

    def sizes(self) -> dict[str, int]:
        return data_sizes(self.path)

    def commit(self, manifest: bytes) -> None:
        path = f"{self.path}/{MANIFEST}"
        with named(path):
            fd = self._files.create(path)
            try:
                self._files.write(fd, [manifest], 0)
                self._files.sync(fd)
            finally:
                os.close(fd)
            self._files.sync_dir(self.path)
        with self._act.begun():
            replaced = self._put_in_place()
            try:
                self._files.sync_dir(str(self._store.root))
            except OSError as fault:
                # The lock stays: what was replaced must not be removed, for it may come back.
                why = f"it is in place, but may not outlast a power cut ({fault.strerror or fault})"
                raise unknown(self._step, why, str(self._store.path(self._step))) from fault
        if replaced is not None:
            with suppress(OSError):  # what is left of the old one is cleaned up by the next start
                remove_directory(replaced, self._files)
        self._release()

    def _put_in_place(self) -> str | None:
        """Give the draft the step's name; returns where the directory is that had it."""
        target = str(self._store.path(self._step))
        if not Path(target).exists():
            self._files.rename(self.path, target)
            return None
        if not self._overwrite:
            raise FileExistsError(17, "the step was committed meanwhile", target)
        if self._files.exchange(self.path, target):
            return self.path
        replaced = f"{target}.old-{self._token}"
        with _held(target):  # so that nobody puts it back meanwhile
            self._files.rename(target, replaced)
            try:
                self._files.rename(self.path, target)
            except OSError:
                with suppress(OSError):  # it counts as the step where it is, too
                    self._files.rename(replaced, target)
                raise
        return replaced

    def revoke(self) -> bool:
        return self._act.revoke()

    def discard(self) -> None:
        if not self.revoke():
            return
        with suppress(OSError):
            remove_directory(self.path, self._files)
        self._release()

    def _release(self) -> None:
        held, self._lock = self._lock, None  # forgotten first: no number is closed twice
        if held is not None:
            os.close(held)


def _check_way(root: Path) -> None:
    """Raise `NotADirectoryError` if there can be no steps at a root: it, or what it should be in,
    is a file, or a link to what is not there, such as a disk that is not mounted. Taken for a place
    without steps, it would have a job start anew."""
    for place in (root, *root.parents):
        if place.is_dir():
            return
        if place.is_symlink():
            reason = f"it is a link to {place.readlink()}, where no directory is: is it mounted?"
            raise NotADirectoryError(errno.ENOTDIR, reason, str(place))
        if place.exists():
            reason = "it is a file, and steps are kept in a directory: name another place"
            raise NotADirectoryError(errno.ENOTDIR, reason, str(place))


def _is_committed(directory: Path) -> bool:
    """Whether a directory has a commit record, or nobody can tell: opening the step says why."""
    try:
        return (directory / MANIFEST).exists()
    except PermissionError:
        return True


def _mark(directory: Path) -> str:
    """A directory keeps its number when it is renamed; a new one has another."""
    return str(directory.stat().st_ino)


@contextmanager
def _held(path: str) -> Iterator[None]:
    """Within: the directory is locked, where the file system has locks."""
    held = None
    with suppress(OSError):
        held = lock(path)
    with nullcontext() if held is None else closing(held):
        yield


class _Written:
    """The descriptor of a data file. What was written is on the medium when it is closed."""

    def __init__(self, fd: int, path: str, files: Files) -> None:
        self.fd = fd
        self._path = path
        self._files = files

    def close(self) -> None:
        try:
            with named(self._path):
                self._files.sync(self.fd)
        finally:
            self.abort()

    def abort(self) -> None:
        fd, self.fd = self.fd, -1  # forgotten first: no number is closed twice
        if fd >= 0:
            os.close(fd)


class LocalSink:
    """A data file being written, by any number of threads. It is closed meanwhile where a draft has
    many, and opened again by its name."""

    ordered = False

    def __init__(
        self, path: str, files: Files, nbytes: int, handles: Handles[_Written] | None = None
    ) -> None:
        self._path = path
        self._files = files
        self._nbytes = nbytes
        self._handles: Handles[_Written] = Handles() if handles is None else handles
        self._ended = False
        with named(path), self._handles.lent(path, lambda: self._opened(files.create)):
            pass

    def _opened(self, open_: Callable[[str], int]) -> _Written:
        return _Written(open_(self._path), self._path, self._files)

    def _lent(self) -> AbstractContextManager[_Written]:
        assert not self._ended
        return self._handles.lent(self._path, lambda: self._opened(self._files.reopen))

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        with named(self._path), self._lent() as file:
            self._files.write(file.fd, buffers, position)
            end = position + sum(map(len, buffers))
            if end // WRITE_OUT_BYTES > position // WRITE_OUT_BYTES:
                begin = position // WRITE_OUT_BYTES * WRITE_OUT_BYTES
                self._files.write_out(file.fd, begin, WRITE_OUT_BYTES)

    def finish(self) -> None:
        with named(self._path), self._lent() as file:
            self._files.sync(file.fd)
            size = os.fstat(file.fd).st_size
            if size != self._nbytes:
                raise OSError(5, f"{size} bytes on the medium, {self._nbytes} were written")
        self.abort()

    def abort(self) -> None:
        self._ended = True
        if (file := self._handles.drop(self._path)) is not None:
            file.abort()
