"""Process groups as other libraries make them."""

from __future__ import annotations

from typing import Any


class Storeless:
    """A group that tells its rank and size, and has no store."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def rank(self) -> int:
        return int(self._group.rank())

    def size(self) -> int:
        return int(self._group.size())
