"""Probes of the network: connections between all ranks, and the speed of links between hosts."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from torchrelay.check.report import Finding, Verdict
from torchrelay.transports.meeting.addresses import SETTING, listen_here

AREA = "connections"
CONNECT_SECONDS = 4.0
MEASURE_SECONDS = 3.0
LEAST_SPEED = 0.1e9  # bytes a second between hosts: a link of 1 Gbit/s
_BLOCK = 1 << 20
_GREETING = b"torchrelay check\n"


class Greeter:
    """Accepts connections at the address that torchrelay would listen at, greets, and then takes
    in whatever comes, until it is closed."""

    def __init__(self) -> None:
        self._socket = listen_here()
        self.host, self.port = self._socket.getsockname()[:2]
        self._threads: list[threading.Thread] = []
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, name="check-listener", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                accepted, _ = self._socket.accept()
                self._open.append(accepted)
                taker = threading.Thread(target=_take_in, args=(accepted,), daemon=True)
                taker.start()


def _take_in(accepted: socket.socket) -> None:
    memory = bytearray(_BLOCK)
    with accepted, suppress(OSError):
        accepted.sendall(_GREETING)
        while accepted.recv_into(memory):
            pass
        accepted.sendall(b".")  # everything has arrived


def connections(addresses: Mapping[int, tuple[str, int]]) -> dict[int, str]:
    """Why the listener of each rank cannot be reached from here; empty text for those that can.

    All are tried at the same time, so this takes `CONNECT_SECONDS` at most.
    """
    why = dict.fromkeys(addresses, f"no answer within {CONNECT_SECONDS:.0f} s")
    with selectors.DefaultSelector() as selector, ExitStack() as opened:
        for rank, (host, port) in addresses.items():
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            link = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            link.setblocking(False)
            with suppress(BlockingIOError):
                try:
                    link.connect((host, port))
                except BlockingIOError:
                    pass
                except OSError as fault:
                    why[rank] = fault.strerror or str(fault)
                    continue
            selector.register(link, selectors.EVENT_READ, rank)
        end = time.monotonic() + CONNECT_SECONDS
        while selector.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                link, rank = key.fileobj, key.data  # type: ignore[assignment]
                try:
                    greeting = link.recv(len(_GREETING))
                    why[rank] = "" if greeting == _GREETING else "another program answers there"
                except BlockingIOError:
                    continue
                except OSError as fault:
                    why[rank] = fault.strerror or str(fault)
                selector.unregister(link)
    return why


def speed(address: tuple[str, int], streams: int = 4) -> float:
    """Bytes a second that plain sockets carry to a listener, over several connections."""
    with ExitStack() as opened:
        links = [
            opened.enter_context(socket.create_connection(address, CONNECT_SECONDS))
            for _ in range(streams)
        ]
        for link in links:
            link.settimeout(3 * MEASURE_SECONDS)
            link.recv(len(_GREETING))
        counts = [0] * streams
        begin = time.perf_counter()

        def push(number: int) -> None:
            block = bytes(_BLOCK)
            with suppress(OSError):
                while time.perf_counter() - begin < MEASURE_SECONDS:
                    links[number].sendall(block)
                    counts[number] += _BLOCK
                links[number].shutdown(socket.SHUT_WR)
                links[number].recv(1)

        threads = [threading.Thread(target=push, args=(n,), daemon=True) for n in range(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * MEASURE_SECONDS)
        return sum(counts) / (time.perf_counter() - begin)


@contextmanager
def listening() -> Iterator[Greeter]:
    listener = Greeter()
    try:
        yield listener
    finally:
        listener.close()


def interfaces() -> dict[str, int]:
    """The speed of each network interface that is up, in Mbit/s, where the kernel knows it."""
    found = {}
    for place in Path("/sys/class/net").glob("*"):
        with suppress(OSError, ValueError):
            if (place / "operstate").read_text().strip() == "up":
                found[place.name] = int((place / "speed").read_text())
    return {name: each for name, each in found.items() if each > 0}


def judge_connections(
    hosts: Sequence[str],
    addresses: Sequence[Sequence[Any] | None],
    reached: Sequence[Mapping[str, str] | None],
) -> list[Finding]:
    """Rows about the addresses of ranks, and about who cannot connect to whom.

    `reached[a][b]` has why rank `a` cannot reach rank `b`; it is empty if `a` can.
    """
    rows = []
    where: dict[str, list[int]] = {}
    for rank, address in enumerate(addresses):
        if address is None:
            remedy = f"does {SETTING} name an interface of that host?"
            rows.append(Finding(AREA, f"rank {rank}", "problem", "listens nowhere", remedy))
        else:
            where.setdefault(f"{hosts[rank]} at {address[0]}", []).append(rank)
    for place, ranks in where.items():
        rows.append(Finding(AREA, f"ranks {_span(ranks)}", "ok", f"listen on {place}"))
    faults: dict[tuple[str, str, str], list[str]] = {}
    pairs = 0
    for rank, found in enumerate(reached):
        for other, why in (found or {}).items():
            pairs += 1
            if why:
                key = (hosts[rank], hosts[int(other)], why)
                faults.setdefault(key, []).append(f"{rank} to {other}")
    for (here, there, why), which in faults.items():
        rows.append(
            Finding(
                AREA,
                f"{here} to {there}",
                "problem",
                f"{why} (rank {', '.join(which)})",
                "open the firewall for TCP between these hosts on all ports above 1023, or set "
                f"{SETTING} to an interface that both reach",
            )
        )
    if pairs and not faults:
        rows.append(Finding(AREA, "every rank to every other", "ok", f"{pairs} connections"))
    return rows


def judge_speed(here: str, there: str, speed: float, nics: Mapping[str, int]) -> Finding:
    """A row about the link between two hosts."""
    found = f"{speed / 1e9:.3g} GB/s by plain sockets"
    verdict: Verdict = "ok" if speed >= LEAST_SPEED else "slow"
    remedy = ""
    if verdict == "slow":
        fast = [f"{name} ({rate / 1000:g} Gbit/s)" for name, rate in nics.items() if rate >= 10_000]
        hint = f": {', '.join(fast)} is there" if fast else ""
        remedy = f"set {SETTING} to the interface of the fast network{hint}; check its cables"
    return Finding(AREA, f"link from {here} to {there}", verdict, found, remedy)


def _span(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))
