"""`python -m tools.docs.reference` writes docs/reference.md and docs/module-list.md from the code.

Signatures, docstrings, fields with their remarks, errors, commands: nothing is typed by hand.
`--check` writes nothing and fails if a page differs from the code.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torchrelay as tr
from torchrelay import dcp, dropin, errors, options
from torchrelay.dropin import stock_dcp
from torchrelay.dropin.conversion import convert
from torchrelay.endpoint.encoding import Encoding
from torchrelay.endpoint.front import Endpoint
from torchrelay.endpoint.share import SharedState
from torchrelay.progress import Progress
from torchrelay.results import Attempt, Outcome, Traffic
from torchrelay.weights import mapping
from torchrelay.weights.subscription import Subscription

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "torchrelay"
REFERENCE = ROOT / "docs" / "reference.md"
MODULES = ROOT / "docs" / "module-list.md"
# Methods that other modules of torchrelay call.
INTERNAL = {"Relay.receive", "Pending.end", "Pending.ends_within"}

HEAD = """# Reference

<!-- Written by `python -m tools.docs.reference` from the docstrings: edit those. -->

Everything in `torchrelay.__all__`, what these names return, the errors, the drop-ins and the
commands. Ranks are ranks of the group that was passed in. Times are seconds, or a `timedelta` where
a timeout is accepted.
"""

# What a section describes: names of `tr`, and classes that callers meet without importing them.
SECTIONS: dict[str, tuple[Any, ...]] = {
    "Relay": (tr.Relay, SharedState),
    "Checkpointer": (tr.Checkpointer,),
    "Keep policies": (tr.KeepLast, tr.KeepEvery, tr.KeepBest),
    "Results": (tr.Loaded, tr.Report, Outcome, Attempt, Traffic, tr.Pending, Progress),
    "serve and pull": (tr.serve, Endpoint, Encoding, tr.pull, tr.Access),
    "subscribe": (tr.subscribe, Subscription),
    "recover and Keeper": (tr.recover, tr.Keeper),
    "options": (
        options.CheckpointerOptions,
        options.PullOptions,
        options.RecoverOptions,
        options.ServeOptions,
        options.KeeperOptions,
    ),
    "init_process_group": (tr.init_process_group,),
    "register": (tr.register,),
}
OTHERS: dict[str, dict[str, Any]] = {
    "torchrelay.dcp": {"dcp.Writer": dcp.Writer, "dcp.Reader": dcp.Reader},
    "torchrelay.dropin": {
        "PGTransport": dropin.PGTransport,
        "dropin.Checkpointer": dropin.Checkpointer,
    },
    "torchrelay.weights": {name: getattr(mapping, name) for name in mapping.__all__},
    "Conversion": {"convert": convert, **{n: getattr(stock_dcp, n) for n in stock_dcp.__all__}},
}


def unlisted() -> tuple[Any, ...]:
    """Public names that no section has yet."""
    listed = {thing for things in SECTIONS.values() for thing in things}
    public = [getattr(tr, name) for name in tr.__all__ if name not in ("errors", "options")]
    return tuple(thing for thing in public if thing not in listed)


def signature(name: str, thing: Any) -> str:
    """As a caller writes it: without annotations and `self`."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(thing).parameters.values()
        if parameter.name != "self"
    ]
    shown = inspect.Signature(parameters)
    # Members of an enum by their names, as one writes them.
    return re.sub(r"<\w+\.(\w+): \d+>", r"\1", f"{name}{shown}")


def prose(thing: Any) -> str:
    """A docstring as Markdown: it is written that way, but for examples that are indented."""
    text = inspect.getdoc(thing) or ""
    return text.strip()


def remarks(kind: type) -> dict[str, str]:
    """The comments behind the fields of a class."""
    source = textwrap.dedent(inspect.getsource(kind))
    found = re.findall(r"^    (\w+): [^#\n]+?(?:  # (.+))?$", source, re.M)
    return dict(found)


def fields(kind: type) -> Iterator[tuple[str, str]]:
    """Fields and properties of a result, with what is said about each."""
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    else:
        names = list(getattr(kind, "_fields", ()))
    said = remarks(kind)
    for name in names:
        yield name, said.get(name, "")
    for name, value in vars(kind).items():
        if isinstance(value, property) and not name.startswith("_"):
            yield name, " ".join((value.__doc__ or "").split())


