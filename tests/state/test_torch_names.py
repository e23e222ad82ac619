"""Torch's private names: which files use them, and that the installed torch has each."""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_layers import PRIVATE_NAMES, is_private, library_sources
from torchrelay.dropin import torch_private as dropins
from torchrelay.errors import RelayError, UnsupportedTorchError
from torchrelay.record.meshes import mesh_of
from torchrelay.state import torch_private as library
from torchrelay.state.meshes import described_mesh
from torchrelay.state.torch_names import if_imported, lazily, look_up

SRC = Path(__file__).resolve().parents[2] / "src"
# What torch pickles is read by the names in it: they are text, and nothing is looked up by them.
PICKLED = ("dropin/_pickles/", "dropin/_dcp_metadata.py")
# Objects of other projects (accelerate, Lightning, torchdata, verl), whose names these are.
STRANGERS = "integrations/"
LOOKUPS = {"getattr", "hasattr", "setattr", "attrgetter", "delattr"}


def own_names(sources: dict[str, str]) -> set[str]:
    """Private names that the library defines somewhere."""
    found = set(dir(tuple)) | {"_replace", "_fields", "_asdict", "_make"}  # of namedtuples
    for source in sources.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
                if isinstance(node, ast.Name):
                    found.add(node.id)
                elif ast.unparse(node.value) in ("self", "cls"):
                    found.add(node.attr)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
    return found


