"""The public API stays small: few names, few parameters, one meaning for each of them."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import torchrelay as tr
from torchrelay.endpoint.front import Endpoint
from torchrelay.endpoint.share import SharedState
from torchrelay.options import PullOptions, RecoverOptions
from torchrelay.weights.subscription import Subscription

MOST_NAMES = 20
MOST_PARAMETERS = 10
RESULTS = ("Loaded", "Report")  # callers read their fields, and never make one
RETURNED = (Endpoint, SharedState, Subscription)  # classes that users have without naming them
# The default of each argument that several calls take.
SHARED = {
    "into": None,
    "step": None,
    "strict": True,
    "include": (),
    "atomic": True,
    "progress": None,
}
REPLACED = {"under", "only", "stage", "token", "token_file", "cafile", "certfile", "keyfile"}


def callables(kinds: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Functions, classes and public methods, by name."""
    for name, value in kinds.items():
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value) and not issubclass(value, BaseException):
            yield name, value
            for method, function in inspect.getmembers(value, inspect.isfunction):
                if not method.startswith("_"):
                    yield f"{name}.{method}", function


def parameters(value: Any) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(value).parameters)
    found.pop("self", None)
    return found


def problems(kinds: dict[str, Any]) -> list[str]:
    """The rules that a set of exported values breaks."""
    out = []
    for name, value in callables(kinds):
        taken = {} if name in RESULTS else parameters(value)
        if len(taken) > MOST_PARAMETERS:
            out.append(f"{name} has {len(taken)} parameters")
        if not inspect.getdoc(value) or (inspect.isclass(value) and "__doc__" not in vars(value)):
            out.append(f"{name} has no docstring")
        out += [f"{name} takes {word}, which has another name" for word in REPLACED & set(taken)]
        for word, default in SHARED.items():
            one = taken.get(word)
            if one is not None and one.default not in (default, inspect.Parameter.empty):
                out.append(f"{name} has {word}={one.default!r} by default, others {default!r}")
    return out


EXPORTED = {name: getattr(tr, name) for name in tr.__all__}
# `Access` is where tokens and certificates are given.
CHECKED = {name: value for name, value in EXPORTED.items() if name != "Access"}
CHECKED |= {kind.__name__: kind for kind in RETURNED}


def test_few_names() -> None:
    assert len(tr.__all__) <= MOST_NAMES
    assert tr.__all__ == sorted(set(tr.__all__))


def test_few_parameters_with_one_meaning_each() -> None:
    assert problems(CHECKED) == []
    assert len(parameters(tr.Access)) <= MOST_PARAMETERS and inspect.getdoc(tr.Access)


ORDER = ["into", "step", "min_step", "key", "include", "strict", "timeout"]
ORDER += ["access", "group", "no_dist", "options"]


def test_calls_that_bring_a_state_take_the_same_arguments_in_the_same_order() -> None:
    """Spelled out, so that an editor completes them; rare ones are fields of a record."""
    found = {}
    for call in (tr.Checkpointer.load, tr.Checkpointer.restore, tr.pull, tr.recover, tr.subscribe):
        taken = parameters(call)
        assert not any(one.kind is one.VAR_KEYWORD for one in taken.values()), call
        shared = [name for name in taken if name in ORDER]
        assert shared == sorted(shared, key=ORDER.index), call
        for name in ("key", "include", "timeout"):
            assert name in taken, (call, name)
        found[call.__name__] = list(taken)
    assert found["pull"][:2] == ["source", "into"] and found["recover"][:2] == ["sources", "into"]
    assert found["subscribe"][:2] == ["source", "into"] and found["load"][0] == "into"
    for name, one in parameters(tr.Checkpointer.load).items():
        for record in (PullOptions, RecoverOptions):
            rare = parameters(record).get(name)
            assert rare is None or rare.default == one.default, (record, name)


def test_verify_has_one_default_and_one_meaning() -> None:
    calls = (tr.Relay, tr.Checkpointer.load, tr.Checkpointer.restore, PullOptions, RecoverOptions)
    assert {parameters(call)["verify"].default for call in calls} == {True}
    with pytest.raises(tr.errors.UsageError, match='True, False or "all"'):
        tr.pull("http://127.0.0.1:9", options=PullOptions(verify=None))  # type: ignore[arg-type]


def test_arguments_that_are_a_number_have_their_unit_in_the_name() -> None:
    bare = {"hold", "stall", "lease", "rate", "cost", "max_age", "memory"}
    records = {name: getattr(tr.options, name) for name in dir(tr.options) if "Options" in name}
    assert len(records) == 5
    for name, value in callables({**CHECKED, **records}):
        assert not bare & set(parameters(value)), name


def test_no_dist_is_this_process_alone() -> None:
    calls = (tr.Checkpointer, tr.Keeper, tr.serve, tr.pull, tr.recover, tr.subscribe)
    for call in calls:
        taken = list(parameters(call))
        assert taken[taken.index("group") + 1] == "no_dist", call
    with pytest.raises(tr.errors.UsageError, match="leave group= out"):
        tr.recover(["x"], group=object(), no_dist=True)
    with pytest.raises(tr.errors.UsageError, match="group is a process group"):
        tr.recover(["x"], group=False)


