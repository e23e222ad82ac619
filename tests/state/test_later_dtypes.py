"""Dtypes that a later torch brings: refused by path in every API until their names are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.states import QUANTIZED
from tests.support.trips import trip
from torchrelay.record.dtypes import ITEM_SIZES
from torchrelay.state.tensors import NAMES

LATER = torch.float64
"""A dtype that these tests take out of the table, as if it were of a later torch."""


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(NAMES, LATER)


def _state(dtype: torch.dtype) -> dict[str, Any]:
    return {"model": {"weight": torch.ones(3), "bias": torch.ones(3, dtype=dtype)}}


def _save(state: object, root: Path) -> None:
    with tr.Checkpointer(root, timeout=30) as checkpointer:
        checkpointer.save(1, state)


def _save_in_the_background(state: object, root: Path) -> None:
    with tr.Checkpointer(root, timeout=30) as checkpointer:
        checkpointer.save_async(1, state).result()


def _publish(state: object, root: Path) -> None:
    with tr.serve({"nothing": torch.zeros(1)}, step=0, timeout=60) as endpoint:
        endpoint.publish(state, step=1).result(60)


SOURCES: list[Callable[[object, Path], Any]] = [
    lambda state, root: trip(state),
    _save,
    _save_in_the_background,
    _publish,
]


@pytest.mark.parametrize("api", SOURCES, ids=["send", "save", "save_async", "serve"])
def test_a_source_with_one_is_refused_by_path(
    api: Callable[[object, Path], Any], tmp_path: Path
) -> None:
    with pytest.raises(tr.errors.UnsupportedLeafError, match="float64") as refused:
        api(_state(LATER), tmp_path)
    assert refused.value.path == "['model']['bias']"


def test_a_destination_with_one_is_refused_by_path() -> None:
    into = _state(LATER)
    with pytest.raises(tr.errors.RelayError, match="float64") as refused:
        trip(_state(torch.float32), into=into)
    assert refused.value.path == "['model']['bias']"
    assert torch.equal(into["model"]["weight"], torch.ones(3))


def test_a_load_into_one_is_refused_by_path(tmp_path: Path) -> None:
    _save(_state(torch.float32), tmp_path)
    with tr.Checkpointer(tmp_path, timeout=30) as checkpointer:
        with pytest.raises(tr.errors.RelayError, match="float64") as refused:
            checkpointer.load(into=_state(LATER))
    assert refused.value.path == "['model']['bias']"


def test_every_dtype_of_this_torch_has_a_name() -> None:
    """Fails where torch has a dtype that is new: give it its item size in `record/dtypes.py`. Those
    of quantized tensors have none."""
    known = {getattr(torch, name) for name in ITEM_SIZES if hasattr(torch, name)}
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert every == known | set(QUANTIZED)
    for dtype in known:
        assert ITEM_SIZES[str(dtype).removeprefix("torch.")] == dtype.itemsize, dtype
