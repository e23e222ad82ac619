"""serve, pull and watch of endpoints, as a user types them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import torchrelay as tr
from tests.support import sharded_job
from tests.support.access import access
from tests.support.commands import command
from tests.support.ranks import run_ranks
from tests.support.saved import equal
from torchrelay.cli.commands import transfer
from torchrelay.endpoint.front import Endpoint

TOKEN = "the-token-of-this-test"
STATE = {"model": {"w": torch.arange(12.0).reshape(3, 4)}, "name": "a\x1b[2Jb", "step": 5}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with tr.serve(STATE, step=5, timeout=60, **access(token=TOKEN)) as found:
        yield found


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    return file


def dead_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_an_endpoint_is_read_with_its_token(
    endpoint: Endpoint, token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHRELAY_TOKEN", raising=False)
    for words in (
        ["inspect"],
        ["verify"],
        ["pull", "-o", tmp_path / "no"],
        ["watch", "--until", 1],
    ):
        refused = command(*words, endpoint.url)
        assert refused.returncode == 1 and "token" in refused.stderr, words
        assert len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "no").exists()
    done = command("--token-file", token_file, "pull", endpoint.url, "-o", tmp_path / "run")
    assert done.returncode == 0 and TOKEN not in done.stdout + done.stderr
    with tr.Checkpointer(tmp_path / "run", no_dist=True) as there:
        assert there.verify() == 5 and equal(there.load().state, STATE)
    monkeypatch.setenv("TORCHRELAY_TOKEN", TOKEN)
    shown = command("inspect", endpoint.url)
    assert shown.returncode == 0 and "model.w" in shown.stdout
    assert "\x1b" not in shown.stdout  # a name that would move the cursor
    token_file.chmod(0o644)
    open_file = command("--token-file", token_file, "verify", endpoint.url)
    assert open_file.returncode == 1 and "chmod 600" in open_file.stderr


def test_pull_names_the_urls_that_it_did_without(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHRELAY_TOKEN", TOKEN)
    dead = dead_url()
    out = tmp_path / "m.safetensors"
    done = command("pull", dead, endpoint.url, "-o", out, "--json")
    facts = json.loads(done.stdout)
    assert done.returncode == 0 and facts["step"] == 5
    assert facts["bytes"] == out.stat().st_size and list(facts["failed"]) == [dead]
    told = command("pull", dead, endpoint.url, "-o", out)
    assert f"note: {dead} was left out" in told.stdout
    nobody = command("pull", dead, "-o", tmp_path / "other.safetensors")
    assert nobody.returncode == 1 and dead in nobody.stderr
    whole = command("pull", endpoint.url, "-o", tmp_path / "run", "--include", "model.*")
    assert whole.returncode == 1 and "--include" in whole.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.safetensors"]


def test_watch_tells_of_readers(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRELAY_TOKEN", TOKEN)
    tr.pull(endpoint.url, timeout=60)
    seen = command("watch", endpoint.url, "--timeout", 0.01, "--json")
    events = [json.loads(line) for line in seen.stdout.splitlines()]
    assert events[0]["event"] == "step" and events[0]["step"] == 5
    assert any(event["event"] == "done" and event["bytes"] for event in events)
    lines = command("watch", endpoint.url, "--timeout", 0.01).stdout
    assert "127.0.0.1 has read step 5" in lines


@pytest.mark.slow  # docs/cli.md has a server in the suite; this one waits for a second step
@pytest.mark.timeout(180)
def test_serve_follows_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHRELAY_TOKEN", raising=False)
    with tr.Checkpointer(tmp_path / "run", no_dist=True) as there:
        there.save(1, STATE)
        program = [sys.executable, "-c", "from torchrelay.cli import main; main()"]
        serving = subprocess.Popen(
            [*program, "serve", str(tmp_path / "run"), "--follow", "--interval", "0.1"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert serving.stdout is not None
            url = serving.stdout.readline().split()[-1]
            assert url.startswith("http://127.0.0.1:")
            there.save(2, STATE)
            assert command("watch", url, "--until", 2, "--timeout", 60).returncode == 0
            assert equal(tr.pull(url, timeout=60).state, STATE)
        finally:
            serving.terminate()
            assert serving.wait(30) == 130
            assert serving.stdout is not None
            serving.stdout.close()


def test_a_pulled_step_trains_on_with_the_same_losses(four_ranks: Path, tmp_path: Path) -> None:
    """What four ranks saved is served by one process, pulled, and trained on by two ranks."""
    with tr.Checkpointer(
        four_ranks / "run", no_dist=True, options=tr.options.CheckpointerOptions(read_only=True)
    ) as there:
        state: Any = there.load(step=20).state
    with tr.serve(state, step=20, timeout=60) as endpoint:
        pulled = command("pull", endpoint.url, "-o", tmp_path / "pulled")
        assert pulled.returncode == 0, pulled.stderr
    places = [str(four_ranks / "run"), str(tmp_path / "pulled")]
    for saved, again in run_ranks(sharded_job.train_on, 2, places, timeout=100):
        assert saved == again and len(set(saved)) == 3


def test_a_damaged_step_does_not_end_who_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "run"
    with tr.Checkpointer(place, no_dist=True) as there, tr.serve(STATE, step=1) as end:
        there.save(1, STATE)
        assert transfer._follow(end, str(place), 1) == 1
        there.save(2, STATE)
        data = next((place / "step-2").glob("*.safetensors"))
        raw = bytearray(data.read_bytes())
        raw[-1] ^= 1
        data.write_bytes(raw)
        assert transfer._follow(end, str(place), 1) == 2, "not read again and again"
        assert "still serving" in capsys.readouterr().err
        assert tr.pull(end.url, timeout=60).step == 1
        there.save(3, STATE)
        assert transfer._follow(end, str(place), 2) == 3
        assert tr.pull(end.url, timeout=60).step == 3


def test_the_token_file_is_taken_before_and_after_the_command(
    endpoint: Endpoint, token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHRELAY_TOKEN", raising=False)
    out = tmp_path / "m.safetensors"
    for words in (
        ["--token-file", token_file, "pull", endpoint.url, "-o", out],
        ["pull", "--token-file", token_file, endpoint.url, "-o", out],
        ["pull", endpoint.url, "-o", out, "--token-file", token_file],
        ["inspect", endpoint.url, "--token-file", token_file],
        ["verify", endpoint.url, f"--token-file={token_file}"],
    ):
        done = command(*words)
        assert done.returncode == 0, (words, done.stderr)
    assert "--token-file" in command("pull", "--help").stdout
    refused = command("verify", endpoint.url)  # nothing of an earlier command is left
    assert refused.returncode == 1 and "token" in refused.stderr


def test_only_takes_a_subtree_by_its_name(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHRELAY_TOKEN", TOKEN)
    out = tmp_path / "m.safetensors"
    done = command("pull", endpoint.url, "-o", out, "--include", "model")
    assert done.returncode == 0, done.stderr
    assert list(load_file(out)) == ["model.w"]
    shown = command("inspect", endpoint.url, "--include", "model")
    assert shown.returncode == 0 and "model.w" in shown.stdout and "name" not in shown.stdout
    monkeypatch.delenv("TORCHRELAY_TOKEN")
    with tr.serve({f"part{n:02}": torch.ones(1) for n in range(20)}, step=1, timeout=60) as many:
        done = command("pull", many.url, "-o", out, "--include", "nothing")
    assert done.returncode == 1
    assert all(f"part{n:02}" in done.stderr for n in range(20)), done.stderr
