"""How many threads a process had when it imported this."""

from __future__ import annotations

import os

COUNT = len(os.listdir("/proc/self/task"))
