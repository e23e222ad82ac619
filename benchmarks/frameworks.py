"""How long a save keeps training waiting: a framework's own, and torchrelay's in the background.

`python -m benchmarks.frameworks`: one process, a model of `--megabytes` with AdamW; a framework's
own checkpoint and the one of its integration in turn, in the same place. The time is that of the
call that training waits for; torchrelay's save is complete before the next lap begins.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.harness import machine, save

RESULT = Path(__file__).parent / "results" / "frameworks.json"
WIDTH = 1024

Lap = Callable[[Path, int], None]  # a save, as training waits for it


def model_of(megabytes: int) -> nn.Module:
    """Layers of 4 MiB each. With AdamW's state a checkpoint has three times their bytes."""
    layers = max(1, megabytes * 10**6 // (3 * 4 * WIDTH**2))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@contextmanager
def accelerate_sides(folder: Path, megabytes: int) -> Iterator[dict[str, Lap]]:
    from accelerate import Accelerator

    from torchrelay.integrations.accelerate import use_torchrelay

    model = model_of(megabytes)
    plain, relayed = Accelerator(cpu=True), Accelerator(cpu=True)
    prepared = plain.prepare(model, trained(model))
    relayed._models, relayed._optimizers = [prepared[0]], [prepared[1]]
    relay = use_torchrelay(relayed, folder / "steps", keep=1)
    relay.checkpointer.prepare(relay._state())

    def ours(_: Path, lap: int) -> None:
        relayed.save_state(f"step_{lap}")

    yield {
        "its own": lambda place, lap: plain.save_state(str(place)) and None,
        "torchrelay": ours,
        "wait": lambda place, lap: relay.checkpointer.wait(600),
    }
    relay.checkpointer.close()


@contextmanager
def lightning_sides(folder: Path, megabytes: int) -> Iterator[dict[str, Lap]]:
    import lightning as L

    from torchrelay.integrations.lightning import RelayCheckpointIO

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model_of(megabytes)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return sum(p.sum() for p in self.parameters())  # type: ignore[return-value]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def fitted(**options: Any) -> L.Trainer:
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        trainer.fit(Module(), torch.utils.data.DataLoader([0]))
        return trainer

    relay = RelayCheckpointIO()
    own, relayed = fitted(), fitted(plugins=[relay])
    yield {
        "its own": lambda place, lap: own.save_checkpoint(place.with_suffix(".ckpt")),
        "torchrelay": lambda place, lap: relayed.save_checkpoint(folder / "links" / "last.ckpt"),
        "wait": lambda place, lap: relay.links.settle(),
    }
    relay.teardown()


@contextmanager
def trainer_sides(folder: Path, megabytes: int) -> Iterator[dict[str, Lap]]:
    from transformers import Trainer, TrainingArguments

    from torchrelay.integrations.transformers import RelayCallback

    args = TrainingArguments(str(folder / "out"), use_cpu=True, report_to=[], save_strategy="no")
    model = model_of(megabytes)
    optimizer = trained(model)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    relay = RelayCallback(folder / "steps", every=1, keep=1)
    trainer = Trainer(model, args, optimizers=(optimizer, schedule), callbacks=[relay])
    kept = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule}

    def ours(_: Path, lap: int) -> None:
        trainer.state.global_step = lap
        relay._save(trainer.state, kept)

    yield {
        "its own": lambda place, lap: trainer._save_checkpoint(model, trial=None),
        "torchrelay": ours,
        "wait": lambda place, lap: relay.checkpointer.wait(600),
    }
    relay.checkpointer.close()


FRAMEWORKS = {
    "accelerate": accelerate_sides,
    "lightning": lightning_sides,
    "transformers": trainer_sides,
}


def measure(name: str, megabytes: int, laps: int) -> dict[str, list[float]]:
    folder = Path(tempfile.mkdtemp(prefix="torchrelay-bench-"))
    found: dict[str, list[float]] = {"its own": [], "torchrelay": []}
    try:
        with FRAMEWORKS[name](folder, megabytes) as sides:
            for lap in range(laps + 1):
                for side, seconds in found.items():
                    place = folder / f"{side}-{lap}".replace(" ", "-")
                    begun = time.perf_counter()
                    sides[side](place, lap + 1)
                    seconds.append(time.perf_counter() - begun)
                    sides["wait"](place, lap)
                    shutil.rmtree(place, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {side: seconds[1:] for side, seconds in found.items()}  # the first warms up


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frameworks", description=__doc__)
    parser.add_argument("--only", default=",".join(FRAMEWORKS), help="frameworks, with commas")
    parser.add_argument("--megabytes", type=int, default=1500, help="of a checkpoint")
    parser.add_argument("--laps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args(words)
    results = {}
    print(f"{'framework':14} {'its own':>10} {'torchrelay':>11} {'shorter':>8}")
    for name in given.only.split(","):
        found = measure(name, given.megabytes, given.laps)
        own, ours = median(found["its own"]), median(found["torchrelay"])
        results[name] = {**found, "ratio": own / ours}
        print(f"{name:14} {own:9.3f}s {ours:10.3f}s {own / ours:7.1f}x", flush=True)
    save({"machine": machine(), "megabytes": given.megabytes, "frameworks": results}, given.out)


if __name__ == "__main__":
    main(sys.argv[1:])
