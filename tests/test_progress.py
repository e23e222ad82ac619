"""A progress function of the caller: one thread at a time calls it, and `done` never falls."""

from __future__ import annotations

import threading

import pytest

from torchrelay.progress import Progress, reporter


class Watched:
    """A progress function that notices a second thread in it."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.inside = 0
        self.most_inside = 0
        self.entered, self.go_on = threading.Event(), threading.Event()

    def __call__(self, progress: Progress) -> None:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        self.entered.set()
        assert self.go_on.wait(60)
        self.seen.append(progress.done)
        self.inside -= 1


def test_one_thread_at_a_time_and_never_back() -> None:
    watched = Watched()
    report = reporter(watched)
    calls = [threading.Thread(target=report, args=(done, 100), daemon=True) for done in (50, 20)]
    calls[0].start()
    assert watched.entered.wait(60)
    calls[1].start()  # a thread that counted before the other, and reports after it
    calls[1].join(0.2)
    watched.go_on.set()
    for call in calls:
        call.join(60)
    for done in (0, 60, 40, 60, 100):
        report(done, 100)
    assert watched.seen == [50, 60, 60, 100] and watched.most_inside == 1


def test_a_function_that_raises_is_called_again() -> None:
    seen = []

    def show(progress: Progress) -> None:
        seen.append(progress.done)
        if progress.done == 1:
            raise RuntimeError

    report = reporter(show)
    with pytest.raises(RuntimeError):
        report(1, 2)
    report(2, 2)
    assert seen == [1, 2]
