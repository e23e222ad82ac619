"""The `torchrelay` commands on checkpoints, run as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import torchrelay as tr
from tests.support.commands import command
from torchrelay.cli.output import in_words, wrong
from torchrelay.dropin.stock_dcp import read_stock


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with tr.Checkpointer(tmp_path / "run") as held:
        for step in (1, 2):
            held.save(step, {"model": {"w": torch.full((3, 4), float(step))}, "step": step})
    return tmp_path / "run"


def test_ls_inspect_and_verify(place: Path) -> None:
    listing = command("ls", place)
    assert listing.returncode == 0 and "whole" in listing.stdout
    assert "2 steps, " in listing.stdout
    shown = command("inspect", place, "--step", 1)
    assert "model.w" in shown.stdout and "3x4" in shown.stdout
    assert "48 bytes" in shown.stdout and "step 1: 1 tensor, 48 bytes" in shown.stdout
    assert command("verify", place).stdout.strip() == "step 2 verifies"
    file = place / "step-2" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    broken = command("verify", place)
    assert broken.returncode == 1 and "step 2 is damaged" in broken.stdout
    assert "model.w" in broken.stdout
    for look in (["inspect", place, "--stats"], ["diff", place / "step-1", place, "--values"]):
        shown = command(*look)
        assert shown.returncode == (2 if look[0] == "diff" else 1) and not shown.stdout
        assert "are not those written" in shown.stderr and "model.w" in shown.stderr
    every = command("verify", place, "--all")
    assert every.returncode == 1
    assert every.stdout.startswith("step 1 verifies\nstep 2 is damaged: ")
    for source, target in product((place, place / "step-2"), ("out.safetensors", "out.pt", "out")):
        refused = command("convert", source, place.parent / target)
        assert refused.returncode == 1 and "are not those written" in refused.stderr
        assert not (place.parent / target).exists()
    refused = command("export-hf", place, place.parent / "hf")
    assert refused.returncode == 1 and refused.stderr.startswith("error: model.safetensors bytes")


def test_looking_leaves_drafts_alone(place: Path) -> None:
    draft = place / "step-9.tmp-elsewhere-1-abcdef01"
    draft.mkdir()
    command("ls", place)
    assert draft.exists()


def test_convert_to_every_kind_and_back(place: Path, tmp_path: Path) -> None:
    for kind, target in (("torch", "file.pt"), ("dcp", "dcp")):
        there = command("convert", place, tmp_path / target, "--to", kind)
        assert there.returncode == 0, there.stderr
        back = command("convert", tmp_path / target, tmp_path / f"from-{kind}", "--step", 5)
        assert back.returncode == 0, back.stderr
        with tr.Checkpointer(tmp_path / f"from-{kind}") as held:
            got = held.load(step=5).state
        assert torch.equal(got["model"]["w"], torch.full((3, 4), 2.0)) and got["step"] == 2
    assert torch.equal(torch.load(tmp_path / "file.pt")["model"]["w"], torch.full((3, 4), 2.0))
    (tmp_path / "new").mkdir()
    done = command("convert", tmp_path / "file.pt", tmp_path / "new" / "m.safetensors")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["m.safetensors"]
    assert load_file(tmp_path / "new" / "m.safetensors").keys() == {"model.w"}
    lost = command("convert", tmp_path / "file.pt", tmp_path / "no" / "m.safetensors")
    assert lost.returncode == 1 and lost.stderr.startswith("error: cannot be written: No such file")
    assert read_stock(tmp_path / "dcp")["step"] == 2


def test_a_target_says_by_its_name_what_it_is(place: Path, tmp_path: Path) -> None:
    for name, first in (("m.safetensors", b"{"), ("m.pt", b"PK")):
        assert command("convert", place, tmp_path / name).returncode == 0
        data = (tmp_path / name).read_bytes()
        assert first in data[:9]
    for act in ("inspect", "verify"):
        found = command(act, tmp_path / "m.pt")
        assert found.returncode == 1 and "is a torch.save file" in found.stderr
    torch.save(torch.nn.Linear(1, 1), tmp_path / "object.pt")
    found = command("convert", tmp_path / "object.pt", tmp_path / "other")
    assert found.returncode == 1 and "it has torch.nn.modules.linear.Linear in it" in found.stderr
    assert "it is one itself" in command("ls", place / "step-1").stderr


def test_convert_refuses_what_is_not_there(tmp_path: Path) -> None:
    found = command("convert", tmp_path / "nothing", tmp_path / "target")
    assert found.returncode == 1 and "no checkpoint there" in found.stderr


def test_export_hf(place: Path, tmp_path: Path) -> None:
    done = command("export-hf", place, tmp_path / "hf", "--step", 1)
    assert done.returncode == 0, done.stderr
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["w"], torch.ones(3, 4))
    again = command("export-hf", place, tmp_path / "hf")
    assert again.returncode == 1 and "not overwritten" in again.stderr


def test_the_listing_of_a_damaged_record_is_a_table_and_status_1(tmp_path: Path) -> None:
    # The path of the file is in the error's text, in brackets: it is not markup.
    root = tmp_path / "a[bold]b[" / "run"
    with tr.Checkpointer(root) as there:
        for step in (1, 2):
            there.save(step, {"x": torch.ones(2)})
    (root / "step-2" / "manifest.json").write_text("{}")
    listing = command("ls", root)
    assert listing.returncode == 1 and listing.stderr == ""
    assert "whole" in listing.stdout and "damaged: manifest.json" in listing.stdout
    watched = command("watch", root, "--until", 2, "--timeout", 60)
    assert watched.returncode == 1 and "step 2 is damaged: manifest.json" in watched.stdout
    assert command("watch", root, "--until", 1, "--timeout", 60).returncode == 0
    (one, two) = json.loads(command("ls", root, "--json").stdout)
    assert one["damage"] is None and one["bytes"] > 0 and one["ranks"] == 1
    assert two["step"] == 2 and "manifest.json" in two["damage"]


@pytest.mark.parametrize("name", ["ls", "inspect", "verify"])
def test_a_place_without_steps_is_an_error_of_one_line(name: str, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nothing"):
        found = command(name, place)
        assert found.returncode == 1
        (line,) = found.stderr.splitlines()
        assert line.startswith("error: ") and str(place) in line
    assert not (tmp_path / "nothing").exists()


def test_rm_asks_first_and_removes_all_or_nothing(place: Path) -> None:
    absent = command("rm", place, 1, 7)
    assert absent.returncode == 1 and "existing: 1, 2" in absent.stderr
    assert command("rm", place, 1, answer="n\n").returncode == 1
    assert json.loads(command("verify", place, "--all", "--json").stdout) == [
        {"step": 1, "damage": None, "unread": None},
        {"step": 2, "damage": None, "unread": None},
    ]
    assert command("rm", place, 1, answer="y\n").returncode == 0
    assert command("rm", place, 2, "--yes").stdout == "removed step 2\n"
    assert not list(place.glob("step-*"))


def test_rollback_asks_before_it_deletes(place: Path) -> None:
    assert command("rollback", place, 7).returncode == 1
    refused = command("rollback", place, 1, answer="n\n")
    assert refused.returncode == 1 and f"Delete step 2 of {place}?" in refused.stdout
    assert sorted(child.name for child in place.iterdir()) == ["step-1", "step-2"]
    assert command("rollback", place, 1).returncode == 1, "no answer is not a yes"
    done = command("rollback", place, 1, answer="y\n")
    assert done.returncode == 0 and done.stdout.endswith("deleted step 2\n")
    assert [child.name for child in place.iterdir()] == ["step-1"]
    assert command("rollback", place, 1).stdout == "nothing to delete: 1 is the newest step\n"


def test_rollback_asks_nothing_with_yes(place: Path) -> None:
    with tr.Checkpointer(place) as held:
        held.save(3, {"step": 3})
    assert command("rollback", place, 1, "--yes").stdout == "deleted steps 2, 3\n"
    assert command("rm", place).returncode == 2, "which step?"


def test_one_thing_is_not_told_in_the_plural(place: Path, tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path / "one") as held:
        held.save(1, {"model": {"w": torch.ones(2), "b": torch.ones(1)}, "step": 1})
    shown = command("inspect", place, "--step", 1).stdout
    assert "step 1: 1 tensor, 48 bytes, 1 value; 1 file\n" in shown
    assert "2 tensors" in command("inspect", tmp_path / "one").stdout
    assert "1 step, " in command("ls", tmp_path / "one").stdout
    made = command("convert", place, tmp_path / "m.safetensors")
    assert "1 tensor, " in made.stdout and "1 value left out" in made.stderr
    same = command("diff", place / "step-1", place / "step-2").stdout
    assert "1 tensor has the same shape" in same
    apart = command("diff", place / "step-1", place / "step-2", "--values").stdout
    assert "1 of 1 tensor\n" in apart


def test_ls_does_not_import_torch(place: Path) -> None:
    program = (
        "import sys; from torchrelay.cli import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "ls", str(place)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "2 steps" in done.stdout and done.stderr == "False\n"


def test_damage_is_told_by_the_kind_of_error_not_by_its_words() -> None:
    damaged = wrong(tr.errors.DamagedError("cannot be read: Is a directory", step=1))
    assert in_words(damaged) == "damaged: cannot be read: Is a directory (step 1)"
    late = wrong(tr.errors.StorageTimeoutError("the storage does not answer", step=1))
    assert late["damage"] is None
    assert in_words(late) == "not checked: the storage does not answer (step 1)"
    assert in_words({"damage": None, "unread": None}) == ""


def test_inspect_as_json(place: Path) -> None:
    found = json.loads(command("inspect", place, "--json").stdout)
    assert found["step"] == 2 and found["bytes"] == 48
    (tensor,) = found["tensors"]
    assert tensor["name"] == "model.w" and tensor["shape"] == [3, 4] and tensor["bytes"] == 48


def test_messages_name_options_and_no_python(place: Path, tmp_path: Path) -> None:
    there = command("convert", place, tmp_path / "other")
    assert there.returncode == 0, there.stderr
    again = command("convert", place, tmp_path / "other")
    assert again.returncode == 1 and "--step" in again.stderr and "=True" not in again.stderr
    lower = command("convert", place, tmp_path / "other", "--step", 1)
    assert lower.returncode == 1 and "higher --step" in lower.stderr
    assert "rollback(" not in lower.stderr
    wrong = command("export-hf", place, tmp_path / "hf", "--key", "modl")
    assert wrong.returncode == 1 and "model, step" in wrong.stderr and "--key" in wrong.stderr
    assert not (tmp_path / "hf").exists()
    assert "config.json" in command("export-hf", place, tmp_path / "hf").stderr


def test_help_and_version_import_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from torchrelay.cli import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    for option, says in [("--help", "export-hf"), ("--version", tr.__version__)]:
        done = subprocess.run(
            [sys.executable, "-c", program, option], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 and says in done.stdout
        assert done.stderr.strip() == "[]"
    module = [sys.executable, "-m", "torchrelay", "--version"]
    done = subprocess.run(module, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and tr.__version__ in done.stdout


def test_shell_completion(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from torchrelay.cli import main; main()"],
        env={
            **os.environ,
            "_TORCHRELAY_COMPLETE": "complete_bash",
            "COMP_WORDS": "torchrelay ver",
            "COMP_CWORD": "1",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "verify" in done.stdout
