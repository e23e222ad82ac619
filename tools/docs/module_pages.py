"""The generated sections of the pages in docs/modules."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.distributed.checkpoint import _checkpointer, _pg_transport

from tools.docs import headings, names
from tools.docs.headings import replaced
from tools.docs.sources import (
    PAGES,
    ROOT,
    SOURCE,
    dependencies_of,
    files_of,
    summary_of,
    tests_of,
    tree_of,
)
from torchrelay import dropin

EXTRAS = {  # the extra that brings a package, where it is not a dependency
    "rich": "cli",
    "typer": "cli",
    "obstore": "cloud",
    "torchft": "torchft",
    "opentelemetry": "metrics",
}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *([*row] for row in rows)]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def module_table(page: str) -> str:
    rows = []
    for path in files_of(page):
        summary = summary_of(tree_of(path))
        if summary:
            rows.append([f"`{path.relative_to(SOURCE).as_posix()}`", summary])
    return table(["module", "purpose"], rows)


def dependency_table(page: str) -> str:
    found = dependencies_of(page)
    rows = [
        [f"`torchrelay.{package}`", code(sorted(modules)) or "the module itself"]
        for package, modules in sorted(found.inside.items())
    ]
    outside = []
    for package, on_demand in sorted(found.third_party.items()):
        extra = f"extra `{EXTRAS[package]}`" if package in EXTRAS else ""
        notes = ", ".join(filter(None, [extra, "imported on demand" if on_demand else ""]))
        outside.append(f"`{package}`" + (f" ({notes})" if notes else ""))
    rows.append(["third-party packages", ", ".join(outside) or "none"])
    rows.append(["standard library", code(sorted(found.standard)) or "none"])
    rows.append(["imported by", code(sorted(found.users)) or "no other package"])
    return table(["dependency", "modules"], rows)


def test_table(page: str) -> str:
    rows = []
    for path in tests_of(page):
        rows.append([f"`{path.relative_to(ROOT).as_posix()}`", summary_of(tree_of(path))])
    return table(["test file", "subject"], rows)


def name_list(page: str) -> str:
    parts = []
    for one in names.public():
        if one.page == page:
            parts.append(f"### {one.name}\n\n```text\n{one.signature}\n```")
            parts.append(one.summary)
            if one.fields:
                parts.append(f"Fields: {code(one.fields)}.")
    return "\n\n".join(filter(None, parts))


def command_list() -> str:
    parts = []
    for one in names.commands():
        parts.append(f"### torchrelay {one.name}\n\n{one.summary}")
        parts.append(f"Arguments: {code(one.arguments) or 'none'}. Options: {code(one.options)}.")
    return "\n\n".join(parts)


def error_list() -> str:
    parts = []
    for kind, one in zip(names.error_classes(), names.error_names(), strict=True):
        bases = code(base.__name__ for base in kind.__bases__)
        doc = " ".join((kind.__doc__ or "").split())
        parts.append(f"### {one.name}\n\n{doc}\n\nBase: {bases}.")
    return "\n\n".join(parts)


def torch_signatures(module: ModuleType) -> str:
    """The functions and classes of a module of torch, and how the drop-in provides each."""
    rows = []
    for name, shown in _definitions(tree_of(Path(str(module.__file__)))):
        rows.append([f"`{name}`", f"`{shown}`", _provided(module, name)])
    return table(["name in torch", "signature or fields", "in `torchrelay.dropin`"], rows)


def _provided(module: ModuleType, name: str) -> str:
    theirs: Any = module
    ours: Any = dropin
    for part in name.split("."):
        theirs, ours = getattr(theirs, part), getattr(ours, part.replace("_Checkp", "Checkp"))
    if theirs is ours:
        return "torch's own object"
    given, taken = (list(inspect.signature(each).parameters) for each in (theirs, ours))
    if given != taken[: len(given)]:
        raise AssertionError(f"{name} takes {taken}, torch's takes {given}")
    added = taken[len(given) :]
    return "own code, same signature" + (f", adds {code(added)}" if added else "")


def _definitions(tree: ast.Module) -> list[tuple[str, str]]:
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found.append((node.name, _signature(node)))
        elif isinstance(node, ast.ClassDef):
            fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
            shown = ", ".join(
                f"{ast.unparse(n.target)}: {ast.unparse(n.annotation)}" for n in fields
            )
            if fields:
                found.append((node.name, shown))
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    found.append((f"{node.name}.{inner.name}", _signature(inner)))
    return found


def _signature(node: ast.FunctionDef) -> str:
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"({ast.unparse(node.args)}){result}"


def sections(page: str) -> dict[str, str]:
    """The generated sections of a page, by name."""
    if page not in PAGES:
        return {
            "transport": torch_signatures(_pg_transport),
            "checkpointer": torch_signatures(_checkpointer),
        }
    found = {
        "modules": module_table(page),
        "dependencies": dependency_table(page),
        "tests": test_table(page),
        "names": name_list(page),
    }
    if page == "cli":
        found["commands"] = command_list()
    if page == "errors":
        found["errors"] = error_list()
    return found


def written() -> dict[Path, str]:
    """The text of each page that exists, with its sections as they should be."""
    return {
        path: replaced(path.read_text(encoding="utf-8"), sections(path.stem))
        for path in headings.module_pages()
    }
