"""Fresh memory, touched before it is used."""

from __future__ import annotations

import ctypes
import errno

import pytest

from torchrelay.memory import pages
from torchrelay.memory.pages import HUGE_PAGE, PAGE, Mapping, populate, release


def resident(address: int, nbytes: int) -> int:
    """Pages of a range that are in memory."""
    count = -(-nbytes // PAGE)
    found = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), found) == 0
    return sum(page & 1 for page in found)


@pytest.mark.parametrize("nbytes", [PAGE, 5 * PAGE, HUGE_PAGE + PAGE, 20 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_populated_memory_is_there_and_zero(nbytes: int, threads: int) -> None:
    mapping = Mapping(nbytes)
    assert mapping.address % HUGE_PAGE == 0
    populate(mapping.address, nbytes, threads)
    assert resident(mapping.address, nbytes) == nbytes // PAGE
    assert ctypes.string_at(mapping.address, nbytes) == bytes(nbytes)
    ctypes.memset(mapping.address, 7, nbytes)
    release(mapping.address, nbytes)
    assert ctypes.string_at(mapping.address, nbytes) == bytes(nbytes)


def advising(code: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A kernel that answers with `code` when it is asked to populate; what it was asked."""
    asked: list[int] = []
    original = pages._advise

    def advise(address: int, nbytes: int, advice: int) -> int:
        asked.append(advice)
        return code if advice == pages._POPULATE_WRITE else original(address, nbytes, advice)

    monkeypatch.setattr(pages, "_advise", advise)
    return asked


def test_a_kernel_that_cannot_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = advising(errno.EINVAL, monkeypatch)
    nbytes = (9 << 20) + PAGE
    mapping = Mapping(nbytes)
    populate(mapping.address, nbytes, 2)
    assert asked.count(pages._POPULATE_WRITE) == 2
    assert resident(mapping.address, nbytes) == nbytes // PAGE


def test_no_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    advising(errno.ENOMEM, monkeypatch)
    mapping = Mapping(PAGE)
    with pytest.raises(MemoryError, match="Cannot allocate"):
        populate(mapping.address, PAGE, 1)
    with pytest.raises(MemoryError, match="bytes of memory"):
        Mapping(1 << 62)
    with pytest.raises(MemoryError, match="bytes of memory"):
        Mapping(1 << 70)


def test_the_faster_kind_of_page_goes_on_and_the_other_is_tried_again() -> None:
    kinds = pages._Kinds()
    seconds = {pages._HUGE: 3.0, pages._SMALL: 1.0}
    given = []
    for _ in range(2 * pages._TRY_AGAIN):
        kind = kinds.next()
        given.append(kind)
        kinds.took(kind, seconds[kind])
    assert given[:3] == [pages._HUGE, pages._SMALL, pages._SMALL]
    assert [n + 1 for n, kind in enumerate(given) if kind == pages._HUGE] == [
        1,
        pages._TRY_AGAIN,
        2 * pages._TRY_AGAIN,
    ]
