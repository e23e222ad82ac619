"""The keyword index (docs/index-a-z.md) and the section map (docs/map.md)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable

from tools.docs import names
from tools.docs.headings import Page, hand_written

HEAD = """# Index, A to Z

Every public name, parameter, field, error, command, option and term, with links to the pages that
describe it. `make pages` writes this page from the code and from the other pages.
"""
MAP_HEAD = """# Section map

Every page with its sections. `make pages` writes this page from the headings of the others.
"""
MOST_LINKS = 12  # of one entry and kind

Entries = dict[str, dict[str, list[str]]]  # term, kind, links


def link(text: str, page: str, anchor: str = "") -> str:
    return f"[{text}]({page}{'#' + anchor if anchor else ''})"


def _module(one: names.Name) -> str:
    return f"modules/{one.page}.md"


def entries(pages: list[Page]) -> Entries:
    found: Entries = defaultdict(lambda: defaultdict(list))

    def add(term: str, kind: str, target: str) -> None:
        if target not in found[term][kind]:
            found[term][kind].append(target)

    public = [*names.public(), *names.error_names()]
    for one in public:
        here = link(one.name, _module(one), one.anchor)
        short = one.name.rpartition(".")[2]
        add(f"`{short}`", one.kind, here)
        for parameter in one.parameters:
            if parameter not in ("args", "kwargs"):
                add(f"`{parameter}`", "parameter", here)
        for field in one.fields:
            add(f"`{field}`", "field", here)
    for command in names.commands():
        here = link(f"torchrelay {command.name}", "modules/cli.md", command.anchor)
        add(f"`torchrelay {command.name}`", "command", here)
        for option in command.options:
            add(f"`{option}`", "option", here)
    described = {one.page for one in public} | {"cli"}
    for name, _ in names.modules():
        page = f"modules/{name}.md"
        if name in described:
            add(f"`torchrelay.{name}`", "package", link(name, page))
    known = {one.name.rpartition(".")[2] for one in public}
    for page in pages:
        for term in keywords(page):
            shown = f"`{term}`" if term in known or term.startswith("_") else term
            add(shown, "term", link(page.title, page.name, "keywords"))
        # The names on the other module pages are those of the code.
        if not page.name.startswith("modules/") or page.name.startswith("modules/dropin-"):
            _add_headings(page, known, add)
    return found


def keywords(page: Page) -> list[str]:
    """The terms in the section "Keywords" of a page."""
    text = hand_written(page.path.read_text(encoding="utf-8"))
    section = re.search(r"^## Keywords\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if section is None:
        return []
    return [" ".join(term.split()).rstrip(".") for term in section[1].split(",") if term.strip()]


def _add_headings(page: Page, known: set[str], add: Callable[[str, str, str], None]) -> None:
    """The sections of a page: under the public names in them, or under their own words."""
    for heading in page.sections(deepest=3):
        words = re.findall(r"`(?:[\w.]+\.)?(\w+)[^`]*`", heading.text)
        if page.name.startswith("modules/"):
            words = [heading.text.rpartition(".")[2]]
        mentioned = [word for word in words if word in known]
        shown = heading.text.replace("`", "").partition("(")[0]
        for word in mentioned:
            add(f"`{word}`", "section", link(f"{page.title}: {shown}", page.name, heading.anchor))
        if not mentioned and heading.level == 2 and not page.name.startswith("modules/"):
            topic = re.sub(r"^\d+\. ", "", heading.text)
            add(topic, "section", link(page.title, page.name, heading.anchor))


def _key(term: str) -> tuple[str, str]:
    plain = re.sub(r"^[\W_]+", "", term.replace("torchrelay ", "").replace("torchrelay.", ""))
    return re.sub(r"^(a|an|the) ", "", plain.lower()), term


def index(pages: list[Page]) -> str:
    letters: dict[str, list[str]] = defaultdict(list)
    for term, kinds in sorted(entries(pages).items(), key=lambda item: _key(item[0])):
        first = _key(term)[0][:1].upper()
        letters[first if first.isascii() and first.isalpha() else "0-9"].append(_line(term, kinds))
    jump = " · ".join(link(letter, "", letter.lower()) for letter in sorted(letters))
    parts = [HEAD, jump, ""]
    for letter, lines in sorted(letters.items()):
        parts += [f"## {letter}", "", *lines, ""]
    return "\n".join(parts)


def _line(term: str, kinds: dict[str, list[str]]) -> str:
    shown = []
    for kind, links in kinds.items():
        more = f" and {len(links) - MOST_LINKS} more" if len(links) > MOST_LINKS else ""
        shown.append(f"{kind}: {', '.join(links[:MOST_LINKS])}{more}")
    return f"- {term} ({'; '.join(shown)})"


def section_map(pages: Iterable[Page]) -> str:
    folders: dict[str, list[Page]] = defaultdict(list)
    for page in pages:
        folders[page.path.parent.name if "/" in page.name else ""].append(page)
    parts = [MAP_HEAD]
    for folder, inside in folders.items():
        parts += [f"## {folder.capitalize() or 'Pages'}", ""]
        for page in inside:
            parts += [f"### {link(page.title, page.name)}", ""]
            if page.lead:
                parts += [page.lead, ""]
            listed = [f"- {link(h.text, page.name, h.anchor)}" for h in page.sections(deepest=2)]
            parts += [*listed, ""] if listed else []
    return "\n".join(parts).rstrip() + "\n"
