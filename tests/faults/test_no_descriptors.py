"""A process that may open no more files says so, and blames neither peer nor endpoint."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.ranks import RankPool
from torchrelay.deadlines import Deadline
from torchrelay.errors import PeerLostError, ResourceError
from torchrelay.keeper import process as keeper_process
from torchrelay.shortage import shortage
from torchrelay.sources.remote_step import LAST_TRIES, Supplier, Suppliers


@contextmanager
def none_left(spare: int = 0) -> Iterator[None]:
    """Within: this process may open `spare` more files.

    The limit leaves more room than other threads of this process may use in between, so that
    there are files of ours to close again.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(one.name) for one in Path("/proc/self/fd").iterdir())
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 64, limits[1]))
    try:
        while True:
            try:
                held.append(os.dup(2))
            except OSError as fault:
                assert fault.errno == errno.EMFILE
                break
        for _ in range(spare):
            os.close(held.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for one in held:
            os.close(one)


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(300_000), "v": torch.arange(5)}


def refused(act: Callable[[], object], spare: int = 0) -> None:
    """`act` fails for want of descriptors, and succeeds without that."""
    act()
    with none_left(spare), pytest.raises(ResourceError, match=r"may have \d+ files open") as caught:
        act()
    assert isinstance(caught.value, OSError) and "ulimit -n" in str(caught.value)
    act()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("reshare", [False, True])
def test_a_pull(host: str, reshare: bool) -> None:
    with tr.serve(state(), step=1, no_dist=True, timeout=60) as endpoint:
        url = endpoint.url.replace("127.0.0.1", host)

        def act() -> None:
            got = tr.pull(
                url,
                timeout=20,
                no_dist=True,
                options=tr.options.PullOptions(same_host=False, reshare=reshare),
            )
            if got.seed is not None:
                got.seed.close()

        refused(act)


def test_a_subscription_that_waits_until_its_deadline() -> None:
    with tr.serve(state(), step=1, no_dist=True, timeout=60) as endpoint:
        into = state()

        def subscribe() -> None:
            given = tr.subscribe(endpoint.url, into=into, no_dist=True, timeout=8)
            given.close()

        refused(subscribe)


def test_a_process_that_cannot_be_started() -> None:
    def serve() -> None:
        tr.serve(state(), step=1, no_dist=True, timeout=60).close()

    refused(serve)
    refused(serve, spare=2)


def test_a_keeper() -> None:
    name = keeper_process.KeeperName.of(f"no-descriptors-{os.getpid()}")
    assert keeper_process.connect(name) is None
    with none_left(), pytest.raises(ResourceError, match="keeper"):
        keeper_process.connect(name)


def test_a_supplier_is_not_blamed() -> None:
    class Host:
        url = "http://there:1"

    ours, theirs = OSError(errno.EMFILE, "Too many open files"), OSError(errno.ECONNREFUSED, "no")
    for fault, kind in ((ours, ResourceError), (theirs, PeerLostError)):
        supplier = Supplier(Host(), "0" * 32)  # type: ignore[arg-type]
        suppliers = Suppliers({"a": [supplier]}, Deadline(60), "step 1")
        for _ in range(LAST_TRIES):
            suppliers.note("a", supplier, fault)
        with pytest.raises(kind):
            suppliers.take("a")


def receives(rank: int, group: Any, lacks: bool) -> Any:
    relay = tr.Relay(group, timeout=40)
    if rank == 0:
        for step in (1, 3):
            relay.send(state(), to=1, step=step, route="tcp")
        return None
    relay.recv(0, step=1)
    found = ""
    if lacks:
        try:
            with none_left():
                relay.recv(0, step=3)
        except ResourceError as fault:
            found = f"{fault.rank} {fault}"
    relay.recv(0, step=3)
    return found


def test_a_receive(pool2: RankPool) -> None:
    found = pool2.run(receives, True)[1]
    assert found.startswith("0 ") and "cannot connect to rank 0" in found


@pytest.mark.parametrize(
    "fault",
    [OSError(errno.EINVAL, ""), OSError(errno.EBUSY, ""), socket.gaierror(-2, "")],
    ids=["invalid", "busy", "no-name"],
)
def test_a_resolver_that_cannot_open_its_files(fault: OSError) -> None:
    assert shortage(fault) is None
    with none_left():
        found = shortage(fault)
    assert isinstance(found, ResourceError) and "files open" in str(found)


@pytest.mark.parametrize("code", [errno.ENFILE, errno.ENOMEM, errno.ENOBUFS])
def test_what_the_machine_lacks(code: int) -> None:
    found = shortage(OSError(code, ""))
    assert isinstance(found, ResourceError)


@pytest.mark.parametrize(
    "fault",
    [ConnectionRefusedError(errno.ECONNREFUSED, ""), socket.gaierror(-2, ""), ValueError(24)],
)
def test_what_the_peer_is_at_fault_for(fault: Exception) -> None:
    assert shortage(fault) is None
