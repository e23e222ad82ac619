"""The collector's pause, by threads and in forked children."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from torchrelay.pause import gc_paused


def test_pauses_of_threads_that_overlap_end_with_the_last() -> None:
    assert gc.isenabled()
    first, second = gc_paused(), gc_paused()
    first.__enter__()
    other = threading.Thread(target=second.__enter__)
    other.start()
    other.join()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_what_was_off_stays_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_collects() -> None:
    """The thread that is in a pause here does not exist there."""
    with gc_paused():
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0 and gc.isenabled()
