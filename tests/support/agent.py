"""torchrun, with workers that are forks: `python agent.py script.py ...` runs it on two ranks.

As `torchrun --standalone --nproc-per-node 2 --max-restarts 1 script.py ...` does, but for the
interpreters that would import torch for each worker of each start.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run(script: str, *words: str) -> None:
    torch.set_num_threads(1)  # as torchrun has it where a host has several workers
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="test",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, run)(*sys.argv[1:])
