"""Begins a keeper: leaves the family of the process that launched it, then runs the program.

A launcher ends the processes that it started, their groups and their sessions. A keeper is in none
of them, and has nothing of theirs open.
"""

from __future__ import annotations

import os


def serve(link: int) -> None:
    """Run a keeper, and say on a socket, given by its descriptor, whether it is there."""
    if os.fork():
        os._exit(0)  # no process that the launcher knows waits for the child
    os.chdir("/")  # it keeps no file system from being unmounted
    # Imported in the child, which is then the only one that has had threads.
    from torchrelay.keeper.server.program import run

    run(link)
