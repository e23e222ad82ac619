"""The public API stays small: few names, few parameters, one meaning for each of them."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

import torchrelay as tr
from torchrelay.endpoint.front import Endpoint
from torchrelay.endpoint.pull_options import PullOptions
from torchrelay.endpoint.share import SharedState
from torchrelay.weights.subscription import Subscription

MOST_NAMES = 18
MOST_PARAMETERS = 10
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
        taken = parameters(value)
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


def test_pull_and_recover_land_a_state_as_load_does() -> None:
    """The options that they take by `**landing` are arguments of `load`."""
    options = set(PullOptions.__annotations__)
    assert options <= set(parameters(tr.Checkpointer.load)) and len(options) <= MOST_PARAMETERS
    assert not options & {*parameters(tr.pull), *parameters(tr.recover)}


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
    own = [kind for kind in kinds if issubclass(kind, tr.RelayError)]
    assert len(own) > 20 and all(kind.__doc__ for kind in own)
    assert [name for name in tr.__all__ if name.endswith("Error")] == ["RelayError"]
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
