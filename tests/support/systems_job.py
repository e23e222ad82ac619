"""Every public call on another system: `python -m tests.support.systems_job SYSTEM FOLDER URL`.

`FOLDER` has what the test wrote, and takes what is written here. Prints one JSON object: for each
call "works", or the name and message of what it raised.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.support import systems

if __name__ == "__main__":
    systems.become(sys.argv[1])

import pkgutil
from importlib import import_module

import torch

import torchrelay as tr
from tests.support.commands import command
from tests.support.systems_state import assert_is_state, holes, state_of
from torchrelay import dropin
from torchrelay.demo.__main__ import run as run_demo

FRAMEWORKS = "torchrelay.integrations."


def imports() -> None:
    """Every module but those that import a framework."""
    for found in pkgutil.walk_packages(tr.__path__, "torchrelay."):
        if "__main__" not in found.name and not found.name.startswith(FRAMEWORKS):
            import_module(found.name)


def reads(folder: Path) -> dict[str, Callable[[], object]]:
    root = folder / "written"

    def load() -> None:
        with tr.Checkpointer(
            root, options=tr.options.CheckpointerOptions(read_only=True)
        ) as checkpointer:
            assert checkpointer.steps() == [1, 2] and checkpointer.latest() == 2
            assert_is_state(checkpointer.load().state, 2)
            into = holes()
            checkpointer.load(into=into, step=1)
            assert_is_state(into, 1)
            assert checkpointer.verify() == 2

    def recover() -> None:
        with tr.Checkpointer(
            root, options=tr.options.CheckpointerOptions(read_only=True)
        ) as checkpointer:
            assert_is_state(tr.recover(into=holes(), sources=[checkpointer]).state, 2)

    def says(*arguments: object, code: int = 0) -> Callable[[], None]:
        def run() -> None:
            ended = command(*arguments)
            assert ended.returncode == code, ended
            assert ended.stdout

        return run

    return {
        "load": load,
        "recover": recover,
        "ls": says("ls", root),
        "inspect": says("inspect", f"{root}/step-2"),
        "inspect --stats": says("inspect", f"{root}/step-2", "--stats"),
        "verify": says("verify", root),
        "diff": says("diff", f"{root}/step-1", f"{root}/step-2", code=1),
        "inspect FILE.safetensors": says("inspect", folder / "plain.safetensors"),
    }


def writes(folder: Path, url: str) -> dict[str, Callable[[], object]]:
    def save() -> None:
        with tr.Checkpointer(folder / "here", keep=2) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(step, state_of(step))
            checkpointer.save(3, state_of(3), overwrite=True)
            assert checkpointer.steps() == [2, 3]
            assert_is_state(checkpointer.load().state, 3)
            checkpointer.rollback(2)
            assert checkpointer.steps() == [2]
            assert not checkpointer.reached_preemption(3)

    def convert() -> None:
        target = folder / "as-safetensors"
        ended = command("convert", f"{folder}/written/step-2", target, "--to", "safetensors")
        assert ended.returncode == 0, ended
        ended = command("convert", f"{folder}/written/step-2", folder / "as-dcp", "--to", "dcp")
        assert ended.returncode == 0, ended

    def pull() -> None:
        assert_is_state(tr.pull(url, into=holes()).state, 2)
        assert_is_state(tr.pull(url).state, 2)

    return {"save": save, "convert": convert, "pull": pull}


def needing_linux(folder: Path, url: str) -> dict[str, Callable[[], object]]:
    state = state_of(2)

    def save_async() -> None:
        with tr.Checkpointer(folder / "later") as checkpointer:
            checkpointer.save_async(1, state).wait()

    return {
        "Relay": tr.Relay,
        "serve": lambda: tr.serve(state, step=1),
        "Keeper": lambda: tr.Keeper("job"),
        "subscribe": lambda: tr.subscribe(url, into=holes()),
        "save_async": save_async,
        "pull(reshare=True)": lambda: tr.pull(url, options=tr.options.PullOptions(reshare=True)),
        "PGTransport": lambda: dropin.PGTransport(None, None, torch.device("cpu")),
        "torchrelay demo": lambda: run_demo(small=True),
        "torchrelay check": lambda: import_module("torchrelay.check.__main__").run(
            import_module("torchrelay.check.run").CheckPlan(None, None)
        ),
    }


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except BaseException as fault:
        at = traceback.extract_tb(fault.__traceback__)[-1]
        return f"{type(fault).__name__}: {fault} [{at.filename}:{at.lineno}]"
    return "works"


def main(folder: Path, url: str) -> dict[str, str]:
    calls: dict[str, Callable[[], object]] = {"import": imports}
    calls |= reads(folder) | writes(folder, url) | needing_linux(folder, url)
    return {name: outcome(call) for name, call in calls.items()}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[2]), sys.argv[3])))
