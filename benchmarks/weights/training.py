"""What an update sends in real training: `python -m benchmarks.weights.training`.

A small GPT with fp32 weights learns a text, then goes on with a learning rate of 1e-5, as in
reinforcement learning. Each step is published as bf16, and a subscriber takes it over TCP. The
figures of each step: the share of bf16 elements that changed, and the bytes that were sent.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

import torchrelay as tr
from benchmarks.harness import machine, save
from benchmarks.plot import plot_training
from examples.elastic.gpt import GPT, Text
from torchrelay.weights import Encoding

RESULT = Path(__file__).parents[1] / "results" / "weights-training.json"
FIRST_RATE, RATE = 1e-3, 1e-5


def measure(width: int, layers: int, first: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = GPT(width, layers)
    text = Text(0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=FIRST_RATE)
    for _ in range(first):
        _train(model, text, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = RATE
    into = {name: value.bfloat16() for name, value in model.state_dict().items()}
    before = {name: value.clone() for name, value in into.items()}
    count = sum(value.numel() for value in into.values())
    rows: list[dict[str, Any]] = []
    cast = Encoding(dtype=torch.bfloat16)
    with (
        tr.serve(model.state_dict(), step=0, no_dist=True, encoding=cast) as endpoint,
        tr.subscribe(endpoint.url, into=into, no_dist=True, same_host=False) as subscription,
    ):
        subscription.update()
        for step in range(1, steps + 1):
            loss = _train(model, text, optimizer)
            endpoint.publish(model.state_dict(), step=step).result(60)
            got = subscription.update(at_least=step)
            sent = sum(peer.bytes or 0 for peer in got.report.peers.values())
            changed = 0
            for name, value in model.state_dict().items():
                if not torch.equal(value.bfloat16(), into[name]):
                    raise SystemExit(f"step {step}, {name}: WRONG BITS")
                changed += int((before[name] != into[name]).sum())
                before[name].copy_(into[name])
            rows.append(
                {
                    "step": step,
                    "loss": round(loss, 4),
                    "changed": round(changed / count, 5),
                    "sent_bytes": sent,
                    "sent": round(sent / (2 * count), 5),
                }
            )
    return {
        "elements": count,
        "bytes": 2 * count,
        "learning_rate": RATE,
        "rows": rows,
        "median_changed": median(row["changed"] for row in rows),
        "median_sent": median(row["sent"] for row in rows),
    }


def _train(model: GPT, text: Text, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(text.batch())
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights.training")
    parser.add_argument("--small", action="store_true", help="tiny sizes: a test, not a figure")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = measure(32, 1, 2, 3) if options.small else measure(384, 6, 300, 60)
    print(f"{found['elements'] / 1e6:.1f} million elements, learning rate {RATE:g}")
    print(
        f"median of {len(found['rows'])} steps: {100 * found['median_changed']:.2f} % of the "
        f"elements changed, {100 * found['median_sent']:.2f} % of the bytes were sent"
    )
    result = {"benchmark": "weights training", "machine": machine(), **found}
    out: Path | None = options.out or (None if options.small else RESULT)
    save(result, out)
    if out is not None:
        plot_training(result, out.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
