"""Write the golden steps of the present format: `python -m tests.support.make_golden DIRECTORY`.

A step that a release has written is never written again. When the format gets a new version, its
steps go to a directory of their own beside the others.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torchrelay as tr
from tests.support import golden
from tests.support.ranks import run_ranks


def by_two(rank: int, group: Any, root: str) -> None:
    with tr.Checkpointer(root, group=group, timeout=30) as there:
        there.save(golden.TWO, golden.state_of_two(rank))


def main(root: Path) -> None:
    warnings.simplefilter("ignore")
    with tr.Checkpointer(
        root, timeout=30, options=tr.options.CheckpointerOptions(file_bytes=1024)
    ) as there:
        there.save(golden.LIBRARY, golden.state_of_library())
        there.save(golden.ONE, golden.state_of_one())
    run_ranks(by_two, 2, str(root))
    with tr.Checkpointer(root, timeout=30) as there:
        for step in there.steps():
            there.verify(step)
            print(f"{root}/step-{step}: {sum(f.nbytes for f in there.record(step).volumes)} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
