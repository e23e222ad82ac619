"""torchtitan's checkpoint manager, on the real base class, with torchrelay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.framework_jobs import check_exact_resume, run_job

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
pytest.importorskip("torchtitan.components.checkpointer", reason="a part of torchtitan is missing", exc_type=ImportError)

from tests.integrations import torchtitan_job as job


@pytest.mark.timeout(420)
def test_a_killed_job_continues_exactly(tmp_path: Path) -> None:
    done = run_job(Path(job.__file__), tmp_path)
    assert done.code == 0, done.output
    check_exact_resume(tmp_path, last=job.STEPS, saved=8, near=0.25)
