"""Which program wrote a file, by its first bytes. No torch."""

from __future__ import annotations

from pathlib import Path

# The archives of torch.save, and the pickles it wrote before 1.6.
_TORCH_SAVE = (b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19")


def is_torch_save(path: Path) -> bool:
    """Whether a file begins as those of `torch.save` do; `OSError` where it cannot be read."""
    with path.open("rb") as file:
        return file.read(16).startswith(_TORCH_SAVE)
