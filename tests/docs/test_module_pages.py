"""Module pages, index and section map are those that the code gives, and name only what exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributed.checkpoint import _checkpointer, _pg_transport

import torchrelay as tr
from tools.docs import names
from tools.docs.__main__ import stale
from tools.docs.headings import DOCS, GENERATED, module_pages, read
from tools.docs.sources import ROOT, pages
from torchrelay import dropin, errors

MODULES = DOCS / "modules"
PAGES = module_pages()
SECTIONS = [
    "Overview",
    "Detailed analysis",
    "Architecture and design",
    "Dependencies",
    "Performance",
    "Security and safety",
    "Testing and usage",
    "Keywords",
]
INDEX = (DOCS / "index-a-z.md").read_text(encoding="utf-8")


def test_generated_pages_are_those_that_the_code_gives() -> None:
    if not torch.__version__.startswith("2.13"):
        pytest.skip("the pages show the signatures of torch 2.13")
    found = [path.relative_to(ROOT).as_posix() for path in stale()]
    assert not found, f"run `make pages`: stale are {found}"


@pytest.mark.parametrize("page", pages())
def test_each_package_has_a_page_with_all_sections(page: str) -> None:
    found = [
        heading.text for heading in read(MODULES / f"{page}.md").headings if heading.level == 2
    ]
    wanted = [name for name in SECTIONS if page != "errors" or name in found]
    assert [name for name in found if name in SECTIONS] == wanted


def functions_of(module: ModuleType) -> list[str]:
    """Functions, records and methods of a module of torch, as its page has them in headings."""
    found = []
    for node in ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.append(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
            found += [node.name, *(f"{node.name}.{name}" for name in methods)]
    return found


def test_the_page_of_the_transport_has_every_name_of_torchs_module() -> None:
    headings = {heading.text for heading in read(MODULES / "dropin-pg-transport.md").headings}
    wanted = set(functions_of(_pg_transport)) - {"PGTransport.__init__"}
    assert wanted <= headings, wanted - headings


@pytest.mark.parametrize(
    "record", ["_TensorMeta", "_DTensorMeta", "_ShardedTensorMeta", "_StateDictMeta"]
)
def test_the_page_of_the_transport_has_every_field(record: str) -> None:
    text = (MODULES / "dropin-pg-transport.md").read_text(encoding="utf-8")
    section = text.split(f"\n### {record}\n", 1)[1].split("\n#", 1)[0]
    shown = re.findall(r"^\| `(\w+)` \|", section, re.M)
    assert shown == list(getattr(dropin, record).__dataclass_fields__)


def test_the_page_of_the_checkpointer_has_every_method_of_torchs_class() -> None:
    headings = {heading.text for heading in read(MODULES / "dropin-checkpointer.md").headings}
    methods = {name.partition(".")[2] for name in functions_of(_checkpointer)} - {"", "__init__"}
    assert methods == {"save", "async_save", "load"} and methods <= headings


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_tests_that_a_page_names_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for file, _, test in re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)(::(\w+))?`", text):
        assert (ROOT / file).is_file(), file
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert not test or test in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, (
            test
        )


@pytest.mark.parametrize(
    "path", [*PAGES, *(DOCS / name for name in GENERATED)], ids=lambda p: p.stem
)
def test_links_of_generated_pages_resolve(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    anchors: dict[Path, set[str]] = {}
    for target in set(re.findall(r"\]\(([^)\s]+)\)", text)):
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.is_file(), target
        if anchor:
            if there not in anchors:
                anchors[there] = {heading.anchor for heading in read(there).headings}
            assert anchor in anchors[there], target


def entries() -> set[str]:
    return set(re.findall(r"^- `([^`]+)` \(", INDEX, re.M))


def test_the_index_has_every_public_name() -> None:
    wanted = {*tr.__all__, *dropin.__all__} - {"errors", "options"}
    wanted |= {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.RelayError)
    }
    wanted |= {"torchrelay.errors"}
    assert wanted <= entries(), wanted - entries()


def test_the_index_has_every_command_option_parameter_and_field() -> None:
    wanted = set()
    for command in names.commands():
        wanted |= {f"torchrelay {command.name}", *command.options}
    assert "torchrelay pull" in wanted
    for one in names.public():
        wanted |= {*one.parameters, *one.fields} - {"args", "kwargs"}
    assert wanted <= entries(), wanted - entries()
