"""Check the cluster that a job will run on: versions, connections, routes, the folder, the bucket.

    torchrun --nnodes=2 --nproc-per-node=8 -m torchrelay.check --folder /shared/run
    srun --ntasks-per-node=8 python -m torchrelay.check --folder /shared/run
    python -m torchrelay.check        # this machine alone, with two processes

Exit status: 0 if every promise of the library holds here, 1 if one does not.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from torchrelay.check import report
from torchrelay.check.ranks import Ranks, launch_of, local_environment, store_here
from torchrelay.check.run import CheckPlan, check
from torchrelay.system import needs_linux

ALONE = 2  # processes of a check of one machine
_LAST_WORDS = 10.0  # seconds for the other process to end


def run(plan: CheckPlan, *, json: bool = False) -> int:
    """Check, print the table on rank 0, and return the exit status."""
    needs_linux("torchrelay check")
    launch = launch_of(os.environ)
    if launch is None:
        return _run_alone(plan, json)
    ranks = Ranks.launched(launch)
    return _show(ranks, check(ranks, plan), json)


def _run_alone(plan: CheckPlan, json: bool) -> int:
    """This process and another one of this machine, as two ranks."""
    store, port = store_here(ALONE)
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "torchrelay.check", *_arguments(plan)]
        environment = local_environment(1, ALONE, port)
        other = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            ranks = Ranks(_prefixed(store), 0, ALONE)
            rows = check(ranks, plan)
            status = _show(ranks, rows, json)
            other.wait(_LAST_WORDS)
            return status
        finally:
            other.kill()
            other.wait()
            if other.returncode > 0:
                errors.seek(0)
                print(errors.read(), file=sys.stderr)


def _prefixed(store: Any) -> Any:
    import torch.distributed as dist

    return dist.PrefixStore("start-0", store)  # type: ignore[attr-defined]


def _arguments(plan: CheckPlan) -> list[str]:
    options = {"--folder": plan.folder, "--bucket": plan.bucket}
    return [word for name, value in options.items() if value is not None for word in (name, value)]


def _show(ranks: Ranks, rows: Sequence[report.Finding], json: bool) -> int:
    if ranks.rank == 0:
        print(report.as_json(rows) if json else report.as_text(rows), flush=True)
    ranks.leave(_LAST_WORDS)
    return report.exit_status(rows) if ranks.rank == 0 else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m torchrelay.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", help="a folder that all ranks share, as for a Checkpointer")
    parser.add_argument("--bucket", help="a bucket's URL, as for a Checkpointer")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    return run(CheckPlan(options.folder, options.bucket), json=options.json)


if __name__ == "__main__":
    sys.exit(main())
