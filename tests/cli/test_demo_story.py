"""The demo's account of its workers, from messages that the tests write."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from torchrelay.demo.job import SMALL
from torchrelay.demo.launcher import Launcher, WorkerMessage
from torchrelay.demo.story import Story
from torchrelay.demo.worker import Plan

HOSTS = ["a", "a", "b", "b"]


class Script:
    """A launcher whose workers send what was written for them, one message at a time."""

    def __init__(self, *messages: WorkerMessage) -> None:
        self.hosts, self.keepers = HOSTS, dict[str, int]()
        self.starts = 0
        self.left = list(messages)

    def start(self) -> None:
        self.starts += 1

    def receive(self, seconds: float) -> list[WorkerMessage]:
        return [self.left.pop(0)]

    def stop(self) -> list[WorkerMessage]:
        return []

    def dismiss(self) -> None:
        assert not self.left, "workers of this start are not done"


def played(*messages: WorkerMessage) -> tuple[Story, list[str]]:
    events: list[str] = []
    story = Story(Plan(SMALL, "", None), HOSTS, on_event=events.append)
    script: Any = Script(*messages)
    story.launcher = script
    story.play(60.0)
    return story, events


def done(rank: int, weights: str = "right") -> WorkerMessage:
    return WorkerMessage(rank, "done", 0.0, weights)


def test_workers_that_were_done_before_a_new_start_are_waited_for_again() -> None:
    story, _ = played(
        done(0, "of the first start"),
        WorkerMessage(1, "ended", 0.0, -9),
        done(1),
        done(2),
        done(3),
        done(0),
    )
    assert story.launcher.starts == 2
    assert story.run.weights == dict.fromkeys(range(4), "right")


def test_a_worker_that_ends_without_a_word_is_told_with_its_exit_code() -> None:
    _, events = played(WorkerMessage(2, "ended", 0.0, -11), *map(done, range(4)))
    assert events[0] == "a worker has failed: worker 2 ended with exit code -11"


def test_each_start_has_reasons_of_its_own() -> None:
    failed = WorkerMessage(2, "failed", 0.0, "Traceback:\n  line\nRuntimeError: the first")
    _, events = played(failed, WorkerMessage(1, "ended", 0.0, 1), *map(done, range(4)))
    reasons = [event for event in events if "failed" in event]
    assert [reason.rpartition(": ")[2] for reason in reasons] == [
        "the first",
        "worker 1 ended with exit code 1",
    ]


def test_a_keeper_belongs_to_the_host_that_its_worker_was_started_on() -> None:
    """The message may be read when the host is lost, and has another name in the next start."""
    launcher = Launcher(Plan(SMALL, "", None), HOSTS)
    ours, theirs = Pipe()
    launcher._ranks[ours], launcher._placed = 3, HOSTS
    launcher.hosts = ["a", "a", "b-again", "b-again"]
    theirs.send(("keeper", 0.0, 4321))
    assert launcher.receive(5.0) == [] and launcher.keepers == {"b": 4321}


THREADS = """
import os
os.environ.pop("OPENBLAS_NUM_THREADS", None), os.environ.pop("OMP_NUM_THREADS", None)
from torchrelay.demo import launcher

def report(end):
    from tests.support.threads_here import COUNT
    end.send(COUNT)

if __name__ == "__main__":
    launcher.AHEAD.append("tests.support.threads_here")
    launcher.import_ahead()
    ours, theirs = launcher._forks.Pipe()
    launcher._forks.Process(target=report, args=(theirs,)).start()
    print(ours.recv())
"""


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2 or sys.platform != "linux", reason="one core: no threads"
)
def test_workers_are_forked_off_a_process_of_one_thread(tmp_path: Path) -> None:
    """Else a worker may begin with a lock that a thread held which is not there."""
    (tmp_path / "program.py").write_text(THREADS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "program.py"],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert done.stdout.split() == ["1"], done.stderr