def methods(kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(kind).items():
        if inspect.isfunction(value) and not name.startswith("_") and value.__doc__:
            yield name, value


def is_result(kind: type) -> bool:
    """Callers get one and never make one: its fields matter, not how it is made."""
    return kind in (tr.Loaded, tr.Report, Outcome, Attempt, Traffic, Progress, tr.Pending)


def entry(name: str, thing: Any) -> Iterator[str]:
    made = inspect.isclass(thing) and (
        is_result(thing) or thing in (Endpoint, SharedState, Subscription)
    )
    yield f"### `{name}`" if made else f"### `{signature(name, thing)}`"
    yield prose(thing)
    if not inspect.isclass(thing):
        return
    rows = [row for row in fields(thing) if is_result(thing) or row[1]]
    if rows and is_result(thing):
        lines = [f"| `{field}` | {said} |" for field, said in rows]
        yield "\n".join(["| field | meaning |", "|---|---|", *lines])
    elif rows:
        yield "\n".join(f"- `{field}`: {said}" for field, said in rows)
    for method, value in methods(thing):
        if f"{name}.{method}" not in INTERNAL and name != "Access":
            yield f"### `{signature(f'{name}.{method}', value)}`"
            yield prose(value)


def error_section() -> Iterator[str]:
    yield "## Errors"
    tree = (errors.__doc__ or "").split("\n\n")[1]
    yield "All are in `errors`. [Operations](operations.md#errors) has causes and remedies."
    yield f"```text\n{textwrap.dedent(tree)}\n```"
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.RelayError)
    ]
    rows = [f"| `{kind.__name__}` | {' '.join((kind.__doc__ or '').split())} |" for kind in kinds]
    yield "\n".join(["| error | meaning |", "|---|---|", *rows])


def command_section() -> Iterator[str]:
    yield "## Commands"
    yield "`pip install 'torchrelay[cli]'`; [the command line](cli.md) shows each with its output."
    rows = [f"| `torchrelay {name} ` | {said} |" for name, said in commands()]
    yield "\n".join(["| command | what it does |", "|---|---|", *rows])


def commands() -> list[tuple[str, str]]:
    """The commands and what their help says first, from the program's own list."""
    program = SOURCE / "cli" / "__init__.py"
    listed = program.read_text(encoding="utf-8").split("for act in (", 1)[1].split("):", 1)[0]
    own = re.findall(r"^ +(\w+),$", listed, re.M)  # those that the program has itself
    found = [(name, _help(program, name)) for name in own]
    for module, function in re.findall(r"(\w+)\.(\w+)", listed):
        path = SOURCE / "cli" / "commands" / f"{module}.py"
        found.append((function.replace("_", "-"), _help(path, function)))
    return sorted(found)


def _help(path: Path, function: str) -> str:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    raise LookupError(f"{function} in {path}")


def reference() -> str:
    parts: list[str] = []
    for title, things in {**SECTIONS, "More": unlisted()}.items():
        if things:
            parts.append(f"## {title}")
        for thing in things:
            parts += entry(thing.__name__, thing)
    parts += error_section()
    for title, named in OTHERS.items():
        parts.append(f"## {title}")
        for name, thing in named.items():
            parts += entry(name, thing)
        if title == "torchrelay.dropin":
            helpers = [f"`{name}`" for name in dropin.__all__ if name.startswith("_")]
            parts.append(f"Records and helpers under torch's names: {', '.join(helpers)}.")
    parts += command_section()
    return HEAD + "\n" + "\n\n".join(part for part in parts if part) + "\n"


def module_list() -> str:
    """Every module, by package, with the first sentence of its docstring."""
    lines = [
        "# Modules",
        "",
        "<!-- Written by `python -m tools.docs.reference` from the docstrings: edit those. -->",
        "",
        "Every module of `src/torchrelay`, by package. [Design](design.md) explains how they work",
        "together.",
    ]
    packages: dict[Path, list[Path]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        packages.setdefault(path.parent, []).append(path)
    for package, paths in sorted(packages.items(), key=lambda item: item[0].as_posix()):
        name = package.relative_to(SOURCE.parent).as_posix()
        rows = [
            f"| `{path.relative_to(SOURCE).as_posix()}` | {_first(path)} |"
            for path in paths
            if path.name != "__init__.py"
        ]
        if rows:
            lines += ["", f"## {name}", "", _first(package / "__init__.py"), ""]
            lines += ["| module | purpose |", "|---|---|", *rows]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def _first(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else ""
    paragraph = " ".join((text or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z`])", paragraph)[0].replace("|", "\\|")


@cache
def written() -> dict[Path, str]:
    return {REFERENCE: reference(), MODULES: module_list()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.docs.reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    check = parser.parse_args().check
    stale = [p for p, text in written().items() if not p.exists() or p.read_text("utf-8") != text]
    for path in stale:
        print(path.relative_to(ROOT), "differs from the code" if check else "written")
        if not check:
            path.write_text(written()[path], encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
