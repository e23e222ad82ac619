"""From the name of a place to its store."""

from __future__ import annotations

import os

from torchrelay.stores.local import LocalStore
from torchrelay.stores.seam import Store

OBJECTS = ("s3://", "gs://", "az://")


def open_store(place: str | os.PathLike[str], *, timeout: float = 300.0) -> Store:
    """The store at a path, a `file://` URL or a bucket's URL. Nothing is read or written yet."""
    name = os.fspath(place)
    if name.startswith(OBJECTS):
        from torchrelay.stores.objects import ObjectStore  # needs the extra `cloud`

        return ObjectStore(name, timeout=timeout)
    return LocalStore(name.removeprefix("file://"))
