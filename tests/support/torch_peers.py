"""Two ranks of one group, each run by an interpreter of its own, as one of another torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
CALL_SECONDS = 100.0
"""How long a call may take; starting an interpreter with torch is part of the first."""


class PeerFailedError(Exception):
    """A call failed, or was not answered. The message has what both ranks said."""


class Peers:
    """The two ranks. `call(how rank 0 calls, how rank 1 does)` returns what each returned."""

    def __init__(self, pythons: Sequence[str]) -> None:
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self._said = [tempfile.TemporaryFile("w+") for _ in pythons]  # noqa: SIM115
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        self._ranks = [
            subprocess.Popen(
                [python, "-m", "tests.support.torch_peer", str(rank), str(self._store.port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said[rank],
                text=True,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
            for rank, python in enumerate(pythons)
        ]

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait(20)
            # Not `communicate`: a process that a rank has started may keep its output open.
            for pipe in (rank.stdin, rank.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        for said in self._said:
            said.close()

    @property
    def alive(self) -> bool:
        return all(rank.poll() is None for rank in self._ranks)

    def both(self, call: str, **arguments: Any) -> list[Any]:
        """The same call on both ranks."""
        return self.call(*[{"call": call, **arguments}] * 2)

    def call(self, *calls: dict[str, Any]) -> list[Any]:
        """A call on each rank, at once. Ranks that failed are of no use after it."""
        for rank, call in zip(self._ranks, calls, strict=True):
            try:
                print(json.dumps(call), file=rank.stdin, flush=True)
            except BrokenPipeError:
                continue  # its answer says so
        # A rank that does not answer ends here, and so does reading from it.
        late = threading.Timer(CALL_SECONDS, self._kill)
        late.start()
        try:
            lines = [rank.stdout.readline() for rank in self._ranks if rank.stdout is not None]
        finally:
            late.cancel()
        answers = [json.loads(line) if line else {"failed": "no answer"} for line in lines]
        if any("failed" in answer for answer in answers):
            self._kill()
            texts = [answer.get("failed", "it returned") for answer in answers]
            raise PeerFailedError("\n\n".join(self._texts(texts)))
        return [answer["returned"] for answer in answers]

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def _texts(self, failures: Sequence[str]) -> Iterator[str]:
        for rank, failure in enumerate(failures):
            self._said[rank].seek(0)
            yield f"rank {rank}: {failure}\n{self._said[rank].read()[-3000:]}"
