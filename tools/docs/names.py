"""The public names: functions, classes, methods, parameters, fields, errors and commands."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest.mock import patch

import torchrelay as tr
from tools.docs.sources import SOURCE, sentence, tree_of
from torchrelay import dcp, dropin, errors, options
from torchrelay.endpoint.front import Endpoint
from torchrelay.endpoint.share import SharedState
from torchrelay.progress import Progress
from torchrelay.results import Attempt, Outcome, Traffic

_MODULES = {  # of names whose module is not a page's own
    "torchrelay.state.registry": "relay",
    "torchrelay.coordination.groups": "relay",
    "torchrelay.sources.access": "endpoint",
    "torchrelay.pending": "checkpointer",
    "torchrelay.options": "relay",
    "torchrelay.results": "relay",
    "torchrelay.progress": "relay",
    "torchrelay.parts": "weights",
}
_OPTIONS = (
    options.CheckpointerOptions,
    options.PullOptions,
    options.RecoverOptions,
    options.ServeOptions,
    options.KeeperOptions,
)
# Classes that a caller meets without importing them by name.
_RETURNED = (Endpoint, SharedState, *_OPTIONS, Progress, Outcome, Attempt, Traffic)
# Public names of modules that a caller imports or meets, and that are not in `tr.__all__`.
_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "torchrelay.endpoint.encoding": ("Encoding",),
    "torchrelay.weights.subscription": ("Subscription",),
    "torchrelay.weights.mapping": (),
}
# Methods for other modules of torchrelay.
_INTERNAL = {
    *("Access.paths", "Access.secret", "Access.server_context", "Access.client_context"),
    *("Pending.end", "Pending.ends_within", "Relay.receive"),
}
_QUALIFIED = {"Checkpointer": "dropin.Checkpointer", "PGTransport": "dropin.PGTransport"}


class Name(NamedTuple):
    """A public name: where it is described, its signature, parameters or fields, first sentence."""

    name: str
    kind: str
    page: str
    signature: str
    parameters: tuple[str, ...]
    fields: tuple[str, ...]
    summary: str

    @property
    def anchor(self) -> str:
        return re.sub(r"[^\w\- ]", "", self.name.lower()).replace(" ", "-")


def _page_of(thing: Any) -> str:
    module = thing.__module__
    for prefix, page in _MODULES.items():
        if module == prefix or module.startswith(f"{prefix}."):
            return page
    return str(module.split(".")[1])


def _parameters(thing: Any) -> list[inspect.Parameter]:
    try:
        found = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each for each in found if each.name != "self"]


def _signature(name: str, parameters: list[inspect.Parameter]) -> str:
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    # Members of an enumeration by their names, as a caller writes them.
    shown = re.sub(r"<(?:\w+\.)?(\w+): [^>]*>", r"\1", str(inspect.Signature(bare)))
    return f"{name}{shown}"


def _fields(kind: type) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        found = [each.name for each in dataclasses.fields(kind)]
    else:
        found = list(getattr(kind, "_fields", ()))
        if not found and getattr(kind, "__total__", None) is not None:
            found = list(kind.__annotations__)
    found += [
        name
        for name, value in vars(kind).items()
        if isinstance(value, property) and not name.startswith("_")
    ]
    return tuple(dict.fromkeys(found))


def _first(thing: Any) -> str:
    doc = (inspect.getdoc(thing) or "").split("\n\n")[0]
    return sentence(" ".join(doc.split()))


def _described(name: str, thing: Any, page: str) -> Iterator[Name]:
    parameters = _parameters(thing)
    names = tuple(each.name for each in parameters)
    if not inspect.isclass(thing):
        yield Name(name, "function", page, _signature(name, parameters), names, (), _first(thing))
        return
    fields = _fields(thing)
    taken = () if set(names) <= set(fields) else names
    plain = _signature(name, parameters) if names and names != ("args", "kwargs") else name
    if "<factory>" in plain:  # a result, which callers never make
        plain = name
    yield Name(name, "class", page, plain, taken, fields, _first(thing))
    for method, value in vars(thing).items():
        # A method without a docstring of its own is there for an interface, not for callers.
        if inspect.isfunction(value) and not method.startswith("_") and value.__doc__:
            inner, full = _parameters(value), f"{name}.{method}"
            if full in _INTERNAL:
                continue
            shown = _signature(full, inner)
            arguments = tuple(each.name for each in inner)
            yield Name(full, "method", page, shown, arguments, (), _first(value))


@cache
def public() -> list[Name]:
    """All public names but errors and commands."""
    found: list[Name] = []
    for name in tr.__all__:
        thing = getattr(tr, name)
        if not inspect.ismodule(thing) and not (
            inspect.isclass(thing) and issubclass(thing, Exception)
        ):
            found += _described(name, thing, _page_of(thing))
    for thing in _RETURNED:
        if thing.__name__ not in tr.__all__:
            found += _described(thing.__name__, thing, _page_of(thing))
    for name in dropin.__all__:
        thing = getattr(dropin, name)
        found += _described(_QUALIFIED.get(name, name), thing, "dropin")
    for module, some in _ELSEWHERE.items():
        if find_spec(module.rpartition(".")[0]) and find_spec(module):
            home = import_module(module)
            for name in some or home.__all__:
                found += _described(name, getattr(home, name), _page_of(getattr(home, name)))
    found += [*_described("dcp.Writer", dcp.Writer, "stores")]
    found += [*_described("dcp.Reader", dcp.Reader, "stores")]
    return found


@cache
def error_classes() -> list[type[Exception]]:
    kinds = vars(errors).values()
    return [k for k in kinds if isinstance(k, type) and issubclass(k, errors.RelayError)]


def error_names() -> list[Name]:
    found = []
    for kind in error_classes():
        own: tuple[str, ...] = ()
        if "__init__" in vars(kind):
            own = tuple(n for n in inspect.signature(kind).parameters if n not in _NOT_FIELDS)
        found.append(Name(kind.__name__, "error", "errors", "", (), own, _first(kind)))
    return found


_NOT_FIELDS = {"self", "message", "context", "args", "kwargs"}


class Command(NamedTuple):
    name: str
    summary: str
    arguments: tuple[str, ...]
    options: tuple[str, ...]

    @property
    def anchor(self) -> str:
        return f"torchrelay-{self.name}"


@cache
def commands() -> list[Command]:
    """The commands of `torchrelay`, as its own program builds them."""
    import typer

    from torchrelay import cli

    made: list[typer.Typer] = []
    with patch.object(typer.Typer, "__call__", lambda app, **_: made.append(app)):
        cli.main()
    group: Any = typer.main.get_command(made[0])
    found = []
    for name, command in group.commands.items():
        arguments = [p.name.upper() for p in command.params if p.param_type_name == "argument"]
        options = [max(p.opts, key=len) for p in command.params if p.param_type_name == "option"]
        shown = sentence(" ".join((command.help or "").split("\n\n")[0].split()))
        found.append(Command(name, shown, tuple(arguments), tuple(options)))
    return found


def modules() -> list[tuple[str, str]]:
    """The packages and top modules of torchrelay, with the first sentence of each docstring."""
    found = []
    for path in sorted(SOURCE.iterdir()):
        file = path / "__init__.py" if path.is_dir() else path
        if file.suffix == ".py" and file.is_file() and path.name != "__init__.py":
            doc = " ".join((ast.get_docstring(tree_of(file)) or "").split("\n\n")[0].split())
            found.append((path.stem, sentence(doc)))
    return found
