"""Device memory of senders that is open here: how long, and for whom. No GPU is asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from torchrelay.transports.routes.cuda import handles
from torchrelay.transports.routes.cuda.handles import Export, Exported, IpcError, Openings

SENDER, ANOTHER = 0, 1


class Driver:
    """Opens and closes, and notices a mistake."""

    def __init__(self) -> None:
        self.open: dict[int, int] = {}  # by pointer, the export's id
        self.refused: set[int] = set()
        self._next = 1 << 40

    def opened(self, export: Export) -> handles.Opening:
        if export.id in self.refused:
            raise IpcError("CUDA cannot open the sender's memory")
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
    rows = [(8 * n, 8, n, 0) for n in range(len(ids))]
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


def test_an_opening_that_fails_leaves_none_behind(driver: Driver) -> None:
    openings = Openings()
    driver.refused = {2}
    with pytest.raises(IpcError), openings.borrowed(SENDER, memory(1, 2), 16):
        pass
    with openings.borrowed(SENDER, memory(3), 8):
        assert driver.ids == [3]


def test_a_table_that_cannot_be_leaves_none_in_use(driver: Driver) -> None:
    openings = Openings()
    wrong = Exported(memory(1).exports, b"1234567")
    with pytest.raises(IpcError), openings.borrowed(SENDER, wrong, 8):
        pass
    openings.close()
    assert driver.ids == []


def test_an_allocation_that_is_exported_twice_is_refused(driver: Driver) -> None:
    with pytest.raises(IpcError, match="twice"), Openings().borrowed(SENDER, memory(1, 1), 16):
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
