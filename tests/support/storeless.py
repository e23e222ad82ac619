"""Process groups as other libraries make them."""

from __future__ import annotations

from typing import Any


class Storeless:
    """A group that passes messages, and has no store."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.messages: list[tuple[str, int, int]] = []

    def rank(self) -> int:
        return int(self._group.rank())

    def size(self) -> int:
        return int(self._group.size())

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        self.messages.append(("send", dst, tensors[0].nbytes))
        return self._group.send(tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        self.messages.append(("recv", src, tensors[0].nbytes))
        return self._group.recv(tensors, src, tag)
