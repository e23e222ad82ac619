"""HTTP requests as the server understands them, parsed within limits. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import parse_qs, unquote

from torchrelay.sources.http_head import parse_head

HEAD_BYTES = 16 << 10  # of a request line and all headers
BODY_BYTES = 4 << 10
MAX_FIELDS = 64  # of a query

_FIRST = re.compile(r"([A-Z]{1,16}) (/[\x21-\x7e]{0,8000}) HTTP/1\.([01])")
_RANGE = re.compile(r"[ \t]*([0-9]{0,18})-([0-9]{0,18})[ \t]*")
_NUMBER = re.compile(r"[0-9]{1,19}")


class Refusal(Exception):
    """A request that is answered with a status, a line of text, and headers that say more."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status, self.headers = status, headers or {}


class Request(NamedTuple):
    """A request; its path is decoded, its headers have lower-case names."""

    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    length: int = 0
    keeps: bool = True  # whether the client may send another one
    body: bytes = b""

    @classmethod
    def parse(cls, data: bytes) -> Request:
        """A head without the empty line that ends it; `Refusal` where it is malformed."""
        try:
            head = parse_head(data)
            length = head.length or 0
            found = _FIRST.fullmatch(head.first)
            if found is None:
                raise ValueError("the request line is malformed")
            target, _, query = found[2].partition("?")
            fields = parse_qs(query, keep_blank_values=True, max_num_fields=MAX_FIELDS)
        except ValueError as fault:
            raise Refusal(400, f"not a request of HTTP/1.1: {fault}") from None
        keeps = found[3] == "1" and "close" not in head.headers.get("connection", "").lower()
        return cls(found[1], unquote(target), fields, head.headers, length, keeps)

    def field(self, name: str, default: str = "") -> str:
        return self.query.get(name, [default])[0]

    def number(self, name: str) -> int | None:
        """A field that is a number; `Refusal` where it is something else."""
        if name not in self.query:
            return None
        if not _NUMBER.fullmatch(self.field(name)):
            raise Refusal(400, f"{name} must be a number")
        return int(self.field(name))


class ByteRange(NamedTuple):
    """Bytes [start, stop) of `nbytes`. `partial`: a range was asked for."""

    start: int
    stop: int
    nbytes: int
    partial: bool

    def headers(self, etag: str) -> dict[str, str]:
        """The headers of an answer with these bytes."""
        found = {"Accept-Ranges": "bytes", "ETag": f'"{etag}"'}
        if self.partial:
            found["Content-Range"] = f"bytes {self.start}-{self.stop - 1}/{self.nbytes}"
        return found


def byte_range(request: Request, nbytes: int, etag: str) -> ByteRange:
    """The bytes that a request wants of an answer with an ETag; `Refusal` for a bad range.

    As RFC 9110 says, ranges of another unit are ignored, and those of other methods than GET.
    """
    unit, _, wanted = request.headers.get("range", "").partition("=")
    same = request.headers.get("if-range", f'"{etag}"') == f'"{etag}"'
    if request.method != "GET" or unit.strip().lower() != "bytes" or not same:
        return ByteRange(0, nbytes, nbytes, False)
    length = {"Content-Range": f"bytes */{nbytes}"}
    found = _RANGE.fullmatch(wanted)
    if found is None or not (found[1] or found[2]):
        raise Refusal(416, "give one range of bytes, as in Range: bytes=0-99", length)
    if found[1]:
        start, stop = int(found[1]), int(found[2] or nbytes - 1) + 1
    else:
        start, stop = max(0, nbytes - int(found[2])), nbytes
    stop = min(stop, nbytes)
    if start >= stop:
        raise Refusal(416, f"the range is outside of {nbytes} bytes", length)
    return ByteRange(start, stop, nbytes, True)
