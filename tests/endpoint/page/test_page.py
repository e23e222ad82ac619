"""The page, driven in headless Chromium: transfers, failures, the token, and very many tensors."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch

from tests.support.browser import MISSING, Tab, browser_tab, chromium
from tests.support.held_source import HeldSource
from tests.support.watched_site import WatchedSite, serving
from torchrelay.endpoint.page import watch_page

pytestmark = [
    pytest.mark.skipif(chromium() is None, reason=MISSING),
    pytest.mark.timeout(180),
]

HOSTILE = "<img src=x onerror=hacked()>"
TOKEN = "a secret of this test".replace(" ", "-")


def transfer(**others: Any) -> dict[str, Any]:
    return {
        "reader": "0123456789abcdef", "address": "10.0.0.9", "agent": "torchrelay/0.1.0",
        "step": 20, "kind": "http", "begun": time.time(), "bytes": 25_000_000,
        "total": 100_000_000, "rate": 50_000_000.0, **others,
    }  # fmt: skip


def text_of(tab: Tab, id: str) -> Any:
    return tab.run(f"document.getElementById('{id}').innerText")


def states() -> dict[int, HeldSource]:
    weight = torch.linspace(-1, 1, 64).reshape(8, 8)
    before = {"model.weight": weight, f"model.{HOSTILE}": torch.ones(2), "old": torch.ones(3)}
    after = {"model.weight": weight * 2, f"model.{HOSTILE}": torch.ones(2), "new": torch.ones(3)}
    return {10: HeldSource(before, step=10), 20: HeldSource(after, step=20)}


async def watch_transfers() -> None:
    async with browser_tab() as tab, serving(WatchedSite(states())) as site:
        await tab.look_like(1280, 900)
        await tab.open(site.url)
        await tab.until("document.body.innerText.includes('Nobody is reading.')")

        site.status["transfers"] = [transfer()]
        site.status["readers"] = 1
        site.status["ranks"] = [site.url]
        site.status["seeds"] = [{"url": "http://10.0.0.7:1", "step": 20, "chunks": 1, "of": 4}]
        await tab.until("document.querySelector('.transfer.running')")
        shown = await text_of(tab, "transfers")
        assert "10.0.0.9 takes step 20" in shown and "50 MB/s · 1.5 s left" in shown
        assert "25 MB of 100 MB" in shown
        width = "document.querySelector('.fill').style.width"
        assert await tab.run(width) == "25%"
        assert await tab.run("document.querySelectorAll('.node.reader').length") == 1
        assert await tab.run("document.querySelectorAll('.node.seed').length") == 1
        site.status["transfers"] = [transfer(bytes=75_000_000)]
        await tab.until(f"{width} === '75%'")

        site.status["transfers"] = []
        failed = transfer(outcome="failed", reason=f"it was dropped {HOSTILE}", ended=time.time())
        site.status["finished"] = [failed]
        site.status["failures"] = 1
        await tab.until("document.querySelector('.transfer.failed')")
        assert "it was dropped <img src=x" in await text_of(tab, "finished")
        assert await tab.run("document.querySelectorAll('img').length") == 0

        site.status["publishes"] = [
            {"step": n, "stage_seconds": 0.1 * n, "hash_seconds": 0.1,
             "skipped": "it was read" if n == 2 else None} for n in range(1, 5)
        ]  # fmt: skip
        await tab.until("document.querySelectorAll('#stalls .stick').length === 4")
        assert await tab.run("document.querySelectorAll('#stalls .stick.skipped').length") == 1
        assert "longest 0.4 s" in await text_of(tab, "stalls")
        site.status["disk"] = [
            {"url": "runs/a", "steps": [{"step": 5, "bytes": 10, "time": 0, "damage": "it is cut"}]}
        ]
        await tab.until("document.body.innerText.includes('damaged: it is cut')")
        assert tab.problems == []


def test_a_transfer_is_shown_while_it_runs_and_a_failed_one_in_words() -> None:
    asyncio.run(watch_transfers())


async def watch_with_token() -> None:
    async with browser_tab() as tab, serving(WatchedSite(states(), TOKEN)) as site:
        await tab.look_like(390, 844, "dark")
        await tab.open(site.url)
        await tab.until("document.getElementById('door').open")
        enter = "(t => {{ token.value = t; document.querySelector('#door button').click() }})('{}')"
        await tab.run(enter.format("wrong"))
        await tab.until("document.body.innerText.includes('That token is not the right one.')")
        await tab.run(enter.format(TOKEN))
        await tab.until("document.querySelectorAll('#tree .row').length > 3")
        assert not await tab.run("document.getElementById('door').open")
        assert await tab.run("location.href") == f"{site.url}/"
        assert await tab.run("sessionStorage.length + localStorage.length") == 1
        assert not any(TOKEN in path for path, _ in site.asked)
        # The tree, the values of a tensor, and what changed; names are text.
        assert HOSTILE in await text_of(tab, "tree")
        assert await tab.run("document.querySelectorAll('img').length") == 0
        row = "[...document.querySelectorAll('#tree .row')].find(r => r.innerText.includes('{}'))"
        await tab.run(row.format("weight") + ".click()")
        await tab.until("document.querySelectorAll('#detail .stick').length === 64")
        facts = (await text_of(tab, "detail")).split()
        assert facts[facts.index("min") + 1] == "-2" and facts[facts.index("max") + 1] == "2"
        await tab.run("compare.click()")
        await tab.until("document.querySelectorAll('#changes .row').length === 3")
        told = await text_of(tab, "changes-totals")
        assert "1 added, 1 removed, 0 changed; 1 tensor with other values, 1 with" in told
        # It fits a phone, and is dark.
        assert await tab.run("document.documentElement.scrollWidth") == 390
        color = await tab.run("getComputedStyle(document.body).backgroundColor")
        assert color == "rgb(17, 22, 20)"
        # Nothing runs that is not in the document.
        await tab.run(
            "(s => { s.textContent = 'window.hacked = 1'; document.body.append(s) })"
            "(document.createElement('script'))"
        )
        assert await tab.run("window.hacked === undefined")
        assert any("Content Security Policy" in problem for problem in tab.problems)
        assert all("Content Security Policy" in problem for problem in tab.problems)


def test_the_token_is_asked_for_and_names_are_text() -> None:
    asyncio.run(watch_with_token())


async def watch_many(count: int) -> None:
    names = [f"model.layers.{n // 20}.part{n % 20}.weight" for n in range(count)]
    source = HeldSource({name: torch.full((2,), float(n)) for n, name in enumerate(names)})
    async with browser_tab() as tab, serving(WatchedSite({7: source})) as site:
        await tab.look_like(1280, 900)
        await tab.open(site.url)
        await tab.until("document.querySelectorAll('#tree .row').length")
        assert f"{count:,} tensors" in await text_of(tab, "tree-totals")
        await walk_by_keys(tab)
        # Everything is opened: no more rows become elements than can be seen.
        rows = "document.querySelectorAll('#tree .row').length"
        await tab.run("filter.value = 'weight'; filter.dispatchEvent(new Event('input'))")
        await tab.until("parseFloat(document.querySelector('#tree .space').style.height) > 500000")
        gaps = await tab.run(
            "new Promise(done => { const box = document.getElementById('tree'); const gaps = [];"
            " let last = performance.now(); let n = 0;"
            " const step = now => { gaps.push(now - last); last = now; n += 1;"
            "   box.scrollTop = n / 60 * box.scrollHeight;"
            "   n < 60 ? requestAnimationFrame(step) : done(gaps) };"
            " requestAnimationFrame(step) })"
        )
        print(f"longest frame while scrolling {count} tensors: {max(gaps):.0f} ms")
        assert len(gaps) == 60 and await tab.run(rows) < 100
        titles = "[...document.querySelectorAll('#tree .row .name')].map(e => e.title)"
        await tab.until(f"{titles}.includes('{names[-1]}')")
        await tab.run("filter.value = 'layers.77.'; filter.dispatchEvent(new Event('input'))")
        await tab.until("document.getElementById('tree').innerText.includes('part19')")
        assert tab.problems == []


async def walk_by_keys(tab: Tab) -> None:
    """Arrow keys go into a group and out of it, and the row that they are at is named."""

    async def press(*keys: str) -> Any:
        await tab.run(
            "document.getElementById('tree').focus();"
            f" for (const key of {list(keys)}) document.getElementById('tree')"
            ".dispatchEvent(new KeyboardEvent('keydown', {key}))"
        )
        await tab.run(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        return await tab.run(
            "(at => [at.getAttribute('aria-level'), at.getAttribute('aria-expanded')])"
            "(document.getElementById('tree-at'))"
        )

    assert await press("ArrowDown") == ["1", "false"]
    assert await press("ArrowRight") == ["1", "true"]
    assert await press("ArrowDown") == ["2", "false"]
    assert await press("ArrowRight") == ["2", "true"]
    assert (await press("ArrowDown"))[0] == "3"
    assert await press("ArrowLeft") == ["2", "true"]
    assert await press("ArrowLeft") == ["2", "false"]
    await press("End")
    assert await tab.run("document.getElementById('tree').scrollTop") > 1000
    assert await press("Home") == ["1", "true"]


def test_20000_tensors_do_not_freeze_it() -> None:
    asyncio.run(watch_many(20_000))


def test_the_page_is_one_document_without_outside_assets() -> None:
    page = watch_page()
    text = page.body.decode()
    assert "/*CSS*/" not in text and "/*JS*/" not in text
    assert "src=" not in text.replace(HOSTILE, "") and "@import" not in text
    assert "innerHTML" not in text and "eval(" not in text and "localStorage" not in text
    policy = page.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
