"""Where to listen so that other ranks reach it: where gloo does. And where not to connect to.

That is an interface named in GLOO_SOCKET_IFNAME, or else the address that this machine's own name
stands for, or else the machine itself alone. Where gloo reaches from one rank to another, so do
connections made like that.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915  # Linux: an interface's IPv4 address
_NAME_BYTES = 15
_BACKLOG = 64  # strangers that knock must not keep others out


def listen_here() -> socket.socket:
    """A listening socket on a free port of the first address that can be had; `OSError` if none."""
    fault = OSError("no address to listen at")
    for family, host in _candidates():
        try:
            return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        except OSError as cause:
            fault = cause
    raise fault


def check_peer(host: str) -> None:
    """`OSError` unless the address is one that this process has a TCP connection with.

    A rank of the group is: gloo has connected to it. So a peer cannot have this process connect to
    a machine of its choice. A name would be looked up for the peer, so it is refused too.
    """
    try:
        wanted = _plain(host)
    except ValueError:
        raise OSError("the sender does not say an address, but a name") from None
    if wanted not in _connected():
        raise OSError("this process has no connection to that address: it is not the sender's")


def own(host: str) -> bool:
    """Whether an address is one of this host itself, as the kernel sees it from here."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return True
    return False


def _connected() -> Iterator[str]:
    """The other ends of this process's TCP connections."""
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if path.readlink().name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6):
                        yield _plain(one.getpeername()[0])


def _plain(host: str) -> str:
    """An address, one text for all ways to write it, and one for all of this machine alone."""
    address = ipaddress.ip_address(host.partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    return "loopback" if address.is_loopback else str(address)


def _candidates() -> Iterator[tuple[socket.AddressFamily, str]]:
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    for name in filter(None, names.split(",")):
        yield from _of_interface(name)
    if names:
        return  # where the caller has said which, no other is opened
    with suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        for family, _, _, _, address in found:
            yield family, str(address[0])
    yield socket.AF_INET, "127.0.0.1"


def _of_interface(name: str) -> Iterator[tuple[socket.AddressFamily, str]]:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:_NAME_BYTES])
        found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        yield socket.AF_INET, socket.inet_ntoa(found[20:24])
    with suppress(OSError), open("/proc/net/if_inet6") as lines:
        for line in lines:
            digits, _, _, _, _, interface = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if interface == name and not address.is_link_local:
                yield socket.AF_INET6, str(address)
