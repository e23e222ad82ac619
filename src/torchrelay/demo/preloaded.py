"""What workers are forked off with: torch, and what it imports when it is first used."""

from __future__ import annotations

import torch

import torchrelay.demo.worker  # noqa: F401

torch.optim.AdamW([torch.zeros(1)])  # brings torch's compiler along, which takes seconds
