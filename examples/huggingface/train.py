"""Train with Hugging Face's Trainer; the lines marked `# +` are what torchrelay needs.

torchrun --standalone --nproc-per-node 2 examples/huggingface/train.py --folder run

Kill it and start it again, on the same or another number of ranks: it continues where it was.
"""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from torchrelay.integrations.transformers import RelayCallback  # +


class Texts(torch.utils.data.Dataset):
    """Numbers that count up, from random beginnings."""

    def __init__(self, count: int) -> None:
        begin = torch.randint(0, 64, (count, 1), generator=torch.Generator().manual_seed(0))
        self.rows = (begin + torch.arange(16)) % 64

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main(folder: str, steps: int) -> None:
    args = TrainingArguments(
        output_dir=f"{folder}/out",
        max_steps=steps,
        per_device_train_batch_size=8,
        logging_steps=10,
        save_strategy="no",  # +
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        learning_rate=1e-3,
    )
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    relay = RelayCallback(f"{folder}/steps", every=10, keep=3)  # +
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=Texts(800),
        callbacks=[relay],  # +
    )
    trainer.train(resume_from_checkpoint=relay.checkpoint)  # +


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--folder", required=True, help="where steps are saved")
    options.add_argument("--steps", type=int, default=100)
    given = options.parse_args()
    main(given.folder, given.steps)
