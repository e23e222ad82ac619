"""Threads in a backend's code, which an interpreter waits for before it ends."""

from __future__ import annotations

import os
import threading

import pytest

from torchrelay.transports import c10d


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_waits_for_none_of_its_parents_threads() -> None:
    """It would wait in vain, and then close connections that are its parent's."""
    with c10d.inside_backend():
        child = os.fork()
        if not child:
            os._exit(len(c10d._inside) + len(c10d._groups) + (not c10d._returned(0.0)))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0 and not c10d._returned(0.0)
    assert threading.get_ident() not in c10d._inside
