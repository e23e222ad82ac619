"""One rank of `torchrelay.check` with problems planted around it: `python check_rank.py ARGUMENTS`.

`PLANTS` in the environment is JSON: `namespace` (a path to enter), `host` (its name, and which
machine it is), `shm` (bytes of /dev/shm), and the flags `no_ptrace`, `no_links`, `late_lists`
(seconds) and `port` (where it listens). The kernel makes the first ones real; hard links and late
listings belong to file systems that are not here: functions imitate them.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

_CLONE_NEWNS, _PRIVATE = 0x20000, (1 << 18) | 0x4000  # MS_PRIVATE, recursive


def small_shm(nbytes: int) -> None:
    """A /dev/shm of this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    calls = (
        lambda: libc.unshare(_CLONE_NEWNS),
        lambda: libc.mount(None, b"/", None, _PRIVATE, None),
        lambda: libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=%d" % nbytes),
    )
    for call in calls:
        if call():
            raise OSError(ctypes.get_errno(), "mount")


def no_hard_links() -> None:
    def link(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    os.link = link


def late_listings(seconds: float) -> None:
    """Listings are remembered for a time, as NFS does with its attribute cache."""
    from torchrelay.check import folder

    current, remembered = folder._names, {}

    def names(place: Path) -> list[str]:
        at, found = remembered.get(place, (0.0, []))
        if time.monotonic() - at > seconds:
            found = current(place)
            remembered[place] = (time.monotonic(), found)
        return found

    folder._names = names


def listen_at(port: int) -> None:
    from torchrelay.check import links

    any_port = links.listen_here

    def listen() -> socket.socket:
        with any_port() as found:
            return socket.create_server((found.getsockname()[0], port))

    links.listen_here = listen


def main() -> int:
    plants = json.loads(os.environ["PLANTS"])
    if "shm" in plants:
        small_shm(plants["shm"])
    if "namespace" in plants:
        from tests.support.netns import enter_host

        enter_host(plants["namespace"])
    if plants.get("no_ptrace"):
        from tests.transports.routes.test_choice import forbid_reading

        forbid_reading()  # threads that start later inherit it
    if "host" in plants:
        from torchrelay import machine

        name = plants["host"]
        machine.machine = lambda: name
        socket.gethostname = lambda: name
    if plants.get("no_links"):
        no_hard_links()
    if "late_lists" in plants:
        late_listings(plants["late_lists"])
    if "port" in plants:
        listen_at(plants["port"])
    from torchrelay.check.__main__ import main as check

    return check()


if __name__ == "__main__":
    sys.exit(main())
