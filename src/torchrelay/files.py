"""Looks at paths. `OSError` where the system does not say whether something is there.

From Python 3.14 on, `Path.exists` and its relatives say False for a path that may not be read or
whose disk fails. A step that cannot be looked at would be a step that is not there.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

Place = str | os.PathLike[str]
_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}


def exists(path: Place) -> bool:
    return _mode(path) != 0


def is_dir(path: Place) -> bool:
    return stat.S_ISDIR(_mode(path))


def is_file(path: Place) -> bool:
    return stat.S_ISREG(_mode(path))


def is_symlink(path: Place) -> bool:
    return stat.S_ISLNK(_mode(path, follow=False))


def _mode(path: Place, *, follow: bool = True) -> int:
    """The type of what is there; 0 where nothing is."""
    try:
        return Path(path).stat(follow_symlinks=follow).st_mode
    except ValueError:  # a NUL in it
        return 0
    except OSError as fault:
        if fault.errno in _NOT_THERE:
            return 0
        raise
