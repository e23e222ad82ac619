"""Ranks on hosts of their own: network namespaces on one switch, every port shaped to a rate.

    with Switch(4) as switch, Hosts(switch) as hosts:
        hosts.run(fn, *args)     # a module-level fn(rank, *args) on every host, as a rank of gloo

The namespaces have no names. Descriptors and the ranks hold them, so the kernel takes them away,
with interfaces, bridge and queues, however this process ends: nothing is left for a later run to
clean, and runs side by side do not meet.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.forks import servers

GIGABIT = 1_000_000_000
START_SECONDS = 60.0
"""That the hosts may take to form their group."""
BUILD_SECONDS = 20.0

_CLONE_NEWNET = 0x40000000
_OWN_NAMESPACE = "/proc/thread-self/ns/net"
PORT = "eth0"  # a host's only interface beside lo
_BURST = 256 << 10  # bytes: over the 64 KiB that TCP hands down at a time, 2 ms at 1 Gbit/s
_QUEUE = 4 << 20  # bytes a port holds before it drops
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")  # of the thread's namespace
_PRIORITY = -15
_STORE_PORT = 29500  # of a namespace in which nothing else listens


class Unavailable(Exception):
    """Namespaces or shaped links cannot be made here; the text says what is missing."""


class HostFailed(Exception):
    """A rank raised, died or was late; the text tells which and where."""


# The network ------------------------------------------------------------------------------------


def _unshare() -> int:
    """Move this thread into a new namespace; a descriptor of it."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.unshare came with Python 3.12
    if libc.unshare(_CLONE_NEWNET):
        reason = os.strerror(ctypes.get_errno())
        raise Unavailable(f"no network namespace can be made: {reason} (needs root)")
    return os.open(_OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)


def _enter(namespace: int) -> None:
    """Move this thread, and the threads that it starts from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def enter_host(path: str) -> None:
    """Move a process that has no threads yet to a host, by `Switch.door`."""
    door = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    _enter(door)
    os.close(door)
    os.environ["GLOO_SOCKET_IFNAME"] = PORT


class Switch:
    """`hosts` namespaces behind a bridge, `rate` bits a second out of and into each."""

    def __init__(self, hosts: int, rate: int = GIGABIT) -> None:
        if not sys.platform.startswith("linux"):
            raise Unavailable("network namespaces are Linux's")
        self.size, self.rate = hosts, rate
        self.namespaces: list[int] = []  # descriptors, by rank
        self._bridge = -1
        fault: list[BaseException] = []

        def build() -> None:
            try:
                self._build()
            except BaseException as cause:
                fault.append(cause)

        # A thread has a namespace of its own, and takes it along when it ends.
        builder = threading.Thread(target=build, name="netns", daemon=True)
        builder.start()
        builder.join(BUILD_SECONDS)
        if builder.is_alive():
            fault.append(TimeoutError(f"the network was not up after {BUILD_SECONDS:.0f} s"))
        if fault:
            self.close()
            raise fault[0]

    @staticmethod
    def address(rank: int) -> str:
        return f"10.0.0.{rank + 1}"

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for namespace in [self._bridge, *self.namespaces]:
            if namespace >= 0:
                os.close(namespace)
        self._bridge, self.namespaces = -1, []

    def _build(self) -> None:
        try:
            from pyroute2 import IPRoute
            from pyroute2.netlink.exceptions import NetlinkError
        except ImportError:
            raise Unavailable("pyroute2 is not installed") from None
        for _ in range(self.size):
            self.namespaces.append(_unshare())
        self._bridge = _unshare()
        try:
            with IPRoute() as ip:
                ip.link("add", ifname="bridge", kind="bridge")
                bridge = ip.link_lookup(ifname="bridge")[0]
                ip.link("set", index=bridge, state="up")
                for rank, namespace in enumerate(self.namespaces):
                    peer = {"ifname": PORT, "net_ns_fd": namespace}
                    ip.link("add", ifname=f"port{rank}", kind="veth", peer=peer)
                    port = ip.link_lookup(ifname=f"port{rank}")[0]
                    ip.link("set", index=port, master=bridge, state="up")
                    self._shape(ip, port)
            for rank, namespace in enumerate(self.namespaces):
                _enter(namespace)
                # In every kernel. Others, like BBR, pause now and then to measure the way.
                _CONGESTION.write_text("reno")
                with IPRoute() as ip:
                    port = ip.link_lookup(ifname=PORT)[0]
                    ip.addr("add", index=port, address=self.address(rank), prefixlen=24)
                    ip.link("set", index=ip.link_lookup(ifname="lo")[0], state="up")
                    ip.link("set", index=port, state="up")
                    self._shape(ip, port)
        except NetlinkError as fault:
            # What a kernel says that was built without bridge, veth or tbf, or a sandbox.
            if fault.code in (errno.EOPNOTSUPP, errno.ENOENT, errno.EPERM, errno.ENODEV):
                raise Unavailable(f"no bridge with shaped ports can be made: {fault}") from fault
            raise

    def connect(self, rank: int, up: bool) -> None:
        """Plug a host's cable in, or pull it out."""

        def act() -> None:
            from pyroute2 import IPRoute

            _enter(self._bridge)
            with IPRoute() as ip:
                port = ip.link_lookup(ifname=f"port{rank}")[0]
                ip.link("set", index=port, state="up" if up else "down")

        self._act(act)

    @staticmethod
    def _act(act: Callable[[], None]) -> None:
        """Do it in a thread, which may enter another namespace."""
        plug = threading.Thread(target=act, name="netns", daemon=True)
        plug.start()
        plug.join(BUILD_SECONDS)

    def refuse(self, host: int, port: int) -> None:
        """From a host no connection reaches this port of any other: a firewall."""

        def act() -> None:
            from pyroute2 import IPRoute

            _enter(self.namespaces[host])
            with IPRoute() as ip:
                options = {"FRA_IP_PROTO": socket.IPPROTO_TCP}
                options["FRA_DPORT_RANGE"] = f"{port}:{port}"
                ip.rule("add", action="FR_ACT_UNREACHABLE", **options)

        self._act(act)

    def door(self, rank: int) -> str:
        """A host's namespace by a path, for processes of this user."""
        return f"/proc/{os.getpid()}/fd/{self.namespaces[rank]}"

    def _shape(self, ip: Any, index: int) -> None:
        seconds = f"{_QUEUE * 8 * 1000 // self.rate}ms"
        rate = self.rate // 8
        ip.tc("add", "tbf", index, handle=0x10000, rate=rate, burst=_BURST, latency=seconds)


