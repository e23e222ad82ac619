"""Imports of the library point one way, private torch stays in its rooms, files stay short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "src" / "torchrelay"
MAX_LINES = 500
PROTOCOL, PROTOCOL_LINES = "transports/protocol/", 399  # read whole before it is trusted

# Lowest first. A part may import itself, its layer and the layers below it.
LAYERS: list[set[str]] = [
    {"errors", "version"},
    {"system"},
    {
        "arguments",
        "deadlines",
        "files",
        "frames",
        "machine",
        "metrics",
        "owner",
        "pause",
        "progress",
        "shortage",
        "steps",
        "results",
        "tables",
    },
    {"options", "pending"},
    {"processes"},
    {"geometry"},
    {"record"},
    {"state"},
    {"describing"},
    {"planning"},
    {"landing"},
    {"memory"},
    {"coordination"},
    {"transports", "stores"},
    {"parts", "shares"},
    {"sources"},
    {"loading", "mirror"},
    {"inspection"},
    {"replicas"},
    {"endpoint"},
    {"relay"},
    {"keeper"},
    {"checkpointer"},
    {"weights"},
    {"dcp", "dropin", "integrations"},
    {"recovery"},
    {"check"},
    {"cli", "demo", "__main__"},
]
HEIGHT = {part: height for height, layer in enumerate(LAYERS) for part in layer}
STRANGERS = {frozenset({"transports", "stores"})}
# The same inside of parts that are large.
INSIDE: dict[str, list[set[str]]] = {
    "stores": [
        {"listing", "lookalikes", "retry", "safetensors", "step_files", "tokens"},
        {"draft"},
        {"store"},
        {"local", "objects"},
        {"locate", "opening"},
        {"writer"},
        {"reading"},
    ],
    "transports": [
        {"c10d", "wire"},
        {"meeting"},
        {"streams"},
        {"resources"},
        {"routes"},
        {"protocol"},
    ],
}
MAY_IMPORT_FRONT_DOOR = LAYERS[-1]

# Parts and single modules that know of no process, socket, file or thread. A module that is listed
# here imports what is pure itself: nothing above the pure parts but other modules of this list.
PURE = {"geometry", "record", "state", "describing", "planning", "landing"}
PURE_MODULES = {
    "checkpointer/stop_rule.py",
    "transports/protocol/receive_plan.py",
    "transports/protocol/receiver_machine.py",
}
# The files that use torch's private names: tests/state/test_torch_names.py looks at each.
PRIVATE_NAMES = {"state/torch_private.py", "dropin/torch_private.py"}
IMPURE = {
    "asyncio",
    "mmap",
    "multiprocessing",
    "os",
    "selectors",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "torch.distributed",
}
# Of paths: they say False where nobody can tell. Those of an `os.DirEntry` raise, and those of
# fsspec are its own.
LOOKS = {"exists", "is_file", "is_dir", "is_symlink", "isfile", "isdir", "islink", "lexists"}
PICKLES = {"_pickle", "cloudpickle", "dill", "marshal", "pickle", "shelve"}


@dataclass(frozen=True)
class Import:
    module: str
    name: str | None
    line: int

    @property
    def dotted(self) -> str:
        return self.module if self.name is None else f"{self.module}.{self.name}"


def imports_of(tree: ast.AST, file: str) -> Iterator[Import]:
    """Every import in a file, lazy ones too, with relative ones made absolute."""
    package = ["torchrelay", *Path(file).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package[: len(package) - node.level + 1]
                base = ".".join([*anchor, base] if base else anchor)
            for alias in node.names:
                yield Import(base, alias.name, node.lineno)


def part_of(file: str) -> str:
    return Path(file).parts[0].removesuffix(".py")


def is_under(dotted: str, module: str) -> bool:
    return dotted == module or dotted.startswith(module + ".")


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def private_torch_uses(tree: ast.AST, file: str) -> Iterator[tuple[int, str]]:
    for found in imports_of(tree, file):
        if is_under(found.module, "torch") and any(map(is_private, found.dotted.split("."))):
            yield found.line, found.dotted
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if is_under(alias.name, "torch"):
                    roots.add(alias.asname or "torch")
        elif isinstance(node, ast.ImportFrom) and is_under(node.module or "", "torch"):
            roots |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            inner = node.value
            while isinstance(inner, ast.Attribute):
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in roots:
                yield node.lineno, ast.unparse(node)


def layer_problem(importer: str, found: Import) -> str | None:
    if not is_under(found.module, "torchrelay"):
        return None
    steps = found.dotted.split(".")[1:]
    target = steps[0] if steps else ""
    if target not in HEIGHT:
        if found.module != "torchrelay":
            return f"{found.dotted} is in no layer"
        if importer in MAY_IMPORT_FRONT_DOOR:
            return None
        return "imports the front door, which stands above it"
    if HEIGHT[target] > HEIGHT[importer]:
        return f"{importer} imports {target}, which stands above it"
    if frozenset({importer, target}) in STRANGERS:
        return f"{importer} and {target} never import each other"
    return None


def inner_problem(file: str, found: Import) -> str | None:
    """An import that points upwards inside of a part."""
    part, inside = part_of(file), Path(file).with_suffix("").parts[1:2]
    steps = found.dotted.split(".")
    if part not in INSIDE or not inside or steps[:2] != ["torchrelay", part] or len(steps) < 3:
        return None
    heights = {name: height for height, layer in enumerate(INSIDE[part]) for name in layer}
    mine, target = inside[0], steps[2]
    for name in (mine, target):
        if name not in heights and name != "__init__":
            return f"{part}/{name} is in no layer; give it a place in INSIDE"
    if heights[target] > heights[mine]:
        return f"{part}/{mine} imports {part}/{target}, which stands above it"
    return None


def purity_problem(file: str, found: Import) -> str | None:
    """An import by which a file that is pure would not be."""
    part = part_of(file)
    if part not in PURE and file not in PURE_MODULES:
        return None
    name = part if part in PURE else file
    for module in sorted(IMPURE):
        if module == "torch.distributed" and file in (
            "state/tensors.py",
            "state/meshes.py",
            "state/torch_private.py",
        ):
            continue
        if is_under(found.dotted, module):
            return f"{name} is pure, and imports {module}"
    steps = found.module.split(".")
    if file in PURE_MODULES and steps[0] == "torchrelay" and len(steps) > 1:
        above = HEIGHT.get(steps[1], 0) > max(HEIGHT[part] for part in PURE)
        if above and "/".join(steps[1:]) + ".py" not in PURE_MODULES:
            return f"{name} is pure, and imports {found.dotted}"
    return None


def problems(file: str, source: str) -> list[str]:
    """What a file, named relative to the package, does against the rules."""
    tree = ast.parse(source)
    part = part_of(file)
    found = list(imports_of(tree, file))
    out: list[str] = []
    most = PROTOCOL_LINES if file.startswith(PROTOCOL) else MAX_LINES
    if len(source.splitlines()) > most:
        out.append(f"{file}: over {most} lines")
    if file == "__init__.py":
        pass
    elif part not in HEIGHT:
        out.append(f"{file}: {part} is in no layer; give it a place in LAYERS")
    else:
        for item in found:
            if problem := layer_problem(part, item) or inner_problem(file, item):
                out.append(f"{file}:{item.line}: {problem}")
    for item in found:
        if problem := purity_problem(file, item):
            out.append(f"{file}:{item.line}: {problem}")
    if file not in PRIVATE_NAMES:
        for line, name in sorted(set(private_torch_uses(tree, file))):
            out.append(f"{file}:{line}: private torch name {name}")
    for node in ast.walk(tree) if file != "files.py" else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            looked, said = ast.unparse(node.func.value), node.func.attr
            if said in LOOKS and looked not in ("entry", "filesystem"):
                out.append(f"{file}:{node.lineno}: {looked}.{said}() hides errors: use files.py")
    for node in ast.walk(tree):
        made = isinstance(node, ast.Call) and ast.unparse(node.func) == "tuple"
        if made and any(isinstance(one, ast.GeneratorExp) for one in ast.iter_child_nodes(node)):
            # Python 3.10 makes an empty one that is not `()`: msgspec does not leave it out.
            out.append(f"{file}:{node.lineno}: a tuple of a generator: use a list")
    if part != "dropin":
        for item in found:
            if item.module.split(".")[0] in PICKLES:
                out.append(f"{file}:{item.line}: imports {item.module}")
    return out


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    finished: set[str] = set()
    trail: list[str] = []

    def visit(module: str) -> list[str] | None:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in finished:
            return None
        trail.append(module)
        for target in sorted(graph.get(module, ())):
            if cycle := visit(target):
                return cycle
        trail.pop()
        finished.add(module)
        return None

    for module in sorted(graph):
        if cycle := visit(module):
            return cycle
    return None


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    def module_name(file: str) -> str:
        steps = list(Path(file).with_suffix("").parts)
        return ".".join(["torchrelay", *(steps[:-1] if steps[-1] == "__init__" else steps)])

    modules = {module_name(file): file for file in sources}
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        edges = graph.setdefault(module, set())
        for item in imports_of(ast.parse(sources[file]), file):
            target = item.dotted if item.dotted in modules else item.module
            if target in modules and target != module and target != "torchrelay":
                edges.add(target)
    return graph


# Of the standard library. Integrations name those of their frameworks.
FOREIGN = {"_exit", "_replace", "_asdict", "_fields", "_make"}


def reached_into(sources: dict[str, str]) -> list[str]:
    """Uses of private names that another part of the library defines."""
    homes: dict[str, set[str]] = {}  # the parts that define a name
    uses: list[tuple[str, ast.Attribute]] = []
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            name = ""
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                name = node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            elif isinstance(node, ast.Attribute) and is_private(node.attr):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                name = node.attr if isinstance(node.ctx, ast.Store) and own else ""
                if not own and node.attr not in FOREIGN:
                    uses.append((file, node))
            if is_private(name):
                homes.setdefault(name, set()).add(part_of(file))
    return [
        f"{file}:{use.lineno}: {ast.unparse(use)} is private to {', '.join(sorted(parts))}"
        for file, use in uses
        if (parts := homes.get(use.attr, set())) and part_of(file) not in {*parts, "integrations"}
    ]


def library_sources() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(ROOT.rglob("*.py"))
    }


def test_library_keeps_the_rules() -> None:
    found = [p for file, source in library_sources().items() for p in problems(file, source)]
    assert not found, "\n".join(found)


def test_a_type_name_is_defined_once() -> None:
    """Private ones too. `dropin` gives its own torch's names where it exports them."""
    homes: dict[str, list[str]] = {}
    for file, source in library_sources().items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(file)
    twice = {name: files for name, files in homes.items() if len(files) > 1}
    assert not twice


