"""Headless Chromium, driven through its DevTools protocol; no driver program is needed."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse

START_SECONDS = 60.0
CALL_SECONDS = 60.0
MISSING = "no Chromium is installed to draw pages with"


def chromium() -> str | None:
    """The browser's program, where there is one."""
    names = ("chromium", "chromium-browser", "chromium-headless-shell")
    return next(filter(None, map(shutil.which, names)), None)


class Tab:
    """One tab. `problems` are what its console and its policy complained of."""

    def __init__(self, line: ClientWebSocketResponse) -> None:
        self._line = line
        self._number = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.problems: list[str] = []
        self._listener = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for message in self._line:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(told["params"]["exceptionDetails"])[:500])
            elif told["method"] == "Log.entryAdded":
                entry = told["params"]["entry"]
                if entry["level"] == "error" and entry["source"] != "network":
                    self.problems.append(entry["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._line.send_json({"id": self._number, "method": method, "params": params})
        told = await asyncio.wait_for(answer, CALL_SECONDS)
        assert "error" not in told, told
        result: dict[str, Any] = told["result"]
        return result

    async def run(self, program: str) -> Any:
        """The value of an expression of the page's own language."""
        told = await self.call(
            "Runtime.evaluate", expression=program, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, program: str, seconds: float = 30.0) -> None:
        """Wait for an expression to hold."""
        end = time.monotonic() + seconds
        while not await self.run(f"Boolean({program})"):
            if time.monotonic() > end:
                text = await self.run("document.body.innerText")
                raise AssertionError(f"not after {seconds:g} s: {program}\n{text[:3000]}")
            await asyncio.sleep(0.05)

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def look_like(self, width: int, height: int, scheme: str = "light") -> None:
        """A window of a size, in light or dark."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browser_tab() -> AsyncIterator[Tab]:
    """A tab of a new browser with a profile of its own; both are gone afterwards."""
    program = chromium()
    assert program is not None
    profile = Path(tempfile.mkdtemp(prefix="chromium-"))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    process = subprocess.Popen(
        [program, *options, "--remote-debugging-port=0", f"--user-data-dir={profile}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        port = await _port(profile / "DevToolsActivePort", process)
        async with ClientSession() as session:
            async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                address = (await answer.json())["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as line:
                tab = Tab(line)
                for part in ("Page", "Runtime", "Log"):
                    await tab.call(f"{part}.enable")
                yield tab
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        shutil.rmtree(profile, ignore_errors=True)


async def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, "the browser ended"
        if file.exists() and (lines := file.read_text().split()):
            return int(lines[0])
        await asyncio.sleep(0.05)
    raise AssertionError("the browser did not start")
