"""`Access`: the token that readers send, and the certificates of both ends."""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path

from torchrelay.errors import UsageError
from torchrelay.files import is_file

TOKEN_VARIABLE = "TORCHRELAY_TOKEN"
MAX_TOKEN = 1024

AnyPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Access:
    """How servers and readers prove who they are, for every call that listens or reads.

    - `token`, or `token_file`, or the environment's TORCHRELAY_TOKEN: a secret that readers send
      and servers compare. Only its owner may be able to read the file.
    - `cafile`: certificates of authorities to trust, in addition to the system's.
    - `certfile`, `keyfile`: the certificate to serve TLS with, and its key.

    Raises `UsageError` for a file that does not hold what it should.
    """

    token: str | None = field(default=None, repr=False)
    token_file: AnyPath | None = None
    cafile: AnyPath | None = None
    certfile: AnyPath | None = None
    keyfile: AnyPath | None = None

    def __post_init__(self) -> None:
        if self.token is not None and self.token_file is not None:
            raise UsageError("give token= or token_file=, not both")
        if self.keyfile is not None and self.certfile is None:
            raise UsageError("keyfile= needs certfile=: give the certificate that the key is for")
        for path in (self.certfile, self.keyfile, self.cafile):
            if path is not None and not is_file(path):
                raise UsageError(f"no file {os.fspath(path)}: give the path of a PEM file")
        self.secret()
        self.server_context()
        self.client_context()

    @property
    def tls(self) -> bool:
        """Whether a server with this access speaks TLS."""
        return self.certfile is not None

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    def paths(self) -> tuple[str | None, str | None, str | None]:
        """`certfile`, `keyfile` and `cafile`, for a process that may run in another directory."""
        return _resolved(self.certfile), _resolved(self.keyfile), _resolved(self.cafile)

    def secret(self) -> str | None:
        """The token by argument, by file or by `TORCHRELAY_TOKEN`, in this order."""
        where, token = "token=", self.token
        if self.token_file is not None:
            where, token = f"the file {os.fspath(self.token_file)}", _read(Path(self.token_file))
        elif token is None:
            where, token = TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE)
        if token is None:
            return None
        if not isinstance(token, str):
            raise UsageError(f"{where} must be a string, not a {type(token).__name__}")
        if not 0 < len(token) <= MAX_TOKEN or not token.isascii() or not token.isprintable():
            raise UsageError(f"{where} must hold 1 to {MAX_TOKEN} printable ASCII characters")
        if " " in token:
            raise UsageError(f"{where} holds a token with a space: remove the space")
        return token

    def server_context(self) -> ssl.SSLContext | None:
        """The certificate to serve TLS with; None where none was given."""
        if self.certfile is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certfile, self.keyfile)
        except (OSError, ssl.SSLError) as fault:
            raise UsageError(
                f"{os.fspath(self.certfile)} holds no certificate with its key ({fault}): give "
                "certfile= and keyfile= that belong together"
            ) from None
        return context

    def client_context(self) -> ssl.SSLContext | None:
        """The authorities that must have signed a server's certificate; None: the system's."""
        if self.cafile is None:
            return None
        context = ssl.create_default_context()
        try:
            context.load_verify_locations(self.cafile)
        except (OSError, ssl.SSLError) as fault:
            raise UsageError(
                f"{os.fspath(self.cafile)} holds no certificates ({fault}): give cafile= a PEM file"
            ) from None
        return context


def _resolved(path: AnyPath | None) -> str | None:
    return None if path is None else str(Path(path).resolve())


def _read(path: Path) -> str:
    try:
        with path.open() as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise UsageError(f"other users can read {path}: chmod 600 {path}")
            return file.read(MAX_TOKEN + 2).strip()
    except (OSError, UnicodeDecodeError) as fault:
        raise UsageError(f"cannot read the token file {path}: {fault}") from None
