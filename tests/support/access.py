"""Tokens and certificates as the calls of the library take them."""

from __future__ import annotations

from typing import Any

import torchrelay as tr


def access(**fields: Any) -> dict[str, Any]:
    """The argument of a call for a token, its file, or certificates."""
    return {"access": tr.Access(**fields)}
