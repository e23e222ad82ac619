"""Every kind of SOURCE is looked at by every command, and a wrong one is an error of one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import torchrelay as tr
from tests.support.commands import command
from tests.support.s3 import S3
from torchrelay.cli.commands.steps import listed
from torchrelay.cli.commands.watch import _events
from torchrelay.cli.commands.watched import WatchedPlaces
from torchrelay.stores.store import Store


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(6.0).reshape(2, 3) * step, "b": torch.ones(2, dtype=torch.bfloat16)}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with tr.Checkpointer(tmp_path / "run", no_dist=True) as there:
        for step in (1, 2):
            there.save(step, {"model": tensors(step), "lr": 0.1 * step})
    return tmp_path / "run"


def test_a_bucket_is_a_source_like_a_directory(s3: S3, place: Path, tmp_path: Path) -> None:
    url = s3.url("run")
    assert command("convert", place / "step-1", url, "--step", 1).returncode == 0
    assert json.loads(command("ls", url, "--json").stdout)[0]["step"] == 1
    assert command("verify", url).stdout == "step 1 verifies\n"
    assert command("diff", place / "step-1", f"{url}/step-1", "--values").returncode == 0
    shown = command("inspect", f"{url}/step-1", "--stats", "--json")
    (weight,) = (one for one in json.loads(shown.stdout)["tensors"] if one["name"] == "model.w")
    assert weight["stats"]["max"] == 5.0 and weight["stats"]["nan"] == 0
    file = tmp_path / "m.safetensors"
    assert command("convert", url, file, "--to", "safetensors").returncode == 0
    assert torch.equal(load_file(file)["model.w"], tensors(1)["w"])
    with tr.serve({"model": tensors(3)}, step=3, timeout=60) as endpoint:
        assert command("pull", endpoint.url, "-o", url).returncode == 0
    assert command("verify", url, "--step", 3).stdout == "step 3 verifies\n"


def test_nan_and_infinity_are_counted_and_json_stays_json(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file({"x": torch.tensor([float("nan"), float("inf"), -2.0]), "n": torch.ones(0)}, file)
    found = json.loads(command("inspect", file, "--stats", "--json").stdout)
    (x,) = (one for one in found["tensors"] if one["name"] == "x")
    assert x["stats"] == {
        "norm": 2.0, "mean": -2.0, "min": -2.0, "max": -2.0, "zeros": 0, "nan": 1, "inf": 1,
    }  # fmt: skip
    assert "1 NaN, 1 infinite" in command("inspect", file, "--stats").stdout


def test_a_tied_tensor_and_values_that_differ_by_rank_are_shown(tmp_path: Path) -> None:
    weight = torch.ones(2, 2)
    with tr.Checkpointer(tmp_path / "run", no_dist=True) as there:
        there.save(1, {"model": {"wte": weight, "head": weight}, "text": "x" * 500, "empty": {}})
    shown = command("inspect", tmp_path / "run").stdout
    assert "head  = model.wte" in shown and "1 tensor, 16 bytes" in shown
    assert max(map(len, shown.splitlines())) < 130


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["inspect", "{}/nothing"], "has no state"),
        (["inspect", "{}/run/step-9"], "it has 1, 2"),
        (["inspect", "{}/run/step-1", "--step", "2"], "leave out --step"),
        (["inspect", "{}/text.safetensors"], "no valid .safetensors file"),
        (["inspect", "{}/run", "--include", "modle.*"], "the state has model"),
        (["verify", "{}/text.safetensors", "--all"], "is one state"),
        (["diff", "{}/run", "{}/nothing"], "has no state"),
        (["ls", "http://127.0.0.1:1"], "inspect it, watch it"),
        (["pull", "ftp://host", "-o", "{}/x"], "http://HOST:PORT"),
        (["pull", "http://user:secret@127.0.0.1:1", "-o", "{}/x"], "nothing else"),
        (["serve", "{}/run", "--follow", "--step", "1"], "--follow"),
        (["serve", "{}/run", "--address", "0.0.0.0:0"], "give a token"),
        (["watch", "http://127.0.0.1:1", "http://127.0.0.1:2"], "one endpoint"),
        (["watch", "{}/run", "--page", "--address", "0.0.0.0:0"], "give a token"),
        (["convert", "{}/run", "{}/y", "--include", "model.*"], "--include"),
        (["inspect", "{}/hf"], "see torchrelay inspect {}/hf/model-1.safetensors"),
        (["convert", "{}/hf", "{}/y"], "see torchrelay inspect {}/hf/model-1.safetensors"),
        (["ls", "{}/dcp"], "it is a DCP directory, see torchrelay inspect {}/dcp"),
        (["verify", "{}/dcp", "--all"], "it is a DCP directory, see torchrelay inspect {}/dcp"),
        (["rm", "{}/bin", "1"], "see torchrelay convert {}/bin/model.bin PLACE"),
        (["rollback", "{}/nothing", "1"], "there is no such directory"),
        (["rollback", "http://127.0.0.1:1", "1"], "inspect it, watch it"),
        (["ls", "{}/text.safetensors"], "see torchrelay inspect {}/text.safetensors"),
        (["verify", "{}/nothing", "--all"], "has no state"),
        (["verify", "{}/run/step-1", "--all"], "it is one itself, of {}/run"),
        (["export-hf", "{}/run/step-1", "{}/y"], "it is one itself, of {}/run"),
    ],
)
def test_an_error_is_one_line_with_the_way_out(
    words: list[str],
    says: str,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHRELAY_TOKEN", raising=False)
    (tmp_path / "text.safetensors").write_text("no such file")
    for other in ("hf/model-1.safetensors", "dcp/.metadata", "bin/model.bin"):
        (tmp_path / other).parent.mkdir()
        (tmp_path / other).write_bytes(b"")
    done = command(*(word.format(tmp_path) for word in words))
    assert done.returncode == (2 if words[0] == "diff" else 1)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and says.format(tmp_path) in line, line
    assert not (tmp_path / "nothing").exists()
    assert "secret" not in line


def test_a_tensor_without_elements_is_a_tensor(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path / "run", no_dist=True) as there:
        there.save(1, {"w": torch.ones(2), "empty": torch.empty(0, 3, dtype=torch.bfloat16)})
    done = command("convert", tmp_path / "run", tmp_path / "m.safetensors")
    assert done.returncode == 0 and not done.stderr
    got = load_file(tmp_path / "m.safetensors")
    assert got["empty"].shape == (0, 3) and got["empty"].dtype == torch.bfloat16
    assert torch.equal(got["w"], torch.ones(2))
    seen = command("inspect", tmp_path / "run", "--stats")
    assert "bfloat16  0x3" in seen.stdout and "shards" not in seen.stdout, seen.stdout
    assert command("diff", tmp_path / "run", tmp_path / "m.safetensors").returncode == 0


def test_a_tied_tensor_that_is_left_out_of_a_file_is_named(tmp_path: Path) -> None:
    weight = torch.ones(2, 3)
    with tr.Checkpointer(tmp_path / "run", no_dist=True) as there:
        there.save(1, {"embed": weight, "head": weight})
    done = command("convert", tmp_path / "run", tmp_path / "m.safetensors")
    assert done.returncode == 0 and list(load_file(tmp_path / "m.safetensors")) == ["embed"]
    assert done.stderr == "note: tied tensors are written once; left out: head (as embed)\n"


def test_a_watched_step_that_is_saved_again_is_looked_at_again(tmp_path: Path) -> None:
    watched = WatchedPlaces([str(tmp_path)])
    with tr.Checkpointer(tmp_path) as there:
        for size in (2, 3):
            there.save(1, {"w": torch.zeros(size)}, overwrite=True)
            (tensor,) = watched.contents(1).tensors
            assert tensor.shape == (size,)


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_the_status_of_a_step_that_was_saved_again_is_of_the_new_one(
    kind: str, tmp_path: Path, s3: S3
) -> None:
    where = str(tmp_path) if kind == "directory" else s3.url("again")
    watched = WatchedPlaces([where])
    with tr.Checkpointer(where, no_dist=True) as there:
        # Of three saves the last may have the place that the first had on the medium.
        for sizes in ((2,), (3, 4), (5, 6, 7)):
            for size in sizes:
                there.save(1, {"w": torch.zeros(size)}, overwrite=True)
            (disk,) = watched.status()["disk"]
            (facts,) = disk["steps"]
            assert facts["bytes"] == there.record(1).volume_bytes and facts["damage"] is None


def test_a_step_that_did_not_change_is_read_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def counted(there: Store, step: int) -> dict[str, object]:
        looks.append(step)
        return listed(there, step)

    monkeypatch.setattr("torchrelay.cli.commands.watched.listed", counted)
    watched = WatchedPlaces([str(place)])
    assert watched.status()["disk"] == watched.status()["disk"] and looks == [1, 2]


def test_watch_tells_of_a_step_that_was_saved_again() -> None:
    first, again = {"step": 1, "time": 1.0}, {"step": 1, "time": 2.0}
    served = {"step": 1, "snapshot": "a"}  # where it leaves an endpoint it is still in a directory
    seen = iter([[first], [first], [again], [served], [again], []])

    def look() -> dict[str, object]:
        return {"disk": [{"steps": next(seen)}], "transfers": [], "finished": []}

    left = iter([0.1] * 10 + [0.0])
    told = list(_events(look, lambda: next(left), 0.0))
    assert told == [
        {"event": "step", **first},
        {"event": "step", **again},
        {"event": "gone", "step": 1},
    ]
