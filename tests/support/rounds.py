"""How often a test tries what it tries: a share every day, and all of it in `make test-slow`.

The tests of a file that imports `rounds` are marked so. The environment says which, since ranks in
other processes ask too.
"""

from __future__ import annotations

import os

SHARE = 6


def rounds(full: int, share: int = SHARE) -> int:
    return full if os.environ.get("TEST_ROUNDS") == "all" else max(1, full // share)
