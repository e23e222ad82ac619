"""Accelerate, the real one, with `use_torchrelay`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.framework_jobs import check_exact_resume, run_job

pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("torchdata", reason="torchdata is not installed")

from tests.integrations import accelerate_job as job  # noqa: E402


@pytest.mark.timeout(420)
def test_a_killed_job_continues_exactly(tmp_path: Path) -> None:
    done = run_job(Path(job.__file__), tmp_path)
    assert done.code == 0, done.output
    check_exact_resume(tmp_path, last=job.STEPS, saved=8)