def sent_bytes() -> int:
    """Called on a host: bytes that its port has sent, frames and all."""
    return _counted(8)


def received_bytes() -> int:
    """Called on a host: bytes that have come in through its port, frames and all."""
    return _counted(0)


def _counted(column: int) -> int:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == PORT:
            return int(counts.split()[column])
    raise OSError(f"this host has no {PORT}")


# The ranks --------------------------------------------------------------------------------------


class Hosts:
    """One forked rank in each namespace, in one gloo group that meets at rank 0's address."""

    def __init__(self, switch: Switch, *, group_timeout: float = 60.0) -> None:
        self.size = switch.size
        self._conns: list[Connection] = []
        self._processes: list[Any] = []
        try:
            for rank in range(switch.size):
                ours, theirs = servers.Pipe()
                place = (rank, switch.size, switch.door(rank), switch.address(0), group_timeout)
                process = servers.Process(target=_main, args=(theirs, *place), daemon=True)
                self._conns.append(ours)
                self._processes.append(process)
                process.start()
                theirs.close()
            self._collect("start", START_SECONDS)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks: they hold nothing that a kill would leave behind."""
        for process in self._processes:
            if process.pid is not None:
                process.kill()
                process.join(5)
        for conn in self._conns:
            conn.close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """What a module-level `fn(rank, *args)` returns on each host. A failure ends them all."""
        for conn in self._conns:
            with suppress(OSError):  # a dead rank is found out below
                conn.send((fn, args))
        try:
            return self._collect(fn.__name__, timeout)
        except BaseException:
            self.close()
            raise

    def _collect(self, what: str, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        while len(results) < self.size:
            waiting = {c: rank for rank, c in enumerate(self._conns) if rank not in results}
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                raise HostFailed(f"{what}: ranks {late} took over {timeout:.0f} s")
            for conn in ready:
                rank = waiting[conn]  # type: ignore[index]
                try:
                    good, results[rank] = self._conns[rank].recv()
                except (EOFError, OSError):
                    raise HostFailed(f"{what}: rank {rank} died") from None
                if not good:
                    raise HostFailed(f"{what}: rank {rank} failed\n{results[rank]}")
        return [results[rank] for rank in range(self.size)]


def _main(
    conn: Connection, rank: int, size: int, namespace: str, meet: str, group_timeout: float
) -> None:
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while True:
                calls.put(conn.recv_bytes())
        except (EOFError, OSError):
            os._exit(3)  # the parent is gone

    try:
        # Before gloo and the store start threads: those are where the one that starts them is.
        enter_host(namespace)
        # The links are to be the limit, not what else runs on the machine.
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
        threading.Thread(target=listen, name="hosts-control", daemon=True).start()
        import torch
        import torch.distributed as dist

        limit = timedelta(seconds=group_timeout)
        torch.set_num_threads(1)
        store = dist.TCPStore(meet, _STORE_PORT, size, is_master=rank == 0, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        conn.send((True, None))
        while True:
            fn, args = pickle.loads(calls.get())
            conn.send((True, fn(rank, *args)))
    except BaseException:
        with suppress(OSError):
            conn.send((False, traceback.format_exc()))
    os._exit(1)
