"""What is converted can be read: by torchrelay, and by `torch.load(weights_only=True)`."""

from __future__ import annotations

import collections
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchrelay as tr
from torchrelay.dropin.conversion import convert
from torchrelay.dropin.stock_dcp import (
    read_stock,
    read_torch_save,
    write_stock,
    write_torch_save,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
Pair = collections.namedtuple("Pair", "x y")


def state() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(3.0)},
        "rng": np.random.RandomState(3).get_state(),
        "array": np.arange(6, dtype=">f4").reshape(2, 3),
        "empty": np.zeros((0, 2), np.int16),
        "scalars": [np.float64(1.5), np.float32(0.1), np.int64(-3), np.bool_(True), np.str_("s")],
        "window": collections.deque([1, 2], maxlen=3),
        "counts": collections.defaultdict(list, a=[1]),
        "place": Path("a/b"),
        "buffer": io.BytesIO(b"bytes"),
        "pair": Pair(1, 2.0),
    }


def check(got: dict[str, Any]) -> None:
    """Each value in the nearest type that every reader takes."""
    name, keys, *rest = got["rng"]
    random = np.random.RandomState()
    random.set_state((name, np.asarray(keys), *rest))
    assert random.random() == np.random.RandomState(3).random()
    assert got["array"].dtype is torch.float32 and got["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert got["empty"].dtype is torch.int16 and got["empty"].shape == (0, 2)
    scalars = [1.5, float(np.float32(0.1)), -3, True, "s"]
    assert got["scalars"] == scalars
    assert list(map(type, got["scalars"])) == list(map(type, scalars))
    assert got["window"] == [1, 2] and type(got["window"]) is list
    assert got["counts"] == {"a": [1]} and type(got["counts"]) is dict
    assert got["place"] == "a/b" and got["buffer"] == b"bytes"
    assert tuple(got["pair"]) == (1, 2.0)


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    with tr.Checkpointer(tmp_path / "steps") as checkpointer:
        checkpointer.save(1, state())
    return tmp_path / "steps"


def test_to_a_file_and_back(steps: Path, tmp_path: Path) -> None:
    convert(steps, tmp_path / "state.pt", to="torch")
    check(torch.load(tmp_path / "state.pt", weights_only=True))
    check(read_torch_save(tmp_path / "state.pt"))
    convert(tmp_path / "state.pt", tmp_path / "again", step=2)
    with tr.Checkpointer(tmp_path / "again") as checkpointer:
        check(checkpointer.load().state)


def test_to_a_directory_of_dcp_and_back(steps: Path, tmp_path: Path) -> None:
    convert(steps, tmp_path / "dcp", to="dcp")
    check(read_stock(tmp_path / "dcp"))
    into = {"model": {"w": torch.zeros(3)}, "place": "", "buffer": b""}
    dcp.load(into, checkpoint_id=tmp_path / "dcp")
    assert into["place"] == "a/b" and into["model"]["w"].tolist() == [0, 1, 2]
    convert(tmp_path / "dcp", tmp_path / "again", step=2)
    with tr.Checkpointer(tmp_path / "again") as checkpointer:
        check(checkpointer.load().state)


@pytest.mark.parametrize("write", [write_torch_save, write_stock])
@pytest.mark.parametrize(
    "odd",
    [
        np.array(["text"]),
        np.array(["2024-01-01"], "M8[D]"),
        np.zeros(2, [("a", "i4")]),
        np.datetime64("2024-01-01"),
        np.longdouble(1),
        object(),
        int,
        {1, tuple},
    ],
    ids=lambda odd: type(odd).__name__ if not isinstance(odd, np.ndarray) else str(odd.dtype),
)
def test_what_no_reader_takes_is_refused_by_path(tmp_path: Path, write: Any, odd: Any) -> None:
    with pytest.raises(tr.errors.UnsupportedLeafError) as caught:
        write(tmp_path / "target", {"a": {"odd": [0, odd]}})
    assert caught.value.path == "['a']['odd'][1]"
    assert list(tmp_path.iterdir()) == []
