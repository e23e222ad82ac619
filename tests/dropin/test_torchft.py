"""torchft's own shared transport test, and its Manager's interface, on `RelayTransport`.

torchft has wheels for x86_64 alone. Elsewhere its Python files are used by themselves: the process
group and the transport test need nothing of its native extension. `Manager` does; what it asks of
a transport is the interface tested here.
"""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import Any
from unittest import TestCase

import pytest
import torch

from tests.support.members import Members
from tests.support.quorums import join_transport, recover, was_verified
from tests.support.torchft_files import MISSING, find_torchft
from tests.support.torchft_manager import recovers
from tests.support.ways import WAYS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def torchft_tests() -> Any:
    if not find_torchft():
        pytest.skip(MISSING)
    return importlib.import_module("torchft.checkpointing.transport_test")


def _group(store: Any, rank: int, world_size: int) -> Any:
    from torchft.process_group import ProcessGroupGloo

    group = ProcessGroupGloo(timeout=timedelta(seconds=10))
    group.configure(
        store_addr=f"localhost:{store.port}/prefix",
        replica_id="0",
        rank=rank,
        world_size=world_size,
    )
    return group


@pytest.mark.parametrize("in_place", [pytest.param(False, marks=pytest.mark.slow), True])
def test_multi_recovery(torchft_tests: Any, in_place: bool) -> None:
    from torchrelay.integrations.torchft import RelayTransport

    store = torch.distributed.TCPStore("localhost", port=0, is_master=True, wait_for_workers=False)

    def init(rank: int, world_size: int) -> Any:
        state = (lambda: torchft_tests.make_state_dict(CPU)) if in_place else None
        group = _group(store, rank, world_size)
        return RelayTransport(group, timedelta(seconds=10), CPU, state)

    torchft_tests.run_multi_recovery_test(TestCase(), init, CPU)


def test_manager_recovers_a_replica() -> None:
    try:
        importlib.import_module("torchft.coordination")
        importlib.import_module("torchft").Manager  # noqa: B018
    except (ImportError, AttributeError) as missing:  # or its Python files by themselves, above
        pytest.skip(f"torchft's native part has wheels for x86_64 alone: {missing}")
    recovers()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verify", [True, "all", False])
def test_digests_are_compared_as_asked_for(way: str, verify: Any) -> None:
    compared = way == "tcp" if verify is True else bool(verify)
    with Members(2) as (sender, receiver):
        for member in (sender, receiver):
            member.call(join_transport, way, verify)
        assert recover(sender, receiver, 1, 1.0) == {1.0}
        assert receiver.call(was_verified) is compared
