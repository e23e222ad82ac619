"""The head of an HTTP message, parsed: URLs, first lines and headers of either direction. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import xxhash

from torchrelay.errors import UsageError

MAX_HEADERS = 64
DIGEST = "Torchrelay-Digest"  # of a request's body or a small answer's: XXH3-128, hexadecimal
END = b"\r\n\r\n"

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_STATUS = re.compile(r"HTTP/1\.[01] ([1-5][0-9]{2})(?: .*)?")
_LENGTH = re.compile(r"[0-9]{1,18}")


class Head(NamedTuple):
    """The first line of a message, and its headers by lower-case name."""

    first: str
    headers: dict[str, str]

    @property
    def status(self) -> int:
        """The status of an answer; `ValueError` where the first line is not that of one."""
        found = _STATUS.fullmatch(self.first)
        if found is None:
            raise ValueError(f"its first line is {self.first[:60]!r}")
        return int(found[1])

    @property
    def length(self) -> int | None:
        """The bytes of the body, where that is said; `ValueError` for another encoding."""
        if "transfer-encoding" in self.headers:
            raise ValueError("it uses a transfer encoding: send a Content-Length instead")
        text = self.headers.get("content-length")
        if text is None:
            return None
        if not _LENGTH.fullmatch(text):
            raise ValueError(f"its Content-Length is {text[:40]!r}")
        return int(text)


def digest_header(body: bytes) -> str:
    """The value of `DIGEST` for a body."""
    return xxhash.xxh3_128_hexdigest(body)


def is_changed(headers: Mapping[str, str], body: bytes) -> bool:
    """Whether a body is not the one that its digest was made of. Others send none."""
    digest = headers.get(DIGEST.lower())
    return digest is not None and digest != digest_header(body)


def parse_head(data: bytes) -> Head:
    """A head without the empty line that ends it; `ValueError` says what is wrong with it."""
    first, *lines = data.decode("latin-1").split("\r\n")
    if len(lines) > MAX_HEADERS:
        raise ValueError(f"it has more than {MAX_HEADERS} headers")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        value = value.strip(" \t")
        if not colon or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ValueError("a header line is malformed")
        if name.lower() in headers:
            raise ValueError(f"the header {name[:40]} is given twice")
        headers[name.lower()] = value
    return Head(first, headers)


class ServerUrl(NamedTuple):
    """`http://HOST:PORT` or `https://HOST:PORT`, and nothing else."""

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> ServerUrl:
        """`UsageError` for any other text, whoever it comes from."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except (ValueError, TypeError, AttributeError):
            raise UsageError(f"an endpoint's URL is http://HOST:PORT, not {text!r}") from None
        host = parts.hostname or ""
        scheme = parts.scheme if parts.scheme in ("http", "https") else ""
        # A text that may hold a token is not repeated.
        if "@" in text or parts.query or (scheme and parts.path not in ("", "/")):
            raise UsageError(
                "an endpoint's URL has a host and a port and nothing else; give the token by "
                "Access(token=), token_file= or TORCHRELAY_TOKEN"
            )
        if not scheme or port == 0 or parts.fragment or not _is_host(host):
            raise UsageError(f"an endpoint's URL is http://HOST:PORT, not {text!r}")
        return cls(scheme, host, port or (443 if scheme == "https" else 80))

    @property
    def place(self) -> str:
        """HOST:PORT, as a `Host` header has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.place}"


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
        return True
    except ValueError:
        labels = host.removesuffix(".").split(".")
        return len(host) <= 253 and all(_LABEL.fullmatch(label) for label in labels)


def is_loopback(host: str) -> bool:
    """Whether a host, by its name or address, is plainly this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
