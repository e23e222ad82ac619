"""Four trainers and two samplers: the samplers write text with the weights of the trainers.

python examples/weight_sync/run.py

The trainers (FSDP2) publish a version of their weights every few steps. The samplers (tensor-
parallel) take the newest one, write a text with it, and look for the next. Then a sampler is killed
and comes back with the newest version. Then a trainer is killed: the samplers keep the version that
they have until the trainers, resumed from a checkpoint, publish a newer one.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
import time
from collections.abc import Callable

from sampler import sample
from trainer import train
from workers import Workers


class Run:
    """The state of the run so far."""

    def __init__(self, folder: str, seconds: float) -> None:
        self.trainers = Workers("trainer", train, 4, folder)
        self.samplers = Workers("sampler", sample, 2, folder)
        self.newest = 0  # step of the trainers
        self.versions: dict[int, int] = {}  # by sampler, since it was started
        self._end = time.monotonic() + seconds

    def watch(self, until: Callable[[], bool]) -> None:
        """Show what happens until something has."""
        while not until():
            if time.monotonic() > self._end:
                raise TimeoutError("it took too long: give a larger --seconds")
            for _, (word, step, *values) in self.trainers.hear(0.02):
                self._trainers_told(word, step, *values)
            for rank, (_, version, digest, nbytes, text) in self.samplers.hear(0.02):
                if rank not in self.versions and self.samplers.starts > 1:
                    show(f"sampler {rank} is back with version {version}")
                self.versions[rank] = version
                show(f"sampler {rank} version {version} ({digest}, {nbytes} bytes): {text!r}")

    def _trainers_told(self, word: str, step: int, value: object) -> None:
        if word == "step":
            self.newest = max(self.newest, step)
            show(f"trainers step {step} loss {value:.4f}")
            return
        if self.trainers.starts > 1 and self._resuming:
            show(f"trainers are back at step {step}")
        self._resuming = False
        show(f"trainers version {step} ({value})")

    def start_trainers(self, *words: object) -> None:
        self._resuming = True
        self.trainers.start(*words)

    def start_samplers(self, *words: object) -> None:
        self.versions.clear()
        self.samplers.start(*words)

    def sampled(self, version: int) -> bool:
        """Whether all samplers have written text with this version or a later one."""
        found = self.versions.values()
        return len(found) == self.samplers.world and min(found) >= version

    def end(self) -> None:
        self.trainers.end()
        self.samplers.end()


def show(line: str) -> None:
    print(line, flush=True)


def play(run: Run, folder: str, steps: int, network: bool, length: int) -> None:
    with socket.socket() as port:  # reserved: trainers that come back have the same address
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{port.getsockname()[1]}"
        steps_of = (f"{folder}/steps", address)
        reading = (f"http://{address}", network, length)

        run.start_trainers(*steps_of, None)
        run.start_samplers(*reading)
        run.watch(lambda: run.sampled(steps // 3))
        run.samplers.kill(1)
        show("sampler 1 was killed")
        run.samplers.end()  # its mesh is gone
        run.start_samplers(*reading)
        run.watch(lambda: run.sampled(2 * steps // 3))
        run.trainers.kill(2)
        show("trainer 2 was killed")
        run.trainers.end()
        run.start_trainers(*steps_of, run.newest + steps // 3)
        run.watch(lambda: run.samplers.done)  # they end with the last version
        run.trainers.dismiss()
        run.watch(lambda: run.trainers.done)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=120, help="train at least this many steps")
    options.add_argument("--length", type=int, default=40, help="characters of a text")
    options.add_argument("--network", action="store_true", help="read as from another host")
    options.add_argument("--seconds", type=float, default=300, help="give up after this many")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder, given.seconds)
        try:
            play(run, folder, given.steps, given.network, given.length)
        finally:
            run.end()
    show("done")
