"""`tr.options`: a value that is none is refused by its name, and nothing from inside is raised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr

WRONG: list[tuple[type[Any], str, Any]] = [
    (tr.options.CheckpointerOptions, "file_bytes", "x"),
    (tr.options.CheckpointerOptions, "memory_budget", 1.5),
    (tr.options.CheckpointerOptions, "signals", 5),
    (tr.options.ServeOptions, "hold_seconds", "x"),
    (tr.options.ServeOptions, "stall_seconds", None),
    (tr.options.ServeOptions, "connections", True),
    (tr.options.KeeperOptions, "memory_budget", "1 GiB"),
    (tr.options.KeeperOptions, "steps", 2.5),
    (tr.options.KeeperOptions, "copies", None),
    (tr.options.KeeperOptions, "copy_bytes_per_second", "x"),
    (tr.options.KeeperOptions, "lease_seconds", None),
]


@pytest.mark.parametrize(("kind", "name", "value"), WRONG)
def test_a_value_of_another_kind(kind: type[Any], name: str, value: Any) -> None:
    with pytest.raises(tr.errors.UsageError, match=f"{name} is .*{value}"):
        kind(**{name: value})


def test_records_of_another_call(tmp_path: Path) -> None:
    for options in (5, tr.options.PullOptions()):
        with pytest.raises(tr.errors.UsageError, match=r"tr\.options\.CheckpointerOptions"):
            tr.Checkpointer(tmp_path, no_dist=True, options=options)  # type: ignore[arg-type]
        with pytest.raises(tr.errors.UsageError, match=r"tr\.options\.RecoverOptions"):
            tr.recover([tmp_path], no_dist=True, options=options)  # type: ignore[arg-type]


def test_a_key_is_text(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path, no_dist=True) as ckpt:
        ckpt.save(1, {"w": torch.ones(2)})
        with pytest.raises(tr.errors.UsageError, match="key is a dotted path, not 5"):
            ckpt.load(key=5)  # type: ignore[arg-type]
