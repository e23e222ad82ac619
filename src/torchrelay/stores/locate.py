"""From the name of a place to its store."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path

from torchrelay.arguments import check_place
from torchrelay.errors import UsageError
from torchrelay.stores.local.store import LocalStore
from torchrelay.stores.store import Store

OBJECTS = ("s3", "gs", "az")
SCHEMES = ("file", *OBJECTS)

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_STEP = re.compile(r"(?:(.*[^/])/+)?step-(0|[1-9][0-9]{0,18})/*", re.DOTALL)
_FOLDED = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)", re.IGNORECASE)


def scheme_of(place: str | os.PathLike[str]) -> tuple[str, str]:
    """The scheme of a place, in lower case, and what follows it; "file" for a plain path.

    `UsageError` for a scheme that is not known: it is never taken for a directory.
    """
    if not isinstance(place, (str, os.PathLike)):
        raise UsageError(f"a place is a directory or a bucket's URL, not {place!r}")
    name = os.fsdecode(place)
    if not name:
        raise UsageError("a place has a name: a directory, or a bucket's URL")
    check_place(name)
    if _FOLDED.match(name):
        raise UsageError(f"{name!r} is a URL that lost a slash: pass it as a str, not as a Path")
    match = _URL.fullmatch(name)
    if match is None:
        return "file", name
    scheme = match[1].lower()
    if scheme not in SCHEMES:
        known = ", ".join(f"{known}://" for known in SCHEMES)
        raise UsageError(
            f"{name!r}: no scheme is called {match[1]!r}; a directory, {known} are known"
        )
    return scheme, match[2]


def split_step(place: str | os.PathLike[str]) -> tuple[str, int | None]:
    """A directory or bucket, and the step that its name ends in (`runs/a/step-100`), if any."""
    name = os.fsdecode(place)
    match = _STEP.fullmatch(name)
    return (name, None) if match is None else (match[1] or ".", int(match[2]))


def directory_at(place: str | os.PathLike[str]) -> Path:
    """The directory that a path or a `file://` URL names, with `~` expanded."""
    scheme, path = scheme_of(place)
    if scheme != "file":
        raise UsageError(f"{os.fsdecode(place)!r} is a bucket's, where a directory is needed")
    try:
        return Path(path).expanduser()
    except RuntimeError as fault:
        raise UsageError(f"{path!r}: {fault}") from None


def open_store(place: str | os.PathLike[str], *, timeout: float | timedelta = 300.0) -> Store:
    """The store at a path, a `file://` URL or a bucket's URL. Nothing is read or written yet."""
    scheme, rest = scheme_of(place)
    if scheme in OBJECTS:
        from torchrelay.stores.objects.store import ObjectStore  # needs the extra `cloud`

        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        return ObjectStore(f"{scheme}://{rest}", timeout=seconds)
    return LocalStore(directory_at(place))
