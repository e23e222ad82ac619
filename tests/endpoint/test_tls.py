"""TLS with certificates of a private authority: between ranks, seeds and sources of a recovery."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import torchrelay as tr
from tests.support.access import access
from tests.support.certificates import authority
from tests.support.fsdp_job import fsdp_job, train, whole
from tests.support.ranks import RankPool

TOKEN = "correct-horse-battery-staple"
TIMEOUT = 60.0


def serve_by_tls(rank: int, group: Any, files: dict[str, str], out: str) -> Any:
    """All ranks serve one state. Rank 0 downloads it as a file, has the page look into a tensor,
    and recovers from it."""
    job = fsdp_job(1)
    train(job, 2)
    own = access(token=TOKEN, **files)
    with tr.serve(job, step=2, timeout=TIMEOUT, **own) as endpoint:
        url = endpoint.url
        assert url.startswith("https://")
        dist.barrier(group)
        found = None
        if rank == 0:
            curl = ["curl", "-sSf", "--cacert", files["cafile"]]
            curl += ["-H", f"Authorization: Bearer {TOKEN}"]
            file = ["-o", out, f"{url}/model.safetensors"]
            done = subprocess.run([*curl, *file], capture_output=True, text=True, timeout=TIMEOUT)
            page = f"{url}/page/histogram.json?step=2&tensor=column"
            shown = subprocess.run([*curl, page], capture_output=True, text=True, timeout=TIMEOUT)
            trusting = access(token=TOKEN, cafile=files["cafile"])
            got = tr.recover(sources=[url], no_dist=True, timeout=TIMEOUT, **trusting)
            found = done.stderr, shown.stdout or shown.stderr, got.step
        dist.barrier(group)
    return found, whole(job)


def test_ranks_read_from_each_other_by_a_private_authority(pool2: RankPool, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    files = authority(tmp_path)
    results = pool2.run(serve_by_tls, files, str(out), timeout=3 * TIMEOUT)
    (trouble, shown, step), wanted = results[0]
    assert trouble == "" and step == 2
    assert '"counts":[' in shown.replace(" ", "")
    found = load_file(out)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
