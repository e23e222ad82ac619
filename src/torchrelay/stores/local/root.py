"""The directory that holds steps: names of what is in it, and where each step lies."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from torchrelay.arguments import check_place
from torchrelay.files import exists, is_symlink
from torchrelay.steps import MAX_STEP
from torchrelay.stores.listing import MANIFEST, Listing
from torchrelay.stores.local.files import Files

# A directory of a step, where it belongs or where it was moved to for its successor.
STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})(\.old-.+-\d+-[0-9a-f]+)?")
# A draft, or a directory that was moved away: the step, which of the two it is, and the writer.
LEFT = re.compile(r"step-(\d+)\.(tmp|old)-(.+)-(\d+)-[0-9a-f]+")


class StepRoot:
    """A directory, which need not exist yet. A link named like a replaced step is not ours."""

    def __init__(self, path: str | os.PathLike[str], files: Files) -> None:
        self.path = Path(path).absolute()
        check_place(str(self.path))  # the working directory is part of it
        self.files = files
        self._made = False

    def make(self) -> None:
        """Create it and its parents; the first time, make their names durable."""
        if self._made and exists(self.path):
            return
        above = [place for place in self.path.parents if not exists(place)]
        for place in (*reversed(above), self.path):
            if not exists(place):
                with suppress(FileExistsError):  # another process is as fast
                    self.files.make_dir(str(place))
                self.files.sync_name(str(place))
            else:  # another process may have made it a moment ago; its parent may be unreadable
                with suppress(PermissionError):
                    self.files.sync_dir(str(place.parent))
        self._made = True

    def names(self) -> dict[str, int]:
        """All names in it now, each with the number of its file."""
        try:
            with os.scandir(self.path) as entries:
                return {entry.name: entry.inode() for entry in entries}
        except (FileNotFoundError, NotADirectoryError):
            _check_root(self.path)
            return {}

    def below(self, depth: int) -> Iterator[str]:
        """Relative paths of what is in it, directories with a slash at their end; those of a level
        before those of the next. Drafts, steps that were moved away and hidden directories are left
        out, and so is what cannot be listed."""
        level = [""]
        for _ in range(depth):
            level, folders = [], level
            for folder in folders:
                with suppress(OSError), os.scandir(self.path / folder) as entries:
                    for entry in sorted(entries, key=lambda entry: entry.name):
                        name = f"{folder}{entry.name}"
                        if not entry.is_dir():
                            yield name
                        elif not entry.name.startswith(".") and not LEFT.fullmatch(entry.name):
                            level.append(f"{name}/")
                            yield f"{name}/"

    def folders(self) -> Listing:
        """The directories that may be steps: of each, where it belongs before where it was moved
        to."""
        found: Listing = {}
        for name, number in self.names().items():
            step, moved = _step_of(name)
            if step is None or (moved and is_symlink(self.path / name)):
                continue
            if step in found:
                found[step] = sorted([*found[step], (name, number)])
            else:
                found[step] = [(name, number)]
        return {step: found[step] for step in sorted(found)}

    def of(self, step: int) -> Path:
        """Where a step belongs."""
        return self.path / f"step-{step}"

    def existing(self, step: int) -> Path:
        """Where a step lies: where it belongs, or where it was moved to for a successor that has
        not come yet, or never came."""
        place = self.of(step)
        return place if exists(place) else self.listed(step, self.folders())

    def listed(self, step: int, listing: Listing) -> Path:
        """The same, by a listing."""
        return self.path / listing[step][0][0] if step in listing else self.of(step)


@lru_cache(1 << 14)  # a save lists all steps, and most names were there before
def _step_of(name: str) -> tuple[int | None, bool]:
    """The step whose directory has this name, and whether it was moved away."""
    match = STEP.fullmatch(name)
    if match is None or int(match[1]) > MAX_STEP:
        return None, False
    return int(match[1]), match[2] is not None


def is_committed(directory: Path) -> bool:
    """Whether a directory has a commit record, or no one can tell: opening the step says why."""
    try:
        return exists(directory / MANIFEST)
    except PermissionError:
        return True


def directory_id(directory: Path) -> str:
    """A directory keeps its number when it is renamed; a new one has another."""
    return str(directory.stat().st_ino)


def version_of(directory: Path) -> str:
    """Another one for each save of a step. The number of a directory alone would not do: a file
    system gives that of one that was removed to a later one."""
    record = (directory / MANIFEST).stat()
    return f"{record.st_ino}-{record.st_mtime_ns}"


def _check_root(root: Path) -> None:
    """Raise `NotADirectoryError` if a root cannot have steps: it, or one of its parents, is a file,
    or a link to a missing directory, such as a disk that is not mounted. A job that took it for an
    empty root would start from scratch."""
    for place in (root, *root.parents):
        try:
            mode = place.stat().st_mode  # one look: another process may be making it
        except OSError as fault:
            if fault.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            if not is_symlink(place):
                continue
            mode = 0
        if stat.S_ISDIR(mode):
            return
        reason = "it is a file, and steps are kept in a directory: name another one"
        if is_symlink(place):
            reason = f"it is a link to {place.readlink()}, which is not a directory: is it mounted?"
        raise NotADirectoryError(errno.ENOTDIR, reason, str(place))
