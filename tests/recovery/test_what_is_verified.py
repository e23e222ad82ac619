"""The report of a recovery says that digests were compared only where they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr


@pytest.mark.parametrize(
    ("verify", "same_host", "verified"),
    [(True, True, False), ("all", True, True), (True, False, True), (False, True, False)],
)
def test_of_a_step_that_an_endpoint_serves(verify: Any, same_host: bool, verified: bool) -> None:
    options = tr.options.RecoverOptions(verify=verify, same_host=same_host)
    into = {"w": torch.zeros(100_000)}
    with tr.serve({"w": torch.ones(100_000)}, step=3, no_dist=True) as endpoint:
        got = tr.recover([endpoint.url], into=into, no_dist=True, options=options)
    assert got is not None and got.step == 3 and bool((into["w"] == 1).all())
    assert got.report.verified is verified


@pytest.mark.parametrize("verify", [True, False])
def test_of_a_step_on_a_disk(verify: bool, tmp_path: Path) -> None:
    options = tr.options.RecoverOptions(verify=verify)
    with tr.Checkpointer(tmp_path, no_dist=True) as ckpt:
        ckpt.save(3, {"w": torch.ones(1000)})
    got = tr.recover([str(tmp_path)], into={"w": torch.zeros(1000)}, no_dist=True, options=options)
    assert got is not None and got.report.verified is verify
