"""How commands are let in at endpoints: options before the command, or TORCHRELAY_TOKEN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from torchrelay.sources.endpoint import EndpointSource

TOKEN_FILE = typer.Option(
    None, "--token-file", help="A file with the token of endpoints; or set TORCHRELAY_TOKEN."
)
CAFILE = typer.Option(None, "--cafile", help="Certificates that an endpoint's is signed by.")

_given: dict[str, str | None] = {"token_file": None, "cafile": None}


def give(*, token_file: str | None, cafile: str | None) -> None:
    """Keep what was given before the command, for the command."""
    _given.update(token_file=token_file, cafile=cafile)


def token_file() -> str | None:
    return _given["token_file"]


def cafile() -> str | None:
    return _given["cafile"]


def endpoints(urls: str | list[str]) -> EndpointSource:
    """Endpoints that commands read from."""
    from torchrelay.endpoint.security import find_token, trusted
    from torchrelay.sources.endpoint import EndpointSource

    token = find_token(None, _given["token_file"])
    return EndpointSource(urls, token=token, context=trusted(_given["cafile"]), verify=True)
