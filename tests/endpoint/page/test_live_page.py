"""The page of a real endpoint: what it shows of a reader that reads, and of one that breaks off."""

from __future__ import annotations

import asyncio
import http.client
import json
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.access import access
from tests.support.browser import MISSING, browser_tab, chromium
from tests.support.ranks import RankPool
from torchrelay.endpoint.front import Endpoint

TOKEN = "the-token-of-this-test"


def state(step: int) -> dict[str, Any]:
    rows = torch.arange(1 << 20, dtype=torch.float32)
    return {
        "model": {"w": torch.ones(64, 1 << 18), "moves": rows + step, "stays": rows},
        "step": step,
    }


def asked(url: str, path: str, token: str | None = TOKEN) -> tuple[int, Any]:
    line = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    line.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
    answer = line.getresponse()
    body = answer.read()
    line.close()
    plain = answer.headers["Content-Type"] != "application/json"
    return answer.status, body.decode() if plain else json.loads(body)


async def watch(endpoint: Endpoint) -> None:
    async with browser_tab() as tab:
        await tab.look_like(1280, 900)
        await tab.open(endpoint.url)
        await tab.until("document.getElementById('door').open")
        await tab.run(f"token.value = '{TOKEN}'; document.querySelector('#door button').click()")
        await tab.until("document.getElementById('tree-totals').innerText.startsWith('3 tensors')")
        line = http.client.HTTPConnection(endpoint.url.removeprefix("http://"), timeout=60)
        line.request("GET", "/model.safetensors", headers={"Authorization": f"Bearer {TOKEN}"})
        answer = line.getresponse()
        answer.read(1 << 20)  # and no more: the rest waits in the endpoint
        await tab.until("document.querySelector('.transfer.running')")
        assert "127.0.0.1 takes step 2" in await tab.run("transfers.innerText")
        answer.close()
        line.close()
        await tab.until("document.querySelector('.transfer.failed')")
        assert "the reader went away" in await tab.run("finished.innerText")
        await tab.run("compare.click()")
        await tab.until("document.querySelectorAll('#changes .row').length")
        changed = (await tab.run("changes.innerText")).split("~")
        assert len(changed) == 2 and "model.moves" in changed[1].partition("?")[0]
        assert tab.problems == []


@pytest.mark.timeout(180)
def test_the_page_of_an_endpoint_shows_its_readers() -> None:
    if chromium() is None:
        pytest.skip(MISSING)
    with tr.serve(state(1), step=1, timeout=60, **access(token=TOKEN)) as endpoint:
        asked(endpoint.url, "/steps.json")  # it waits for the step to be there
        asked(endpoint.url, "/page/steps.json")
        endpoint.publish(state(2), step=2).result(60)
        asyncio.run(watch(endpoint))


def test_answers_about_steps_need_the_token_and_the_page_does_not() -> None:
    with tr.serve(state(1), step=1, timeout=60, **access(token=TOKEN)) as endpoint:
        url = endpoint.url
        asked(url, "/steps.json")  # it waits for the step to be there
        status, page = asked(url, "/", token=None)
        assert status == 200 and page.startswith("<!doctype html>") and TOKEN not in page
        for path in ("/page/steps.json", "/page/tree.json?step=1", "/status.json"):
            assert asked(url, path, token=None)[0] == 401
            assert asked(url, path, token="wrong")[0] == 401
        assert asked(url, "/page/steps.json") == (200, {"steps": [1]})
        tree = asked(url, "/page/tree.json?step=1")[1]
        assert ["model.w", "float32", [64, 1 << 18], 64 << 20, []] in tree["tensors"]
        found = asked(url, "/page/histogram.json?step=1&tensor=model.moves")[1]
        assert (found["min"], found["max"], sum(found["counts"])) == (1, 1 << 20, 1 << 20)
        assert asked(url, "/page/histogram.json?step=1&tensor=none")[0] == 404
        assert asked(url, "/page/tree.json?step=9")[0] == 404
        assert asked(url, "/page/tree.json?step=-1")[0] == 400
        assert asked(url, "/page/changes.json?before=1")[0] == 400
        endpoint.publish(state(2), step=2).result(60)
        # A step that is gone is remembered by what it held.
        changes = asked(url, "/page/changes.json?before=1&after=2")[1]
        certain = [name for name, _, certain in changes["touched"] if certain]
        assert certain == ["model.moves"]
        assert not changes["added"] and not changes["removed"]


def of_all_ranks(rank: int, group: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(4096, dtype=torch.float32).reshape(64, 64)
    mesh = init_device_mesh("cpu", (group.size(),))
    held = {"model": {"w": distribute_tensor(whole, mesh, [Shard(0)])}}
    with tr.serve(held, step=3, group=group, timeout=60, **access(token=TOKEN)) as endpoint:
        found = None
        if rank == 0:
            asked(endpoint.url, "/steps.json")  # it waits for the step to be there
            tree = asked(endpoint.url, "/page/tree.json?step=3")[1]
            bars = asked(endpoint.url, "/page/histogram.json?step=3&tensor=model.w")[1]
            found = tree["tensors"], bars
        torch.distributed.barrier(group)
    return found


def test_a_tensor_of_several_ranks_is_read_from_all_of_them(pool2: RankPool) -> None:
    tensors, bars = pool2.run(of_all_ranks, timeout=100, fresh_group=True)[0]
    assert tensors == [["model.w", "float32", [64, 64], 16384, [0, 1]]]
    assert bars["counts"] == [64] * 64 and (bars["min"], bars["max"]) == (0, 4095)
