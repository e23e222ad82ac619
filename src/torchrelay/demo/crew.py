"""The parent's hold on its processes: start them, hear them, end them."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing import connection, get_context
from typing import Any

from torchrelay.demo import rank as child
from torchrelay.demo.job import Settings

Listener = Callable[[int, Any], None]


class CrewError(Exception):
    """A process failed, died or was late."""


class Workers:
    """Four spawned ranks; no wait lasts past the deadline in the settings."""

    def __init__(self, settings: Settings) -> None:
        self._deadline = time.monotonic() + settings.seconds
        self._scratch = tempfile.mkdtemp(prefix="torchrelay-demo-")
        self._heard: list[list[tuple[str, Any]]] = [[] for _ in range(child.WORLD)]
        self._conns = []
        self._processes = []
        spawn = get_context("spawn")
        for rank in range(child.WORLD):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=child.main, args=(theirs, rank, self._scratch, settings), daemon=True
            )
            process.start()
            theirs.close()
            self._conns.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        for conn in self._conns:
            with suppress(OSError):
                conn.send("leave")
        for process in self._processes:
            process.join(2 if kind is None else 0)  # after a failure nobody listens
            process.kill()
            process.join(5)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def hear(
        self,
        word: str,
        ranks: Collection[int] = range(child.WORLD),
        progress: Listener | None = None,
    ) -> list[Any]:
        """The next report of that word from each of the ranks."""
        values: dict[int, Any] = {}
        while len(values) < len(ranks):
            for rank in ranks:
                if rank not in values and (found := self._next(rank, word)) is not None:
                    values[rank] = found[1]
            if len(values) < len(ranks):
                self._listen([rank for rank in ranks if rank not in values], word, progress)
        return [values[rank] for rank in ranks]

    def _next(self, rank: int, word: str) -> tuple[str, Any] | None:
        for index, report in enumerate(self._heard[rank]):
            if report[0] == word:
                return self._heard[rank].pop(index)
        return None

    def _listen(self, ranks: list[int], word: str, progress: Listener | None) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise CrewError(f"gave up: ranks {ranks} did not report {word!r} in time")
        for ready in connection.wait(self._conns, timeout=left):
            rank = next(r for r, conn in enumerate(self._conns) if conn is ready)
            try:
                report = self._conns[rank].recv()
            except (EOFError, OSError):
                raise CrewError(f"rank {rank} died") from None
            if report[0] == "failed":
                raise CrewError(f"rank {rank} failed:\n{report[1]}")
            if report[0] != "progress":
                self._heard[rank].append(report)
            elif progress is not None:
                progress(rank, report[1])
