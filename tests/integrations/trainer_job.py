"""A small model trained by Hugging Face's `Trainer`: one rank of a job.

Prints `step LOSS` lines as JSON to a file. With `--die-at N` it kills itself after step N.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from torchrelay.integrations.transformers import RelayCallback


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, count: int) -> None:
        draw = torch.Generator().manual_seed(3)
        self.rows = torch.randint(0, 64, (count, 16), generator=draw)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        return {"input_ids": row, "labels": row}


class Written(TrainerCallback):  # type: ignore[misc]
    """Each rank's own losses, and an end in the middle."""

    def __init__(self, file: Path, die_at: int | None, relay: RelayCallback) -> None:
        self.file, self.die_at, self.relay = file, die_at, relay

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            with self.file.open("a") as out:
                out.write(json.dumps([state.global_step, logs["loss"]]) + "\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.die_at:
            self.relay.checkpointer.wait(60)  # so that it is known which step is resumed
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("--name", required=True)
    options.add_argument("--die-at", type=int)
    options.add_argument("--stop-at", type=int)
    given = options.parse_args()
    args = TrainingArguments(
        output_dir=str(given.folder / "out"),
        per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")),
        num_train_epochs=3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        learning_rate=1e-3,
    )
    rank = int(os.environ.get("RANK", "0"))
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    torch.manual_seed(1)
    model = GPT2LMHeadModel(config)
    relay = RelayCallback(given.folder / "steps", every=2, timeout=60)
    written = Written(given.folder / f"{given.name}-{rank}.json", given.die_at, relay)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Texts(20),
        eval_dataset=Texts(4),
        callbacks=[relay, written],
    )
    trainer.train(resume_from_checkpoint=relay.checkpoint)
    torch.save(trainer.model.state_dict(), given.folder / f"{given.name}-{rank}.pt")


main()
