"""Where a process listens so that the other ranks reach it: where gloo would.

That is the interface named in `GLOO_SOCKET_IFNAME`, or the address of this machine's host name, or
loopback. Where gloo connects two ranks, so do connections that are made like this.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torchrelay import system

SETTING = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: an interface's IPv4 address
_NAME_BYTES = 15
_BACKLOG = 256
_fcntl: Any = system.fcntl


def listen_here() -> socket.socket:
    """A socket that listens on a free port of the first usable address; `OSError` if there is
    none."""
    fault = OSError(f"no address to listen at: does {SETTING} name an interface of this machine?")
    for family, host in _candidates():
        try:
            return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        except OSError as cause:
            fault = cause
    raise fault


def _candidates() -> Iterator[tuple[socket.AddressFamily, str]]:
    names = os.environ.get(SETTING, "")
    for name in filter(None, names.split(",")):
        yield from _of_interface(name)
    if names:
        return  # the caller has chosen: no other interface is opened
    with suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        for family, _, _, _, address in found:
            yield family, str(address[0])
    yield socket.AF_INET, "127.0.0.1"


def _of_interface(name: str) -> Iterator[tuple[socket.AddressFamily, str]]:
    if len(name.encode()) > _NAME_BYTES:
        return  # none has such a name, and its first bytes may be the name of another
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode())
        found = _fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        yield socket.AF_INET, socket.inet_ntoa(found[20:24])
    with suppress(OSError), open("/proc/net/if_inet6") as lines:
        for line in lines:
            digits, _, _, _, _, interface = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if interface == name and not address.is_link_local:
                yield socket.AF_INET6, str(address)
