"""What `curl` and other programs get of an endpoint: docs/http.md, over real HTTP."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import torchrelay as tr
from tests.endpoint.conftest import Stage
from tests.support import flat
from torchrelay.planning.stored import stored_tensors
from torchrelay.record.encoding import decode_at_rest

_pull = partial(flat.pull, same_host=False)  # over TCP, though this is the same host


def _curl(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["curl", "-sS", *args], capture_output=True, text=True, timeout=60)


def _get(url: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    return _ask("GET", url, headers)


def _ask(method: str, url: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    host, _, path = url.removeprefix("http://").partition("/")
    line = http.client.HTTPConnection(host, timeout=30)
    try:
        line.request(method, f"/{path}", headers=headers)
        answer = line.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        line.close()


def _state(seed: int, rows: int = 1000) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(rows, 256, generator=draw),
            "half": torch.randn(33, generator=draw).to(torch.bfloat16),
            "mask": torch.tensor([True, False, True]),
        },
        "optimizer": {"m": torch.randn(7, generator=draw, dtype=torch.float64)},
        "step": seed,
    }


def _same(file: Path, state: dict[str, Any]) -> bool:
    found = load_file(file)
    wanted = {f"{top}.{key}": x for top in ("model", "optimizer") for key, x in state[top].items()}
    return found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


def test_curl_gets_a_file_that_safetensors_opens(stage: Stage, tmp_path: Path) -> None:
    state = _state(1)
    stage.show(state)
    done = _curl("-o", str(tmp_path / "model.safetensors"), f"{stage.url}/model.safetensors")
    assert done.returncode == 0, done.stderr
    assert _same(tmp_path / "model.safetensors", state)


def test_include_selects_paths(stage: Stage, tmp_path: Path) -> None:
    stage.show(_state(1))
    file = tmp_path / "part.safetensors"
    url = f"{stage.url}/model.safetensors?include=model.*t&include=optimizer.*"
    assert _curl("-g", "-o", str(file), url).returncode == 0
    assert set(load_file(file)) == {"model.weight", "optimizer.m"}
    status, _, text = _get(f"{stage.url}/model.safetensors?include=nothing")
    assert status == 404 and b"no tensor" in text
    assert _get(f"{stage.url}/model.safetensors?" + "&".join(["include=a"] * 17))[0] == 400


def test_head_etag_and_ranges(stage: Stage) -> None:
    step = stage.show(_state(2))
    url = f"{stage.url}/model.safetensors"
    status, headers, body = _ask("HEAD", url, {})
    assert status == 200 and not body
    whole = _get(url)[2]
    assert int(headers["Content-Length"]) == len(whole)
    etag = headers["ETag"]
    assert etag.startswith(f'"{step}-')
    assert _get(f"{url}?include=model.*")[1]["ETag"] != etag
    for text, part in (
        ("bytes=0-9", whole[:10]),
        ("bytes=100-", whole[100:]),
        ("bytes=-7", whole[-7:]),
        (f"bytes=50-{10 * len(whole)}", whole[50:]),
    ):
        status, headers, body = _get(f"{url}?step={step}", Range=text)
        assert (status, body) == (206, part), text
        assert headers["Content-Range"].endswith(f"/{len(whole)}")
    for text in (f"bytes={len(whole)}-", "bytes=9-3", "bytes=0-1,3-4", "bytes=a-b"):
        status, headers, _ = _get(f"{url}?step={step}", Range=text)
        assert status == 416 and headers["Content-Range"] == f"bytes */{len(whole)}", text
    for text in ("rows=1-2", "rows", "="):  # units that the server does not know
        status, headers, body = _get(f"{url}?step={step}", Range=text)
        assert (status, body) == (200, whole) and "Content-Range" not in headers, text
    status, headers, body = _get(f"{url}?step={step}", Range="Bytes= 0-9 ")
    assert (status, body) == (206, whole[:10])
    for path in (url, _volume_of(stage)):
        size = len(_get(path)[2])
        for text in ("bytes=0-9", f"bytes={10 * size}-"):  # a range is of GET alone
            status, headers, _ = _ask("HEAD", path, {"Range": text})
            assert (status, headers["Content-Length"]) == (200, str(size)), text
            assert "Content-Range" not in headers
    assert _get(url, **{"Range": "bytes=5-", "If-Range": etag})[0] == 206
    assert _get(url, **{"Range": "bytes=5-", "If-Range": '"other"'})[::2] == (200, whole)
    status, headers, body = _get(url, **{"If-None-Match": etag})
    assert status == 304 and not body and "Content-Length" not in headers


def _volume_of(stage: Stage) -> str:
    step = json.loads(_get(f"{stage.url}/steps.json")[2])["steps"][-1]
    return f"{stage.url}/volumes/{step['snapshot']}/{step['here'][0]}"


def test_another_method_is_refused_with_those_that_there_are(stage: Stage) -> None:
    stage.show(_state(2))
    for path, allowed in (("/steps.json", "GET, HEAD"), ("/parts", "POST")):
        status, headers, _ = _ask("DELETE", f"{stage.url}{path}", {})
        assert (status, headers["Allow"]) == (405, allowed)


def test_a_download_that_broke_off_is_continued_by_its_step(stage: Stage, tmp_path: Path) -> None:
    """After another step was published: the rest is of the step that the request names."""
    first, second = _state(3, 40_000), _state(4, 40_000)
    step = stage.show(first)
    file = tmp_path / "model.safetensors"
    url = f"{stage.url}/model.safetensors"
    broken = _curl("--limit-rate", "20M", "--max-time", "0.5", "-o", str(file), url)
    assert broken.returncode == 28
    part = file.stat().st_size
    assert 0 < part < 40_000_000
    etag = _ask("HEAD", url, {})[1]["ETag"]
    stage.show(second)
    done = _curl("-f", "-C", "-", "-o", str(file), f"{url}?step={step}")
    assert done.returncode == 0, done.stderr
    assert _same(file, first)
    # A condition on the step that is no longer the newest: all of the newest one is sent.
    status, _, whole = _get(url, **{"Range": f"bytes={part}-", "If-Range": etag})
    assert status == 200
    (tmp_path / "other.safetensors").write_bytes(whole)
    assert _same(tmp_path / "other.safetensors", second)


def test_a_step_that_is_gone_is_not_continued(tmp_path: Path) -> None:
    with tr.serve(
        _state(5), step=1, timeout=30, options=tr.options.ServeOptions(hold_seconds=0.001)
    ) as endpoint:
        for step in (2, 3):
            endpoint.publish(_state(step), step=step).result(30)
        url = f"{endpoint.url}/model.safetensors?step=1"
        status, _, text = _get(url, Range="bytes=100-")
        assert status == 404 and b"available: 2, 3" in text


def test_a_reader_in_the_middle_of_a_step_keeps_it_and_the_trainer_goes_on(
    stage: Stage, tmp_path: Path
) -> None:
    """The publish that would need its memory is skipped at once; the file is of one step."""
    first = _state(8, 20_000)
    stage.show(first)
    file = tmp_path / "model.safetensors"
    url = f"{stage.url}/model.safetensors"
    command = ["curl", "-sSf", "--limit-rate", "8M", "-o", str(file), url]
    with subprocess.Popen(command) as reader:
        while not any(one["bytes"] for one in stage.endpoint.status()["transfers"]):
            assert reader.poll() is None
        reader.send_signal(signal.SIGSTOP)  # it is in the middle, however long that takes
        try:
            stage.show(_state(9, 20_000))
            skipped = stage.endpoint.publish(_state(10, 20_000), step=10_000)
        finally:
            reader.send_signal(signal.SIGCONT)
        assert skipped.skipped is not None and "is read by 127.0.0.1" in skipped.skipped
        assert skipped.done()
        assert reader.wait(60) == 0
    assert _same(file, first)
    assert _get(f"{stage.url}/record?step=10000")[0] == 404


def test_the_record_and_the_volumes(stage: Stage) -> None:
    state = _state(6)
    step = stage.show(state)
    steps = json.loads(_get(f"{stage.url}/steps.json")[2])["steps"]
    assert steps[-1]["step"] == step
    snapshot = steps[-1]["snapshot"]
    record = decode_at_rest(_get(f"{stage.url}/record?step={step}")[2])
    assert record.step == step and len(stored_tensors(record)) == 4
    places = json.loads(_get(f"{stage.url}/places.json?snapshot={snapshot}")[2])
    assert places["volumes"] == {file.name: [""] for file in record.volumes}
    shard = next(one for one in stored_tensors(record) if one.name == "model.weight").shards[0]
    name = record.volumes[shard.file].name
    wanted = f"bytes={shard.start}-{shard.start + 1024_000 - 1}"
    status, _, body = _get(f"{stage.url}/volumes/{snapshot}/{name}", Range=wanted)
    assert status == 206
    assert body == state["model"]["weight"].numpy().tobytes()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/volumes/../../etc/passwd", 404),
        ("GET", "/volumes/%2e%2e/%2fetc%2fpasswd", 404),
        ("GET", "/record?step=99999", 404),
        ("GET", "/record?step=-1", 400),
        ("GET", "/record?step=" + "9" * 30, 400),
        ("GET", "/places.json?snapshot=nothing", 410),
        ("POST", "/record", 405),
        ("DELETE", "/model.safetensors", 405),
        ("GET", "/readers/abc", 405),
        ("POST", "/readers/abc", 400),
    ],
)
def test_requests_that_make_no_sense(stage: Stage, method: str, path: str, status: int) -> None:
    found, _, text = _ask(method, stage.url + path, {})
    assert found == status
    assert text.count(b"\n") == 1 and b"Traceback" not in text


def test_status_and_metrics(stage: Stage, tmp_path: Path) -> None:
    step = stage.show(_state(7))
    sent = stage.endpoint.status()["sent_bytes"]
    got = _pull(stage.url, timeout=30)
    found = json.loads(_get(f"{stage.url}/status.json")[2])
    assert found["step"] == got.step == step
    assert found["finished"][-1]["outcome"] == "done"
    assert found["finished"][-1]["kind"] == "http"
    assert found["sent_bytes"] - sent == sum(got.report.sources.values())
    assert found["publishes"][-1]["step"] == step and found["publishes"][-1]["skipped"] is None
    lines = _get(f"{stage.url}/metrics")[2].decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values["torchrelay_step"] == str(step)
    assert int(values["torchrelay_sent_bytes_total"]) == found["sent_bytes"]
    assert int(values['torchrelay_transfers_total{outcome="done"}']) >= 1
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    names = {name.partition("{")[0] for name in values}
    assert all(f"`{name}" in page for name in names), names
    assert _get(f"{stage.url}/healthz")[2] == b"ok\n"


def test_a_plain_range_is_answered_after_a_whole_download(stage: Stage) -> None:
    """As readers of ranges ask, which know nothing of steps and conditions."""
    stage.show(_state(11))
    url = f"{stage.url}/model.safetensors"
    whole = _get(url)[2]
    assert _get(url, Range="bytes=100-199")[::2] == (206, whole[100:200])
    stage.show(_state(12))
    newer = _get(url)[2]
    assert newer != whole
    assert _get(url, Range="bytes=100-199")[::2] == (206, newer[100:200])
    done = _curl("-r", "100-199", "-o", "-", "-w", "%{http_code}", url)
    assert done.stdout.endswith("206")
