"""Names of drafts, which say whose draft one is."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path

import xxhash

from torchrelay.machine import machine


def new_token() -> str:
    """A name that no other draft has: the host and process that write it, and a random number."""
    return f"{host_name()}-{os.getpid()}-{os.urandom(4).hex()}"


@cache
def host_name() -> str:
    """This host, until it is started again. Several hosts may be called "localhost": the name says
    whom a user may ask, and the digest of the kernel's own identity tells hosts apart."""
    identity = machine()
    with suppress(OSError):
        identity = identity or Path("/etc/machine-id").read_text(encoding="ascii").strip()
    name = re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())[:60] or "host"
    return f"{name}.{xxhash.xxh64_hexdigest(identity.encode())}"
