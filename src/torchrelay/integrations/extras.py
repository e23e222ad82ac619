"""The error of an integration whose framework is not installed."""

from __future__ import annotations


def not_installed(fault: ImportError, extra: str) -> ImportError:
    """Names the package that is missing, and the extra that installs it."""
    missing = fault.name or extra
    return ImportError(
        f"{missing} is not installed: pip install 'torchrelay[{extra}]'", name=fault.name
    )