def foreign_uses(file: str, source: str, own: set[str]) -> Iterator[str]:
    """Private names in a file that are not the library's: attributes of any object, whatever it
    is called, arguments by keyword, and dotted names of torch in text."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "os":
            names = [node.attr]
        elif isinstance(node, ast.Call):
            names = [keyword.arg for keyword in node.keywords if keyword.arg]
            if ast.unparse(node.func).rpartition(".")[2] in LOOKUPS:
                texts = [one.value for one in node.args if isinstance(one, ast.Constant)]
                names += [text for text in texts if isinstance(text, str)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            dotted = node.value.split()[0].split(".") if node.value.startswith("torch.") else []
            if any(map(is_private, dotted)) and not file.startswith(PICKLED):
                yield f"{file}:{node.lineno}: {node.value!r}"
        for name in names:
            if is_private(name) and name not in own:
                yield f"{file}:{node.lineno}: {name}"


def test_two_files_use_private_names_of_torch() -> None:
    sources = library_sources()
    own = own_names(sources) | {"_Unpickler"}  # that of the standard library
    found = [
        use
        for file, source in sources.items()
        if file not in PRIVATE_NAMES and not file.startswith(STRANGERS)
        for use in foreign_uses(file, source, own)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "x._local_tensor",
        "getattr(x, '_spec', None)",
        "make(_init_backend=False)",
        "names = ['torch.utils._pytree.keystr']",
        "attrgetter('_version')",
    ],
)
def test_a_use_elsewhere_is_seen(source: str) -> None:
    assert list(foreign_uses("relay.py", source, {"_own"}))


def test_what_is_the_librarys_own_passes() -> None:
    source = "x._own\ngetattr(x, 'public')\nmake(_own=1)\n'torch.utils.data'"
    assert not list(foreign_uses("relay.py", source, {"_own"}))


def test_all_private_names_are_in_the_tables() -> None:
    """The two files use no other than those that the cases below are made of."""
    listed = {part for dotted in CASES for part in dotted.replace("(", ".").split(".")}
    listed |= {"_init_backend", "_rank"}
    for file in PRIVATE_NAMES:
        source = (SRC / "torchrelay" / file).read_text("utf-8")
        own = own_names({file: source}) | listed
        tables = {"_SHARD", "_SHARDED", "_SPEC", "_TENSOR", "_PYTREE", "_RECORDS", "_GROUPS"}
        found = list(foreign_uses(PICKLED[0] + file, source, own | tables))
        assert not found, "\n".join(found)


# A case for each


def _mesh() -> Any:
    return described_mesh(mesh_of("cpu", (2,), (0, 1), None), 0)


# Attributes that torch gives to instances alone.
INSTANCES: dict[str, Callable[[], Any]] = {
    dropins.FIELDS["layout_of"]: _mesh,
    dropins.FIELDS["coordinate_of"]: _mesh,
}
DECLARED = {library.MARK}  # by a class, for those that have them
CASES = {
    *library.NAMES.values(),
    *library.FIELDS.values(),
    *dropins.NAMES.values(),
    *dropins.FIELDS.values(),
    *(f"{of}({name})" for of, names in library.PARAMETERS.items() for name in names),
    library.MARK,
    library.OPTIONAL,
    library.SLOW_TO_IMPORT,
    dropins.FLAT_LAYOUT,
}


def annotations_of(kind: type) -> dict[str, Any]:
    if sys.version_info < (3, 14):
        return vars(kind).get("__annotations__", {})
    import annotationlib

    return annotationlib.get_annotations(kind, format=annotationlib.Format.FORWARDREF)


@pytest.mark.parametrize("dotted", sorted(CASES))
def test_torch_has(dotted: str) -> None:
    owner, _, name = dotted.rstrip(")").replace("(", ".").rpartition(".")
    if dotted.endswith(")"):
        assert name in inspect.signature(look_up(owner)).parameters
    elif dotted in DECLARED:
        declared = [*map(annotations_of, look_up(owner).__mro__)]
        assert any(name in one for one in declared) or hasattr(look_up(owner), name)
    elif dotted in INSTANCES:
        assert hasattr(INSTANCES[dotted](), name)
    elif dotted == library.OPTIONAL and not torch.backends.cuda.is_built():
        pytest.skip("no such case: a torch that was built without CUDA has none")
    elif dotted == dropins.FLAT_LAYOUT and torch.__version__ < "2.12":
        pytest.skip("since torch 2.12")
    else:
        assert look_up(dotted) is not None


# What happens where torch has moved one


@pytest.mark.parametrize(
    "dotted",
    ["torch._gone", "torch._gone.there", "torch.Tensor._gone", "torch.utils._pytree._gone"],
)
def test_a_name_that_torch_has_moved_is_told(dotted: str) -> None:
    names: dict[str, Any] = {"__name__": "here"}
    find = lazily(names, {"gone": dotted}, {"gone_of": dotted})
    with pytest.raises(UnsupportedTorchError) as caught:
        find("gone")
    assert dotted in str(caught.value) and torch.__version__ in str(caught.value)
    with pytest.raises(UnsupportedTorchError, match=dotted.replace(".", r"\.")):
        find("gone_of")(torch.ones(1))
    assert "gone" not in names
    with pytest.raises(AttributeError, match="another"):
        find("another")


def test_the_error_travels_with_its_context() -> None:
    error = UnsupportedTorchError("torch has no x", path="a.b", rank=3)
    assert (error.path, error.rank) == ("a.b", 3)
    assert isinstance(error, ImportError) and isinstance(error, RelayError)
    assert str(pickle.loads(pickle.dumps(error))) == "torch has no x (rank 3, at a.b)"


def test_what_was_not_imported_has_no_objects() -> None:
    assert if_imported("torch.never_imported.Thing") is None
    assert if_imported("torch.Tensor") is torch.Tensor


WITHOUT = """
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name == {gone!r} or name.startswith({gone!r} + "."):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Gone())
"""


def run_without(gone: str, program: str) -> str:
    command = [sys.executable, "-c", WITHOUT.format(gone=gone) + program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_states_travel_without_the_old_shards() -> None:
    """All of them but those that have old shards in them."""
    program = """
import tempfile, torch, torchrelay
from torchrelay.state import torch_private
state = {"w": torch.arange(6.0).reshape(2, 3), "n": 3}
with tempfile.TemporaryDirectory() as folder:
    ckpt = torchrelay.Checkpointer(folder)
    ckpt.save(1, state)
    got = ckpt.load().state
assert torch.equal(got["w"], state["w"]) and got["n"] == 3
assert torch_private.sharded_types() == ()
try:
    torch_private.ShardedTensor
except torchrelay.errors.UnsupportedTorchError as error:
    print(error)
"""
    said = run_without("torch.distributed._shard", program)
    assert "has no torch.distributed._shard.sharded_tensor.api.ShardedTensor" in said


def test_checkpointers_need_no_record_of_a_transport() -> None:
    program = """
import torch.distributed.checkpoint._pg_transport as records
from torchrelay.dropin import Checkpointer
del records._DTensorMeta
try:
    from torchrelay.dropin import PGTransport
except ImportError as error:
    print(type(error).__name__, error)
"""
    said = run_without("torch.nothing", program)
    assert said.startswith("UnsupportedTorchError") and "_pg_transport._DTensorMeta" in said
