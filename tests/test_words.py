"""Names of the library use the words of its field: a reader learns no private vocabulary.

Looks at what the source defines: modules, classes, functions, parameters, variables and attributes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "src" / "torchrelay"

REFUSED = {
    "odd": "the property itself: overlapping, non-contiguous",
    "tangled": "overlapping",
    "stray": "unmatched",
    "apart": "separate",
    "twin": "must be equal",
    "far": "on a device",
    "near": "on the host",
    "home": "owner; rank",
    "given": "from the caller",
    "filled": "preallocated",
    "straight": "direct",
    "late": "deferred; overdue",
    "held": "staged; retained",
    "handover": "restore objects",
    "ruling": "decision; assignment",
    "crew": "pool",
    "asked": "requested",
    "told": "sent; notified",
    "said": "sent; reported",
    "heard": "received",
    "seam": "the interface's name",
    "companion": "ChildProcess",
    "blueprint": "plan",
    "intake": "ChunkReceiver",
    "outflow": "ChunkSender",
    "knock": "Ping",
    "shelf": "Source",
    "buddy": "replica",
    "lap": "run; iteration",
}
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_PLURALS = {"strays": "stray", "twins": "twin", "homes": "home", "buddies": "buddy", "laps": "lap"}


def words_of(name: str) -> Iterator[str]:
    for part in _PARTS.findall(name):
        word = part.lower()
        yield _PLURALS.get(word, word)


def names_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What a module defines, with lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield (node.id if isinstance(node, ast.Name) else node.attr), node.lineno
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                if alias.asname is not None:
                    yield alias.asname, node.lineno
        elif isinstance(node, ast.ExceptHandler) and node.name is not None:
            yield node.name, node.lineno


def test_a_private_word_in_a_name_is_found() -> None:
    text = (
        "class StrayRows:\n    def __init__(self, heard: int) -> None:\n        self.on = heard\n"
    )
    found = [word for name, _ in names_in(ast.parse(text)) for word in words_of(name)]
    assert [word for word in found if word in REFUSED] == ["stray", "heard"]
    assert list(words_of("XXH3Digest_of2")) == ["xxh", "3", "digest", "of", "2"]


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_names_use_the_words_of_the_field(path: Path) -> None:
    names = [(path.stem, 1), *names_in(ast.parse(path.read_text("utf-8")))]
    found = {
        f"line {line}: {name}: {REFUSED[word]}"
        for name, line in names
        for word in words_of(name)
        if word in REFUSED
    }
    assert not found, "\n".join(sorted(found))
