"""A small language model trained by Hugging Face's `Trainer` with torchrelay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from tests.support.framework_jobs import Losses, die, run_phases, save_weights
from torchrelay.integrations.transformers import RelayCallback

EPOCHS, STEPS, EVERY = 3, 15, 2


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, count: int) -> None:
        draw = torch.Generator().manual_seed(3)
        self.rows = torch.randint(0, 64, (count, 16), generator=draw)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Watched(TrainerCallback):  # type: ignore[misc]
    """Writes losses, and ends the process in the middle."""

    def __init__(self, losses: Losses, die_at: int | None, relay: RelayCallback) -> None:
        self.losses, self.die_at, self.relay = losses, die_at, relay

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.losses.add(state.global_step, logs["loss"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.die_at:
            self.relay.checkpointer.wait(60)  # so that the step to resume from is known
            die()


def settings(folder: Path, **others: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")),
        num_train_epochs=EPOCHS,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        learning_rate=1e-3,
        # The evaluation uses random numbers, at steps that are saved and at others.
        **{"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 3, **others},
    )


def model() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    )


def train(folder: Path, name: str, die_at: int | None) -> None:
    args = settings(folder)
    relay = RelayCallback(folder / "steps", every=EVERY, timeout=60)
    watched = Watched(Losses(folder, name), die_at, relay)
    trainer = Trainer(
        model=model(),
        args=args,
        train_dataset=Texts(20),
        eval_dataset=Texts(4),
        callbacks=[relay, watched],
    )
    trainer.train(resume_from_checkpoint=relay.checkpoint)
    save_weights(folder, name, trainer.model.state_dict())


if __name__ == "__main__":
    run_phases(train)
