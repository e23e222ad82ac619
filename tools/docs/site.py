"""A hook of mkdocs: the pages are written for GitHub and for plain reading, and adapted here.

- Words after the language of a code block, which tests read, are dropped.
- A link to a file outside docs/ becomes the path of the file: the site has no copy of it.
- Generated pages that exist are added to the navigation.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROOT = DOCS.parent
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w+)[^\n]*$", re.M)
CODE = re.compile(r"^```.*?^```$", re.M | re.S)
TEXT = {"hex"}  # what no highlighter knows


def more_pages(docs: Path = DOCS) -> list[dict[str, Any]]:
    """Entries of the navigation for pages that tools.docs writes."""
    modules = sorted((docs / "modules").glob("*.md"))
    found: list[dict[str, Any]] = []
    if modules:
        found.append({"Modules": [f"modules/{path.name}" for path in modules]})
    for title, name in (("Index A to Z", "index-a-z.md"), ("Section map", "map.md")):
        if (docs / name).is_file():
            found.append({title: name})
    return found


def on_config(config: Any) -> Any:
    config["nav"] = [*config["nav"], *more_pages(Path(config["docs_dir"]))]
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    return adapted(markdown, Path(page.file.src_path).parent)


def adapted(markdown: str, folder: Path) -> str:
    """A page's text for the site; `folder` is where it is below docs/."""
    parts, end = [], 0
    for block in CODE.finditer(markdown):
        parts += [_links(markdown[end : block.start()], folder), _fence(block[0])]
        end = block.end()
    return "".join([*parts, _links(markdown[end:], folder)])


def _fence(block: str) -> str:
    return FENCE.sub(lambda m: "```" + ("text" if m[1] in TEXT else m[1]), block, count=1)


def _links(text: str, folder: Path) -> str:
    def write(found: re.Match[str]) -> str:
        image, label, target = found.groups()
        if image or re.match(r"\w+:|#", target):
            return found[0]
        there = (DOCS / folder / target.partition("#")[0]).resolve()
        if there.is_relative_to(DOCS):
            return found[0]
        path = there.relative_to(ROOT).as_posix()
        return label if path in label or "::" in label else f"{label} (`{path}`)"

    return LINK.sub(write, text)
