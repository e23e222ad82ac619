"""How commands get access to endpoints: --token-file and --cafile, before or after the command; and
how they serve by TLS."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import typer

from torchrelay.cli.output import one_line_errors

if TYPE_CHECKING:
    from torchrelay.sources.access import Access
    from torchrelay.sources.endpoint import EndpointSource

TOKEN_FILE = typer.Option(
    None, "--token-file", help="File with the token of endpoints (or set TORCHRELAY_TOKEN)."
)
CAFILE = typer.Option(None, "--cafile", help="Certificates of the authorities to trust.")
CERTFILE = typer.Option(None, "--certfile", help="Certificate to serve TLS with.")
KEYFILE = typer.Option(None, "--keyfile", help="Private key of the certificate.")

_chosen: dict[str, str] = {}


def keep(token_file: str | None, cafile: str | None, *, begins: bool = False) -> None:
    """Remember what was given with the command, or with the command line that `begins`."""
    if begins:
        _chosen.clear()
    named = {"token_file": token_file, "cafile": cafile}
    _chosen.update({name: value for name, value in named.items() if value is not None})


def command(act: Callable[..., Any], trouble: int) -> Callable[..., Any]:
    """A function as a command that takes the options, too. Its errors are one line and the exit
    status `trouble`."""

    @wraps(act)
    def run(*args: Any, token_file: str | None, cafile: str | None, **options: Any) -> Any:
        with one_line_errors(trouble):
            keep(token_file, cafile)
            return act(*args, **options)

    found = inspect.signature(act)
    named = inspect.Parameter.KEYWORD_ONLY
    more = [
        inspect.Parameter(name, named, default=option, annotation="str | None")
        for name, option in (("token_file", TOKEN_FILE), ("cafile", CAFILE))
    ]
    run.__annotations__ = {**act.__annotations__, **{one.name: one.annotation for one in more}}
    parameters = [*found.parameters.values(), *more]
    run.__signature__ = found.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def chosen_access(**more: str | None) -> Access:
    """The access that was given, with a certificate to serve with."""
    from torchrelay.sources.access import Access

    return Access(**_chosen, **more)


def endpoints(urls: str | list[str]) -> EndpointSource:
    """Endpoints that commands read from. Their bytes are verified, however they come."""
    from torchrelay.sources.endpoint import EndpointSource

    return EndpointSource(urls, access=chosen_access(), verify=True)
