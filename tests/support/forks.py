"""Processes that are forked off a server which has imported torch once.

A new interpreter takes seconds of processor time to import torch; a fork of one that has takes
milliseconds. The server has no process group, no threads of ours and no state: a child differs from
a new interpreter in its hash seed and its addresses, which it shares with its siblings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from multiprocessing import get_context

servers = get_context("forkserver")
servers.set_forkserver_preload(["tests.support.preloaded"])


def take_environment(environment: Mapping[str, str]) -> None:
    """Called in a child, whose environment is the server's: have that of the test instead."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
