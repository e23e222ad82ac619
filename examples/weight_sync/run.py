"""Four trainers, and two samplers that write text with the newest weights of the trainers.

python examples/weight_sync/run.py

The trainers (FSDP2) publish a version of their weights every few steps. The samplers (tensor-
parallel) take the newest one, write a text with it, and look for the next. A sampler is killed and
comes back with the newest version. Then a trainer is killed: the samplers keep the version that
they have, until the trainers have resumed from a checkpoint and publish a newer one.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from sampler import sample
from trainer import train
from workers import Workers


class Run:
    """The processes, and what they have done so far."""

    def __init__(self, folder: str, seconds: float) -> None:
        self.trainers, self.samplers = Workers(train, 4, folder), Workers(sample, 2, folder)
        self.newest = 0  # step of the trainers
        self.resuming = False
        self.versions: dict[int, int] = {}  # by sampler, since its start
        self._end = time.monotonic() + seconds

    def watch(self, until: Callable[[], bool]) -> None:
        """Show what happens, until something has."""
        while not until():
            if time.monotonic() > self._end:
                raise TimeoutError("it took too long: give a larger --seconds")
            wait([*self.trainers.connections.values(), *self.samplers.connections.values()], 1)
            for _, step, loss, digest in self.trainers.heard():
                self._trained(step, loss, digest)
            for rank, version, digest, nbytes, text in self.samplers.heard():
                if rank not in self.versions and self.samplers.starts > 1:
                    show(f"sampler {rank} is back with version {version}")
                self.versions[rank] = version
                show(f"sampler {rank} version {version} ({digest}, {nbytes} bytes): {text!r}")

    def _trained(self, step: int, loss: float | None, digest: str) -> None:
        if self.resuming:
            show(f"trainers are back at step {step}")
        self.resuming = False
        self.newest = max(self.newest, step)
        if loss is not None:
            show(f"trainers step {step} loss {loss:.4f}")
        if digest:
            show(f"trainers version {step} ({digest})")

    def sampled(self, version: int) -> bool:
        """Whether all samplers have written text with this version or a later one."""
        found = self.versions.values()
        return len(found) == self.samplers.world and min(found) >= version

    def play(self, steps: int, training: tuple[Any, ...], sampling: tuple[Any, ...]) -> None:
        self.trainers.start(*training, None)
        self.samplers.start(*sampling)
        self.watch(lambda: self.sampled(steps // 3))

        self.samplers.kill(1)
        show("sampler 1 was killed")
        self.samplers.end()
        self.versions.clear()
        self.samplers.start(*sampling)
        self.watch(lambda: self.sampled(2 * steps // 3))

        self.trainers.kill(2)
        for _, *words in self.trainers.end():
            self._trained(*words)
        show("trainer 2 was killed")
        self.resuming = True
        self.trainers.start(*training, self.newest + max(1, steps // 3))
        self.watch(lambda: not self.samplers.connections)  # they end with the last version
        for connection in self.trainers.connections.values():
            connection.send("end")
        self.watch(lambda: not self.trainers.connections)


def show(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=60, help="the fewest steps that are trained")
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--length", type=int, default=40, help="characters of a text")
    options.add_argument("--network", action="store_true", help="read as from another host")
    options.add_argument("--seconds", type=float, default=300, help="after which it gives up")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, socket.socket() as port:
        # It is reserved: trainers that come back have the address that they had.
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{port.getsockname()[1]}"
        run = Run(folder, given.seconds)
        try:
            training = (given.layers, f"{folder}/steps", address)
            sampling = (given.layers, f"http://{address}", given.network, given.length)
            run.play(given.steps, training, sampling)
        finally:
            run.trainers.end()
            run.samplers.end()
    show("done")
