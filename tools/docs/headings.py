"""The pages of the documentation, their headings, and the anchors of these."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tools.docs.sources import PAGES, ROOT, pages

DOCS = ROOT / "docs"
GENERATED = ("index-a-z.md", "map.md")  # whole pages
OPEN, CLOSE = "<!-- generated: {} -->", "<!-- end of generated -->"
_SECTION = re.compile(r"<!-- generated: (\w+) -->\n.*?<!-- end of generated -->", re.S)
_FENCE = re.compile(r"^```.*?^```[ ]*$", re.M | re.S)


class Heading(NamedTuple):
    level: int
    text: str  # without links
    anchor: str


class Page(NamedTuple):
    path: Path
    title: str
    lead: str  # the first sentence
    headings: tuple[Heading, ...]  # without the title

    @property
    def name(self) -> str:
        return self.path.relative_to(DOCS).as_posix()

    def sections(self, deepest: int) -> list[Heading]:
        """The headings down to a level; of equal ones the first, whose anchor is its own."""
        first: dict[str, Heading] = {}
        for heading in self.headings:
            first.setdefault(heading.anchor, heading)
        return [heading for heading in first.values() if heading.level <= deepest]


def anchor_of(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    plain = re.sub(r"[^\w\- ]", "", heading.lower())
    return plain.strip().replace(" ", "-")


def read(path: Path) -> Page:
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    found: list[Heading] = []
    for marks, heading in re.findall(r"^(#{1,4}) (.+?)\s*$", text, re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        plain = re.sub(r"\s*\{[^}]*\}$", "", plain)
        found.append(Heading(len(marks), plain, anchor_of(plain)))
    titles = [heading for heading in found if heading.level == 1]
    title = titles[0].text if titles else path.stem
    return Page(path, title, _lead(text), tuple(h for h in found if h.level > 1))


def _lead(text: str) -> str:
    for paragraph in re.split(r"\n\s*\n", text):
        plain = " ".join(paragraph.split())
        if re.match(r"[A-Z`*]", plain) and not plain.startswith("**["):
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", plain)
            return re.split(r"(?<=[.:]) ", plain)[0].rstrip(":")
    return ""


def all_pages() -> list[Page]:
    """All pages but the generated ones, in the order of their names."""
    paths = sorted(DOCS.rglob("*.md"), key=lambda path: path.relative_to(DOCS).as_posix())
    left_out = {*(DOCS / name for name in GENERATED), *module_pages(existing=False)}
    return [read(path) for path in paths if path not in left_out]


def module_pages(*, existing: bool = True) -> list[Path]:
    """The pages in docs/modules whose packages are in this tree, or those whose are not."""
    absent = {page for page in PAGES if page not in pages()}
    found = sorted((DOCS / "modules").glob("*.md"))
    return [path for path in found if (path.stem not in absent) == existing]


def replaced(text: str, sections: dict[str, str]) -> str:
    """A page with its generated sections written again."""

    def write(found: re.Match[str]) -> str:
        name = found[1]
        return f"{OPEN.format(name)}\n\n{sections[name].strip()}\n\n{CLOSE}"

    return _SECTION.sub(write, text)


def hand_written(text: str) -> str:
    """A page without its generated sections."""
    return _SECTION.sub("", text)
