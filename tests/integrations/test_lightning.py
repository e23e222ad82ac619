"""Lightning, the real one, with torchrelay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.framework_jobs import check_exact_resume, run_job

pytest.importorskip("lightning", reason="lightning is not installed")

from tests.integrations import lightning_job as job  # noqa: E402


@pytest.mark.timeout(420)
@pytest.mark.parametrize("words", [(), ("--sharded",)], ids=["ddp", "fsdp2"])
def test_a_killed_job_continues_exactly(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run_job(Path(job.__file__), tmp_path, *words)
    assert done.code == 0, done.output
    check_exact_resume(tmp_path, last=job.STEPS, saved=5, near=0.25)
