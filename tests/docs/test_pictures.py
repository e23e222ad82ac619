"""Every picture of the repository is well-formed, and a browser draws it."""

from __future__ import annotations

import asyncio
import base64
import re
import struct
import xml.etree.ElementTree as ElementTree
import zlib
from pathlib import Path

import pytest

from benchmarks.demo_picture import TimedLines, animated, lines_of
from tests.docs.test_docs import ROOT
from tests.support.browser import MISSING, browser_tab, chromium

PICTURES = sorted([*(ROOT / "docs").glob("*.svg"), *(ROOT / "benchmarks/results").glob("*.png")])
TYPES = {".svg": "image/svg+xml", ".png": "image/png"}

# The size of a picture, and how many colours it has: one that was not drawn has a single colour.
DRAW = """
new Promise((drawn) => {
  const picture = new Image();
  picture.onerror = () => drawn(null);
  picture.onload = () => {
    const canvas = document.createElement("canvas");
    canvas.width = picture.naturalWidth;
    canvas.height = picture.naturalHeight;
    const pen = canvas.getContext("2d");
    pen.drawImage(picture, 0, 0);
    const words = new Uint32Array(pen.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
    drawn([canvas.width, canvas.height, new Set(words).size]);
  };
  picture.src = "data:TYPE;base64,DATA";
})
"""


def name_of(path: Path) -> str:
    return path.name


def test_pictures_are_found() -> None:
    assert {path.name for path in PICTURES} >= {"chart.svg", "demo.svg", "live.png"}


@pytest.mark.parametrize("path", [p for p in PICTURES if p.suffix == ".svg"], ids=name_of)
def test_a_drawing_is_xml(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.get("viewBox")
    assert any(text.strip() for text in root.itertext())


def test_the_demo_is_a_recording() -> None:
    """Lines appear in the order in which they were printed; without animations all are there."""
    text = (ROOT / "docs" / "demo.svg").read_text("utf-8")
    lines = lines_of(text)
    assert len(lines) > 15 and lines == list(range(lines[0], lines[-1] + 1))
    begins = re.findall(r"@keyframes demo-at-\d+ \{ 0%, ([\d.]+)% \{ opacity: 0 \}", text)
    assert list(map(float, begins)) == sorted(map(float, begins))
    assert text.count("opacity: 0 ") == len(lines) and "prefers-reduced-motion" in text


def test_lines_of_a_recording_appear_at_their_times() -> None:
    printed = TimedLines()
    printed.write("a\nb\n")
    printed.write("c")
    assert len(printed.times) == 2 and printed.times == sorted(printed.times)
    found = animated("<style>\n</style>", [0.0, 3.0, 6.0])
    assert lines_of(found) == [1, 2]
    assert "0%, 29.99% { opacity: 0 } 30.00%" in found
    assert "0%, 59.99% { opacity: 0 } 60.00%" in found


@pytest.mark.parametrize("path", [p for p in PICTURES if p.suffix == ".png"], ids=name_of)
def test_an_image_is_whole(path: Path) -> None:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, kinds = 8, []
    while at < len(data):
        (nbytes,) = struct.unpack_from(">I", data, at)
        part = data[at + 4 : at + 8 + nbytes]
        kinds.append(part[:4])
        assert struct.unpack_from(">I", data, at + 8 + nbytes) == (zlib.crc32(part),)
        at += 12 + nbytes
    assert kinds[0] == b"IHDR" and kinds[-1] == b"IEND" and b"IDAT" in kinds


async def draw(path: Path) -> object:
    data = base64.b64encode(path.read_bytes()).decode()
    async with browser_tab() as tab:
        return await tab.run(DRAW.replace("TYPE", TYPES[path.suffix]).replace("DATA", data))


@pytest.mark.skipif(chromium() is None, reason=MISSING)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("path", PICTURES, ids=name_of)
def test_a_browser_draws_it(path: Path) -> None:
    drawn = asyncio.run(draw(path))
    assert isinstance(drawn, list), f"a browser cannot show {path.name}"
    width, height, colours = drawn
    assert width > 100 and height > 100 and colours > 10
