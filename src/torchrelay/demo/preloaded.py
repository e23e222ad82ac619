"""Modules that are imported before workers are forked: torch, and its own late imports."""

from __future__ import annotations

import torch

import torchrelay.demo.worker  # noqa: F401

torch.optim.AdamW([torch.zeros(1)])  # brings torch's compiler along, which takes seconds
