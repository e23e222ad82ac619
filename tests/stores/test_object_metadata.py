"""An object whose metadata no program can read is one damaged step, not the end of a load."""

from __future__ import annotations

import warnings

import pytest
import torch

import torchrelay as tr
from tests.support.s3 import BUCKET, S3


def test_metadata_that_is_not_utf8_spoils_its_own_step_alone(s3: S3) -> None:
    url = s3.url("run")
    with tr.Checkpointer(url, no_dist=True, timeout=60) as there:
        for step in (1, 2):
            there.save(step, {"w": torch.full((4,), float(step))})
    (path,) = {
        one.path.partition("?")[0]
        for one in s3.requests
        if one.method == "PUT" and one.path.endswith("step-2/manifest.json")
    }
    status, body, _ = s3.ask("GET", path)
    assert status == 200 and path.startswith(f"/{BUCKET}/")
    # A header's bytes are what they are: no program has to take them for text.
    assert s3.ask("PUT", path, body, {"x-amz-meta-odd": "\xff\xfe"})[0] == 200
    with tr.Checkpointer(url, no_dist=True, timeout=60) as there, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = there.load()
        assert got.step == 1 and float(got.state["w"][0]) == 1
        found = tr.recover(sources=[url], no_dist=True, timeout=60)
        assert found.step == 1
    with (
        tr.Checkpointer(url, no_dist=True, timeout=60) as there,
        pytest.raises(tr.errors.CheckpointError, match="Metadata"),
    ):
        there.load(step=2)