def test_modules_that_are_listed_as_pure_are_there() -> None:
    assert library_sources().keys() >= PURE_MODULES


def test_no_part_reaches_into_another() -> None:
    assert reached_into(library_sources()) == []
    sources = {
        "keeper/front.py": "class Keeper:\n    def _lend(self): self._slots = 1",
        "relay.py": "def f(keeper): keeper._lend(); self._lend(); keeper._other()",
        "keeper/ranks.py": "def f(keeper): return keeper._slots",
        "cli/x.py": "def f(keeper): return keeper._slots",
    }
    assert reached_into(sources) == [
        "relay.py:1: keeper._lend is private to keeper",
        "cli/x.py:1: keeper._slots is private to keeper",
    ]


def test_library_has_no_import_cycle() -> None:
    cycle = find_cycle(import_graph(library_sources()))
    assert cycle is None, " -> ".join(cycle or [])


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("state/tree.py", "from torchrelay.transports import group", "stands above"),
        ("record/codec.py", "from torchrelay.state import tree", "stands above"),
        ("landing/land.py", "from ..memory.arena import Arena", "stands above"),
        ("errors.py", "def f():\n    import torchrelay.state", "stands above"),
        ("transports/routes/x.py", "from ...stores import local", "never import each other"),
        ("transports/wire/x.py", "from torchrelay.transports.meeting import node", "stands above"),
        ("transports/routes/x.py", "from ..protocol import sender", "stands above"),
        ("transports/more/x.py", "from ..wire import messages", "in no layer"),
        ("stores/local/x.py", "import torchrelay.transports.http", "never import each other"),
        ("stores/local/x.py", "from ..reading import chunks", "stands above"),
        ("stores/writer/x.py", "from torchrelay.shares import layout", "stands above"),
        ("stores/store.py", "from .local.store import LocalStore", "stands above"),
        ("stores/more/x.py", "from ..store import Store", "in no layer"),
        ("relay.py", "from . import recovery", "stands above"),
        ("stores/local/x.py", "Path(a).exists()", "hides errors"),
        ("cli/x.py", "import os\nos.path.isfile(a)", "hides errors"),
        ("record/x.py", "tuple(n for n in a)", "of a generator"),
        ("endpoint/pull.py", "from ..checkpointer import front", "stands above"),
        ("loading/loader.py", "from torchrelay.endpoint import pull", "stands above"),
        ("relay.py", "from torchrelay import Relay", "front door"),
        ("relay.py", "from torchrelay.nowhere import x", "in no layer"),
        ("helpers.py", "", "in no layer"),
        ("geometry/runs.py", "import os.path", "pure"),
        ("describing/images.py", "from torch import distributed", "pure"),
        ("state/tensors.py", "import socket", "pure"),
        ("planning/holder_reads.py", "def f():\n    import threading", "pure"),
        ("transports/protocol/receiver_machine.py", "def f():\n    import threading", "pure"),
        ("transports/protocol/receive_plan.py", "from .holder import LiveHolder", "pure"),
        ("relay.py", "from torch._utils import x", "private torch"),
        ("relay.py", "from torch.distributed.tensor import _api", "private torch"),
        ("relay.py", "import torch.distributed as dist\ndist._x()", "private torch"),
        ("relay.py", "import torch\ntorch._C._y()", "private torch"),
        ("state/tensors.py", "from torch.distributed.tensor._api import x", "private torch"),
        ("dropin/pg.py", "from torch.distributed._x import y", "private torch"),
        ("integrations/hf.py", "import pickle", "imports pickle"),
        ("__init__.py", "from pickle import loads", "imports pickle"),
        ("errors.py", "\n" * (MAX_LINES + 1), "over 500 lines"),
        (f"{PROTOCOL}wire.py", "\n" * (PROTOCOL_LINES + 1), "over 399 lines"),
    ],
)
def test_a_violation_is_seen(file: str, source: str, expected: str) -> None:
    found = problems(file, source)
    assert any(expected in problem for problem in found), found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("__init__.py", "from torchrelay.recovery import recover\nfrom .relay import Relay"),
        ("state/torch_private.py", "from torch.distributed.tensor._api import x"),
        ("state/tree.py", "from torchrelay.errors import E\nfrom .paths import Path\nimport torch"),
        ("transports/routes/x.py", "from ...state.tree import Tree\nfrom ..wire import messages"),
        ("stores/reading/x.py", "from ..writer import client\nfrom .. import store"),
        ("shares/x.py", "from torchrelay.stores.writer import client"),
        ("dropin/pg.py", "import pickle\nfrom torch.distributed import tensor"),
        ("cli.py", "import torchrelay as tr\nfrom torchrelay import demo\nimport torch"),
        ("relay.py", "import torch\ntorch.__version__"),
        (
            "transports/protocol/receive_plan.py",
            "from torchrelay.planning.holder_reads import R\nimport torch",
        ),
        (
            "transports/protocol/receiver.py",
            "from torchrelay.memory.thread_pool import run_on_threads\nimport os",
        ),
    ],
)
def test_what_is_allowed_passes(file: str, source: str) -> None:
    assert problems(file, source) == []


def test_a_cycle_is_seen() -> None:
    sources = {
        "state/__init__.py": "from .tree import Tree",
        "state/tree.py": "from torchrelay.state import paths",
        "state/paths.py": "def f():\n    from .tree import Tree",
    }
    cycle = find_cycle(import_graph(sources))
    assert cycle is not None
    assert set(cycle) == {"torchrelay.state.tree", "torchrelay.state.paths"}
    sources["state/paths.py"] = ""
    assert find_cycle(import_graph(sources)) is None
