"""Where a server listens: addresses, and those that are refused before anything listens."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

from torchrelay.errors import UsageError
from torchrelay.sources.access import TOKEN_VARIABLE
from torchrelay.sources.http_head import is_loopback

MIN_TOKEN = 16  # characters, where others than this machine can try


class Address(NamedTuple):
    """HOST:PORT to listen at."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
        host = host.strip("[]")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise UsageError(f"address is HOST:PORT, as in 127.0.0.1:0, not {text!r}")
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def shown(self) -> str:
        """The host as others should name it."""
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return self.host
        if address.is_unspecified:
            return socket.gethostname()
        return f"[{self.host}]" if address.version == 6 else self.host

    def url(self, *, tls: bool) -> str:
        return f"{'https' if tls else 'http'}://{self.shown}:{self.port}"

    def check(self, token: str | None) -> None:
        """`UsageError` where strangers could read the state."""
        if self.is_loopback:
            return
        if token is None:
            raise UsageError(
                f"{self.host} can be reached from elsewhere: give a token (Access(token=), "
                f"Access(token_file=) or {TOKEN_VARIABLE}), or listen at 127.0.0.1"
            )
        if len(token) < MIN_TOKEN:
            raise UsageError(
                f"a token of {len(token)} characters can be guessed from elsewhere: take at least "
                f"{MIN_TOKEN}, such as secrets.token_urlsafe(32)"
            )
