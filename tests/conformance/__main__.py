"""Run the whole matrix and write it as a page: `python -m tests.conformance`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import torch

from tests.conformance.apis import DURABLE, LIVE, PARTS
from tests.conformance.jobs import JOBS
from tests.conformance.matrix import AFTER, Cell, all_cells, fits, run
from tests.support.ranks import RankPool

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"

NOT_CARRIED = "-"

HEAD = f"""# Conformance

Real training jobs go through every API of torchrelay and train on. A round trip passes if the
losses of the next {AFTER} steps are, bit for bit, those of a run that was never interrupted. Where
the number of ranks changes, they are compared with a job that got its values by torch's own
`full_tensor` and `redistribute`, because sums over another number of ranks are rounded otherwise.

Losses, and the values that they depend on, are compared on each rank. A dash: torch saves plain
values, and tensors that are not distributed, of one rank alone, and an export has one model.

`python -m tests.conformance` runs the matrix and writes this page. The test suite runs every API
with a third of the jobs (`tests/conformance/test_conformance.py`), `make test-slow` with all of
them, on every number of ranks.
"""


def table(apis: list[str], good: Counter[tuple[str, str]], all_: Counter[tuple[str, str]]) -> str:
    head = f"| | {' | '.join(f'`{api}`' for api in apis)} |\n|---|{'---|' * len(apis)}\n"

    def cell(api: str, job: str) -> str:
        return f"{good[api, job]} of {all_[api, job]}" if fits(api, job) else NOT_CARRIED

    rows = [f"| {job} | {' | '.join(cell(api, job) for api in apis)} |" for job in JOBS]
    return head + "\n".join(rows) + "\n"


def page(results: dict[Cell, str], seconds: float) -> str:
    """The matrix in words and tables."""
    good = Counter((cell.api, cell.job) for cell, problem in results.items() if not problem)
    all_ = Counter((cell.api, cell.job) for cell in results)
    return f"""{HEAD}
{sum(good.values())} of {len(results)} trips were right, with torch {torch.__version__} on gloo, in
{seconds / 60:.0f} minutes.

## To a step and back

Saved by 1, 2, 3 and 4 ranks, and loaded by as many and by another number: 8 trips each. The other
number turns, so that each API and each job meets all of them. `export_hf` carries the model alone,
which trains on with a new optimizer.

{table(list(DURABLE), good, all_)}
## From a live replica to another

From each rank of a replica of 1, 2, 3 and 4 ranks to the same rank of another: 4 trips each.
`PGTransport` is the drop-in class, with each protocol that it speaks; `torchft` is the adapter.

{table(list(LIVE), good, all_)}
## From live ranks that have parts to another number of ranks

`relay.recv([0, 1, 2], into=state)`: from 1, 2, 3 and 4 ranks to as many others and to another
number: 8 trips each, through host memory and through TCP connections.

{table(list(PARTS), good, all_)}"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="APIs and jobs whose name has this in it")
    parser.add_argument("--page", type=Path, help=f"where to write, by default {PAGE.name} in docs")
    options = parser.parse_args()
    begun = time.monotonic()
    results: dict[Cell, str] = {}
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        pools = {size: stack.enter_context(RankPool(size)) for size in (1, 2, 3, 4, 8)}
        for cell in all_cells(all_ranks=True):
            if options.only in f"{cell.api} {cell.job}":
                results[cell] = run(cell, pools, Path(root))
                print(f"{cell}: {results[cell] or 'right'}", flush=True)
    failed = [cell for cell, problem in results.items() if problem]
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    if not options.only or options.page:
        (options.page or PAGE).write_text(page(results, time.monotonic() - begun))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
