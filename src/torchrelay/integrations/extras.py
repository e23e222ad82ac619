"""Imports of a framework that may not be installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str) -> Iterator[None]:
    """For imports of what the extra installs: where it is missing, the error says so."""
    try:
        yield
    except ImportError as fault:
        raise ImportError(
            f"{fault.name or name} is not installed: pip install 'torchrelay[{name}]'",
            name=fault.name,
        ) from fault
