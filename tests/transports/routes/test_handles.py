"""Device memory of senders that is open here: how long, and for whom. No GPU is asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from torchrelay.geometry.runs import Runs
from torchrelay.memory.gpu.kernels import CudaError
from torchrelay.transports.routes.cuda import handles
from torchrelay.transports.routes.cuda.handles import (
    Export,
    Exported,
    Exports,
    Openings,
)

SENDER, ANOTHER = b"one process", b"another"


class Driver:
    """Opens and closes, and notices a mistake."""

    def __init__(self) -> None:
        self.open: dict[int, int] = {}  # by pointer, the export's id
        self.refused: set[int] = set()
        self._next = 1 << 40

    def opened(self, export: Export) -> handles.Opening:
        if export.id in self.refused:
            raise CudaError("CUDA cannot open the sender's memory")
        self._next += 1 << 20
        self.open[self._next] = export.id
        return handles.Opening(self._next, 0, 64)

    def closed(self, opened: handles.Opening) -> None:
        del self.open[opened.pointer]  # twice is a fault

    @property
    def ids(self) -> list[int]:
        return sorted(self.open.values())


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(handles, "open_export", made.opened)
    monkeypatch.setattr(handles, "close_opening", made.closed)
    yield made


def memory(*ids: int) -> Exported:
    """A state with 8 bytes in each of these allocations."""
    exports = tuple(Export(number, "gpu", bytes(64)) for number in ids)
    rows = [(8 * n, n << handles._OFFSET_BITS, 8) for n in range(len(ids))]
    return Exported(exports, np.array(rows, "<u8").T.tobytes())


def test_what_is_open_is_used_again(driver: Driver) -> None:
    openings = Openings()
    for _ in range(3):
        with openings.borrowed(SENDER, memory(1, 2), 16) as found:
            assert found[0].addresses.tolist() == list(driver.open)
    assert driver.ids == [1, 2] and len(driver.open) == 2


def test_memory_that_the_newest_state_is_not_in_is_closed(driver: Driver) -> None:
    """The sender could not free it."""
    openings = Openings()
    for ids in ((1, 2), (2, 3), (4,)):
        with openings.borrowed(SENDER, memory(*ids), 8 * len(ids)):
            pass
        assert driver.ids == list(ids)


def test_memory_that_a_transfer_still_reads_stays_open(driver: Driver) -> None:
    openings = Openings()
    with ExitStack() as first:
        first.enter_context(openings.borrowed(SENDER, memory(1, 2), 16))
        with openings.borrowed(SENDER, memory(3), 8):
            assert driver.ids == [1, 2, 3]
        assert driver.ids == [1, 2, 3]
    assert driver.ids == [3]


def test_senders_do_not_close_each_others_memory(driver: Driver) -> None:
    """Ids are unique within a process only."""
    openings = Openings()
    with openings.borrowed(SENDER, memory(1), 8), openings.borrowed(ANOTHER, memory(1), 8):
        assert driver.ids == [1, 1]
    with openings.borrowed(SENDER, memory(2), 8):
        assert driver.ids == [1, 2]


def test_memory_of_a_process_that_has_ended_is_closed(driver: Driver) -> None:
    """Its successor has other memory by the same ids."""
    openings = Openings()
    with openings.borrowed(SENDER, memory(1), 8) as found:
        before = found[0].addresses.tolist()
    with openings.borrowed(ANOTHER, memory(1), 8) as found:
        assert found[0].addresses.tolist() != before
    openings.forget(SENDER)
    assert driver.ids == [1] and before[0] not in driver.open


def test_memory_that_is_read_when_its_process_ends_is_closed_after_that(driver: Driver) -> None:
    openings = Openings()
    with openings.borrowed(SENDER, memory(1), 8):
        openings.forget(SENDER)
        assert driver.ids == [1]
    assert driver.ids == []


def test_an_opening_that_fails_leaves_none_behind(driver: Driver) -> None:
    openings = Openings()
    driver.refused = {2}
    with pytest.raises(CudaError), openings.borrowed(SENDER, memory(1, 2), 16):
        pass
    with openings.borrowed(SENDER, memory(3), 8):
        assert driver.ids == [3]


def test_a_table_that_cannot_be_leaves_none_in_use(driver: Driver) -> None:
    openings = Openings()
    wrong = Exported(memory(1).exports, b"1234567")
    with pytest.raises(CudaError), openings.borrowed(SENDER, wrong, 8):
        pass
    openings.close()
    assert driver.ids == []


def test_an_allocation_that_is_exported_twice_is_refused(driver: Driver) -> None:
    with pytest.raises(CudaError, match="twice"), Openings().borrowed(SENDER, memory(1, 1), 16):
        pass


def test_an_end_closes_what_no_transfer_reads(driver: Driver) -> None:
    openings = Openings()
    with openings.borrowed(SENDER, memory(1), 8):
        openings.close()
        assert driver.ids == [1]
    assert driver.ids == []
    with openings.borrowed(SENDER, memory(2), 8):
        pass
    openings.close()
    assert driver.ids == []


def test_transfers_at_once_over_changing_allocations(driver: Driver) -> None:
    """Three threads; each finds its memory open for as long as it reads."""
    openings, wrong = Openings(), []

    def transfer(first: int) -> None:
        for number in range(200):
            ids = (first + number, first + number + 1)
            with openings.borrowed(SENDER, memory(*ids), 16) as found:
                here = set(found[0].addresses.tolist())
                if not here <= set(driver.open):
                    wrong.append(ids)

    threads = [threading.Thread(target=transfer, args=(1000 * n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == [] and len(driver.ids) <= 2
    openings.close()
    assert driver.ids == []


class Allocations:
    """Allocations of 64 bytes that this process has, by their bases, and their ids."""

    def __init__(self, *bases: int) -> None:
        self.ids = {base: number for number, base in enumerate(bases, 1)}
        self.found: list[int] = []  # addresses that were looked up

    def export(self, address: int, number: int) -> handles._Allocation:
        self.found.append(address)
        base = max(base for base in self.ids if base <= address)
        return handles._Allocation(base, 64, Export(number, "gpu", bytes(64)))


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> Allocations:
    """Two that follow each other, and one apart from them."""
    made = Allocations(1024, 1088, 4096)
    monkeypatch.setattr(handles, "_export", made.export)
    monkeypatch.setattr(handles, "_id_at", lambda at: made.ids[max(b for b in made.ids if b <= at)])
    return made


@pytest.mark.parametrize(
    ("memory", "ids"),
    [
        (Runs([0, 8], [1024, 4096], [8, 8]), [1, 3]),
        (Runs([0], [1032], [100]), [1, 2]),  # from one allocation into the next
        (Runs([0], [1088], [64]), [2]),
        (Runs([0, 64], [4096, 1024], [64, 128]), [1, 2, 3]),
    ],
)
def test_allocations_are_looked_up_once(
    allocations: Allocations, memory: Runs, ids: list[int]
) -> None:
    exports = Exports()
    first = exports.of(memory)
    assert [export.id for export in first.exports] == ids
    looked_up = len(allocations.found)
    assert exports.of(memory) == first
    assert len(allocations.found) == looked_up


def test_an_allocation_with_another_id_is_looked_up_again(allocations: Allocations) -> None:
    exports, memory = Exports(), Runs([0], [1032], [100])
    exports.of(memory)
    allocations.ids[1088] = 9
    assert [export.id for export in exports.of(memory).exports] == [1, 9]
