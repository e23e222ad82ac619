"""The source files of each module page, and what their imports and docstrings say."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "torchrelay"

# The packages and modules that each page describes, and the folders with their tests.
PAGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "relay": (
        ("relay.py", "results.py", "progress.py", "resharding", "transports"),
        ("relay", "transports", "known_faults"),
    ),
    "checkpointer": (
        ("checkpointer", "loading", "mirror", "pending.py"),
        ("checkpointer", "mirror"),
    ),
    "replicas": (("replicas",), ("replicas",)),
    "endpoint": (("endpoint", "sources"), ("endpoint",)),
    "keeper": (("keeper",), ("keeper",)),
    "recovery": (("recovery",), ("recovery",)),
    "weights": (("weights", "parts"), ("weights", "parts")),
    "dropin": (("dropin",), ("dropin",)),
    "stores": (("stores", "shares", "processes", "dcp"), ("stores", "shares", "processes", "dcp")),
    "cli": (("cli", "__main__.py"), ("cli",)),
    "errors": (("errors.py",), ()),
}


class Import(NamedTuple):
    """An import of a file. `at_once`: it happens when the module is imported, not in a call."""

    module: str
    at_once: bool


def pages() -> list[str]:
    """The pages whose sources exist."""
    return [page for page, (parts, _) in PAGES.items() if (SOURCE / parts[0]).exists()]


def files_of(page: str) -> list[Path]:
    found: list[Path] = []
    for part in PAGES[page][0]:
        path = SOURCE / part
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else []
    return found


def tests_of(page: str) -> list[Path]:
    folders = [ROOT / "tests" / name for name in PAGES[page][1]]
    return [path for folder in folders for path in sorted(folder.rglob("test_*.py"))]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def summary_of(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    """The first sentence of a docstring, on one line."""
    text = (ast.get_docstring(node) or "").split("\n\n")[0]
    return sentence(" ".join(text.split()))


def sentence(text: str) -> str:
    """The first sentence of a paragraph."""
    ends = [at for at in range(len(text)) if text.startswith(". ", at)]
    return next((text[: at + 1] for at in ends if not text[:at].endswith(("e.g", "i.e"))), text)


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """All imports of a file, except those that only type checkers see."""
    package = path.relative_to(SOURCE.parent).parent.parts

    def walk(node: ast.AST, at_once: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, at_once) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else ()
                module = ".".join((*base, *filter(None, [child.module])))
                for alias in child.names:
                    yield Import(_resolved(module, alias.name), at_once)
            elif isinstance(child, ast.stmt | ast.ExceptHandler):
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from walk(child, at_once and not inside)

    return tuple(walk(tree_of(path), True))


@cache
def _resolved(module: str, name: str) -> str:
    """`from package import module` imports a module; `from module import name` does not."""
    path = SOURCE.parent.joinpath(*module.split("."), name)
    is_module = path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
    return f"{module}.{name}" if is_module else module


def name_of(path: Path) -> str:
    """The dotted name of a source file."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Dependencies(NamedTuple):
    inside: dict[str, set[str]]  # packages of torchrelay, with the imported modules
    third_party: dict[str, bool]  # packages, and whether every import of them is on demand
    standard: set[str]
    users: set[str]  # packages of torchrelay that import the page's modules


def dependencies_of(page: str) -> Dependencies:
    own = {name_of(path) for path in files_of(page)}
    inside: dict[str, set[str]] = defaultdict(set)
    third_party: dict[str, bool] = {}
    standard: set[str] = set()
    for path in files_of(page):
        for module, at_once in imports_of(path):
            top = module.split(".")[0]
            if top == "torchrelay":
                if module not in own and module != "torchrelay":
                    package, _, rest = module.removeprefix("torchrelay.").partition(".")
                    inside[package].update({rest} - {""})
            elif top in sys.stdlib_module_names:
                standard.add(top)
            else:
                third_party[top] = third_party.get(top, True) and not at_once
    return Dependencies(dict(inside), third_party, standard - {"__future__"}, _users_of(own))


def _users_of(own: set[str]) -> set[str]:
    found = set()
    for path in SOURCE.rglob("*.py"):
        name = name_of(path)
        if name not in own and any(each.module in own for each in imports_of(path)):
            found.add(name.split(".")[1] if "." in name else name)
    return found
