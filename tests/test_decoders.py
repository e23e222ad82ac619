"""Decoders of the library's own types are made when a module is loaded.

msgspec looks a type's fields up when it is first used, without a lock: two threads that do so at
once end the process with a segmentation fault.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchrelay

ROOT = Path(torchrelay.__file__).parent


def late(tree: ast.AST, inside: bool = False) -> Iterator[tuple[int, str]]:
    """Calls in functions that look a type up, unless it is made of types of Python alone."""
    for node in ast.iter_child_nodes(tree):
        if inside and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, types = node.func.attr, []
            if name == "decode":
                types = [key.value for key in node.keywords if key.arg == "type"]
            elif name == "Decoder" or (name == "convert" and "msgspec" in ast.unparse(node.func)):
                types = node.args[-1:]
            for one in types:
                names = {n.id for n in ast.walk(one) if isinstance(n, ast.Name)}
                if not all(hasattr(builtins, n) or n in ("Any", "Size") for n in names):
                    yield node.lineno, ast.unparse(node)
        yield from late(node, inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


# Each looks up a type that a line of the module, or its caller's, has looked up before.
LOOKED_UP = {
    "transports/wire/messages.py": "msgspec.msgpack.Decoder(kind)",
    "weights/mapping/rules.py": "msgspec.convert(data, cls)",
}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_function_looks_a_type_up(path: Path) -> None:
    found = [text for _, text in late(ast.parse(path.read_text("utf-8")))]
    assert found in ([], [LOOKED_UP.get(path.relative_to(ROOT).as_posix())])


def test_readers_of_messages_are_made_where_modules_load() -> None:
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inner = [ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)]
                assert "m.reader" not in inner and "messages.reader" not in inner, path


def test_the_rule_finds_what_it_looks_for() -> None:
    bad = "def f(data):\n return msgspec.json.decode(data, type=Facts)"
    assert list(late(ast.parse(bad))) and not list(late(ast.parse(bad.replace("Facts", "int"))))
    assert list(late(ast.parse("def f():\n return msgspec.msgpack.Decoder(Facts)")))
    assert not list(late(ast.parse("d = msgspec.msgpack.Decoder(Facts)")))