TOGETHER = [tr.recover, tr.pull, tr.subscribe, tr.serve, Subscription.update, Endpoint.publish]
TOGETHER += [
    tr.Keeper.stage,
    *(
        getattr(tr.Checkpointer, name)
        for name in (
            *("save", "save_async", "stage", "prepare", "load", "restore", "rollback"),
            "reached_preemption",
        )
    ),
]


@pytest.mark.parametrize("call", TOGETHER, ids=lambda call: call.__qualname__)
def test_calls_of_all_ranks_say_so_first(call: Any) -> None:
    assert (inspect.getdoc(call) or "").startswith("All ranks call it")


def test_signatures_are_those_of_the_reference() -> None:
    """Every signature in docs/reference.md is that of the code, and none is long."""
    page = (Path(__file__).parents[1] / "docs" / "reference.md").read_text(encoding="utf-8")
    shown = {m[1]: m[2] for m in re.finditer(r"^### `([\w.]+)(\(.*\))`$", page, re.M)}
    assert len(shown) > 60
    assert [name for name, text in shown.items() if count_of(text) > MOST_PARAMETERS] == []
    for name, value in callables(CHECKED):
        written = str(inspect.signature(value).replace(return_annotation=inspect.Signature.empty))
        assert name not in shown or names_in(shown[name]) == list(parameters(value)), written


def names_in(signature: str) -> list[str]:
    """The names of the parameters that a signature shows."""
    tree = ast.parse(f"def shown{signature}: ...").body[0]
    assert isinstance(tree, ast.FunctionDef)
    given = tree.args
    return [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def count_of(signature: str) -> int:
    return len(names_in(signature))


# The page on routes shows those who change the library how one is added.
INTERNAL = {
    ("routes.md", f"torchrelay.transports.{name}")
    for name in ("routes", "routes.route", "wire.messages")
}
PUBLIC = re.compile(r"torchrelay(\.(errors|options|dcp|weights|dropin|metrics|integrations\.\w+))?")


def test_docs_and_examples_import_public_modules_alone() -> None:
    root = Path(__file__).parents[1]
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    texts = {
        page: "\n".join(re.findall(r"^```python[^\n]*\n(.*?)^```", page.read_text(), re.M | re.S))
        for page in pages
    }
    texts |= {page: page.read_text() for page in (root / "examples").rglob("*.py")}
    seen = 0
    for page, text in texts.items():
        for module in re.findall(r"^\s*(?:from|import) (torchrelay[\w.]*)", text, re.M):
            seen += 1
            internal = (page.name, module) in INTERNAL
            assert internal or PUBLIC.fullmatch(module), f"{page}: {module}"
    assert seen > 30


def test_a_violation_is_seen() -> None:
    def undocumented(into: object = None) -> None: ...

    def wide(
        a: int, b: int, c: int, d: int, e: int, f: int, g: int, h: int, i: int, j: int, k: int
    ) -> None:
        """Eleven."""

    class Odd:
        """A class with an odd method."""

        def load(self, *, only: str = "", strict: bool = False) -> None:
            """Other words than elsewhere."""

    found = problems({"undocumented": undocumented, "wide": wide, "Odd": Odd})
    assert found == [
        "undocumented has no docstring",
        "wide has 11 parameters",
        "Odd.load takes only, which has another name",
        "Odd.load has strict=False by default, others True",
    ]


def test_errors_are_in_their_module() -> None:
    kinds = [kind for kind in vars(tr.errors).values() if inspect.isclass(kind)]
    own = [kind for kind in kinds if issubclass(kind, tr.errors.RelayError)]
    assert len(own) > 20 and all(kind.__doc__ for kind in own)
    assert [name for name in tr.__all__ if name.endswith("Error")] == []
    with pytest.raises(AttributeError, match="DamagedError"):
        tr.DamagedError  # noqa: B018


def test_results_are_of_one_type() -> None:
    loads = (tr.Relay.recv, tr.Checkpointer.load, tr.pull)
    assert {_returned(call) for call in loads} == {"Loaded"}
    assert _returned(tr.recover) == "Loaded | None"
    assert {_returned(call) for call in (tr.Relay.send, tr.Checkpointer.save)} == {"Report"}
    background = (tr.Checkpointer.save_async, tr.Checkpointer.stage, tr.Keeper.stage)
    assert {_returned(call) for call in (*background, Endpoint.publish)} == {"Pending"}
    assert get_type_hints(tr.Loaded)["report"] is tr.Report


def _returned(call: Any) -> str:
    return str(inspect.signature(call).return_annotation)


def test_a_name_is_imported_when_it_is_used() -> None:
    """`import torchrelay` is fast, and `dir` has all names before they are imported."""
    code = (
        "import sys, torchrelay as tr; assert set(tr.__all__) <= set(dir(tr)); "
        "assert tr.errors.UsageError.__mro__; assert 'torch' not in sys.modules; "
        "[getattr(tr, name) for name in tr.__all__]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_report_goes_to_another_process() -> None:
    """Programs send reports to their main process."""
    report = tr.Report(3, 12, {"join": 0.25})
    assert pickle.loads(pickle.dumps(report)) == report
    assert str(report) == "step 3: 12 bytes in 0.25 s\n  join 0.25 s"
