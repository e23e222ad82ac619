"""The page of places without an endpoint: who is let in, and what it tells of steps on disk."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import ClientSession

import torchrelay as tr
from torchrelay.cli.commands import watched as watched_places
from torchrelay.cli.commands.watched import WatchedPlaces
from torchrelay.endpoint.address import Address
from torchrelay.endpoint.page.site import PageSite

TOKEN = "the-token-of-this-test"


async def ask_all(watched: WatchedPlaces, token: str | None) -> dict[str, Any]:
    site = PageSite(watched, watched.status, Address("127.0.0.1", 0), token)
    url = site.url
    found: dict[str, Any] = {}
    async with ClientSession() as session:

        async def ask(path: str, method: str = "GET", **headers: str) -> Any:
            async with session.request(method, url + path, headers=headers) as answer:
                plain = answer.content_type != "application/json"
                return answer.status, await answer.text() if plain else await answer.json()

        found["page"] = await ask("/")
        found["without"] = await ask("/status.json")
        bearer = {"Authorization": f"Bearer {token}"}
        found["status"] = await ask("/status.json", **bearer)
        found["tree"] = await ask("/page/tree.json?step=2", **bearer)
        found["changes"] = await ask("/page/changes.json?before=1&after=2", **bearer)
        found["bars"] = await ask("/page/histogram.json?step=2&tensor=model.w", **bearer)
        found["missing"] = await ask("/page/tree.json?step=3", **bearer)
        found["nothing"] = await ask("/record", **bearer)
        found["post"] = await ask("/status.json", "POST", **bearer)
        found["name"] = await ask("/status.json", Host="evil.example", **bearer)
    site.close()
    return found


def test_steps_on_disk_are_shown_to_who_has_the_token(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path / "run", no_dist=True) as there:
        there.save(1, {"model": {"w": torch.zeros(4)}, "lr": 0.1})
        there.save(2, {"model": {"w": torch.arange(4.0)}, "lr": 0.2, "new": torch.ones(1)})
    watched = WatchedPlaces([str(tmp_path / "run")])
    found = asyncio.run(ask_all(watched, TOKEN))
    assert found["page"][0] == 200 and "<title>torchrelay</title>" in found["page"][1]
    assert found["without"][0] == 401
    status = found["status"][1]
    assert status["step"] == 2 and [one["step"] for one in status["disk"][0]["steps"]] == [1, 2]
    assert found["tree"][1]["tensors"][0] == ["model.w", "float32", [4], 16, []]
    assert ["lr", "0.2"] in found["tree"][1]["values"]
    changes = found["changes"][1]
    assert changes["touched"] == [["model.w", 0.75, True]] and changes["same"] == 0
    assert changes["added"] == ["new"] and changes["changed"][0]["after"] == "0.2"
    assert (found["bars"][1]["max"], sum(found["bars"][1]["counts"])) == (3.0, 4)
    assert [found[name][0] for name in ("missing", "nothing", "post")] == [404, 404, 405]
    # Without a token, this user is let in, and no page of another name.
    found = asyncio.run(ask_all(watched, None))
    assert found["without"][0] == 200 and found["name"][0] == 401


def test_a_directory_that_does_not_answer_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_places, "ASK_SECONDS", 0.2)
    watched = WatchedPlaces([str(tmp_path)])
    (there,) = watched._places.values()
    answers = threading.Event()
    monkeypatch.setattr(there, "steps", lambda: answers.wait(30) and [])
    try:
        for look in (watched.status, watched.steps):
            with pytest.raises(tr.errors.StorageTimeoutError, match="list the steps"):
                look()
    finally:
        answers.set()
