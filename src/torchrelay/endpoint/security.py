"""Addresses, tokens and certificates of an endpoint: what is refused before anything listens."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import stat
from pathlib import Path
from typing import NamedTuple

from torchrelay.errors import UsageError
from torchrelay.sources.connection import is_loopback

TOKEN_VARIABLE = "TORCHRELAY_TOKEN"
MIN_TOKEN = 16  # characters, where others than this machine can try
MAX_TOKEN = 1024


class Address(NamedTuple):
    """Where an endpoint listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        if not isinstance(text, str):
            raise UsageError(f"address is HOST:PORT, as in 127.0.0.1:0, not {text!r}")
        host, colon, port = text.rpartition(":")
        host = host.strip("[]")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise UsageError(f"address is HOST:PORT, as in 127.0.0.1:0, not {text!r}")
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def shown(self) -> str:
        """The host as others are to name it."""
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return self.host
        if address.is_unspecified:
            return socket.gethostname()
        return f"[{self.host}]" if address.version == 6 else self.host


def find_token(token: str | None, token_file: str | os.PathLike[str] | None) -> str | None:
    """The token by argument, by file or by `TORCHRELAY_TOKEN`, in this order."""
    if token is not None and token_file is not None:
        raise UsageError("give token= or token_file=, not both")
    where = "token="
    if token_file is not None:
        where = f"the file {os.fspath(token_file)}"
        token = _from_file(Path(token_file))
    elif token is None and TOKEN_VARIABLE in os.environ:
        where = TOKEN_VARIABLE
        token = os.environ[TOKEN_VARIABLE]
    if token is None:
        return None
    if not isinstance(token, str):
        raise UsageError(f"{where} is a text, not a {type(token).__name__}")
    if not 0 < len(token) <= MAX_TOKEN or not token.isascii() or not token.isprintable():
        raise UsageError(f"{where} has no token: 1 to {MAX_TOKEN} printable ASCII characters")
    if " " in token:
        raise UsageError(f"{where} has a token with a space in it")
    return token


def _from_file(path: Path) -> str:
    try:
        with path.open() as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise UsageError(f"{path} can be read by others: chmod 600 {path}")
            return file.read(MAX_TOKEN + 2).strip()
    except (OSError, UnicodeDecodeError) as fault:
        raise UsageError(f"the token file {path} cannot be read: {fault}") from None


def check_listening(address: Address, token: str | None) -> None:
    """`UsageError` where strangers could read the state."""
    if address.is_loopback:
        return
    if token is None:
        raise UsageError(
            f"{address.host} can be reached from elsewhere: give a token (token=, token_file= or "
            f"{TOKEN_VARIABLE}), or listen at 127.0.0.1"
        )
    if len(token) < MIN_TOKEN:
        raise UsageError(
            f"a token of {len(token)} characters can be guessed from elsewhere: take at least "
            f"{MIN_TOKEN}, such as secrets.token_urlsafe(32)"
        )


def server_context(certfile: str, keyfile: str | None) -> ssl.SSLContext:
    """What to serve TLS by; `UsageError` where the files hold no certificate with its key."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as fault:
        raise UsageError(f"no certificate with its key in {certfile}: {fault}") from None
    return context


def check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """`UsageError` where they are files with no certificate and its key in them."""
    if keyfile is not None and certfile is None:
        raise UsageError("keyfile= needs certfile=")
    for path in filter(None, (certfile, keyfile)):
        if not Path(path).is_file():
            raise UsageError(f"no file {path}")
    if certfile is not None:
        server_context(certfile, keyfile)


def trusted(cafile: str | None) -> ssl.SSLContext | None:
    """What an endpoint's certificate has to hold against; None: what the system trusts."""
    if cafile is None:
        return None
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(cafile)
    except (OSError, ssl.SSLError) as fault:
        raise UsageError(f"cafile {cafile} has no certificates: {fault}") from None
    return context
