"""Processes that are forked off a server which has imported torch once.

A new interpreter takes seconds of processor time to import torch; a fork of one that has takes
milliseconds. The server has no process group, no threads of ours and no state: a child differs from
a new interpreter in its hash seed and its addresses, which it shares with its siblings.
"""

from __future__ import annotations

import contextlib
import multiprocessing.context
import os
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

servers = get_context("forkserver")
servers.set_forkserver_preload(["tests.support.preloaded"])


def take_environment(environment: Mapping[str, str]) -> None:
    """Called in a child, whose environment is the server's: have that of the test instead."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


class Done(NamedTuple):
    """How a program ended."""

    code: int
    output: str


def run_program(program: str, *args: str, folder: Path, seconds: float) -> Done:
    """Run a script, or a module by its name, as `python program args` would in this folder.

    What the program would spawn, or fork off a server of its own, is forked off it. Whatever is
    left of it at its end is killed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "output"
        place.touch()
        words = (program, args, str(folder), str(place), dict(os.environ))
        process = servers.Process(target=_run_program, args=words)
        process.start()
        try:
            process.join(seconds)
            if process.exitcode is None:
                raise TimeoutError(f"{program} took over {seconds:.0f} s:\n{place.read_text()}")
            return Done(process.exitcode, place.read_text(errors="replace"))
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join(10)


def _run_program(
    program: str, args: tuple[str, ...], folder: str, place: str, environment: dict[str, str]
) -> None:
    os.setsid()
    take_environment(environment)
    os.chdir(folder)
    with open(place, "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    kinds = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    others = {kind: kinds[kind] for kind in ("spawn", "forkserver")}
    kinds.update(dict.fromkeys(others, kinds["fork"]))
    # Those may have process groups and threads: what they start is spawned.
    os.register_at_fork(after_in_child=lambda: kinds.update(others))
    sys.argv = [program, *args]
    if program.endswith(".py"):
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def in_process(act: Callable[..., Any], *args: Any) -> Any:
    """Call in a process that may fork; raises what it raised."""
    ours, theirs = servers.Pipe(duplex=False)
    process = servers.Process(target=_call, args=(theirs, act, args))
    process.start()
    theirs.close()
    try:
        assert ours.poll(60), f"{act.__name__} does not end"
        worked, value = ours.recv()
    finally:
        process.kill()
        process.join(20)
    assert worked, value
    return value


def _call(link: Any, act: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        link.send((True, act(*args)))
    except BaseException:
        link.send((False, traceback.format_exc()))
