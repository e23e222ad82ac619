"""Commands that look at steps and files answer without importing torch, which takes two seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchrelay as tr

PROGRAM = """
import json, sys
from torchrelay.cli import main
sys.argv = ["torchrelay", *sys.argv[1:]]
code = 0
try:
    main()
except SystemExit as end:
    code = end.code
print(json.dumps([code, "torch" in sys.modules]), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("steps")
    with tr.Checkpointer(root) as checkpointer:
        for step in (1, 2):
            state = {"w": torch.arange(5000.0) * step, "none": torch.zeros(0)}
            checkpointer.save(step, {"model": state, "step": step})
    return root


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (["ls", "{}"], 0, "2 steps"),
        (["ls", "{}", "--verify"], 0, "verified"),
        (["inspect", "{}"], 0, "step 2: 2 tensors"),
        (["inspect", "{}/step-1", "--stats"], 0, "norm"),
        (["inspect", "{}/step-1", "--shards", "--json"], 0, '"dtype": "float32"'),
        (["inspect", "{}/step-1/model.safetensors"], 0, "2 tensors"),
        (["verify", "{}"], 0, "step 2 verifies"),
        (["verify", "{}", "--all"], 0, "step 1 verifies"),
        (["diff", "{}/step-1", "{}/step-2"], 1, "1 changed"),
        (["diff", "{}/step-1", "{}/step-2", "--values"], 1, "values differ in 1 of 2"),
        (["diff", "{}/step-1", "{}/step-1"], 0, "0 changed"),
        (["copy", "{}", "{}/copies"], 0, "copies/step-2: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_they_import_no_torch(place: Path, command: list[str], code: int, says: str) -> None:
    words = [word.format(place) for word in command]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    ended, torch_imported = json.loads(done.stderr.splitlines()[-1])
    assert (ended or 0) == code and says in done.stdout, done.stdout + done.stderr
    assert not torch_imported
