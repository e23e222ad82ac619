"""Types of the standard library that need no registration: paths, deques, counters, buffers."""

from __future__ import annotations

import collections
import dataclasses
import io
import pathlib
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.ranks import RankPool


def state() -> dict[str, Any]:
    buffer = io.BytesIO(b"what was \x00 written")
    buffer.seek(5)
    return {
        "path": Path("runs") / "a",
        "pure": [pathlib.PurePosixPath("/x"), pathlib.PureWindowsPath("C:/x")],
        "odd path": Path("caf\udce9"),
        "window": collections.deque([1.5, torch.ones(2), None], maxlen=4),
        "queue": collections.deque(),
        "counts": collections.Counter({"a": 3, 7: 1}),
        "buffer": buffer,
    }


def check(got: dict[str, Any]) -> None:
    sent = state()
    assert [type(x) for x in got.values()] == [type(x) for x in sent.values()]
    for name in ("path", "pure", "odd path", "counts", "queue"):
        assert got[name] == sent[name], name
    assert got["queue"].maxlen is None and got["window"].maxlen == 4
    assert got["window"][0] == 1.5 and got["window"][2] is None
    assert torch.equal(got["window"][1], torch.ones(2))
    assert got["buffer"].getvalue() == sent["buffer"].getvalue() and got["buffer"].tell() == 5


def other() -> dict[str, Any]:
    return {
        "path": Path("elsewhere"),
        "pure": [pathlib.PurePosixPath("y"), pathlib.PureWindowsPath("y")],
        "odd path": Path(),
        "window": collections.deque([0.0, torch.zeros(2), 1], maxlen=9),
        "queue": collections.deque(maxlen=3),
        "counts": collections.Counter({"a": 1, 7: 9}),
        "buffer": io.BytesIO(),
    }


def test_saved_and_loaded(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state())
        check(checkpointer.load().state)
        for atomic in (True, False):
            into = other()
            window = into["window"][1]
            checkpointer.load(into, atomic=atomic)
            check(into)
            assert into["window"][1] is window  # filled in place


def test_served_and_pulled() -> None:
    with tr.serve(state(), step=1, timeout=60) as endpoint:
        check(tr.pull(endpoint.url, timeout=60).state)
        into = other()
        tr.pull(endpoint.url, into=into, timeout=60)
        check(into)


def relayed(rank: int, group: Any) -> None:
    with tr.Relay(group, timeout=30) as relay:
        for step, (source, into) in enumerate([(0, None), (0, other()), ([0], None)]):
            if rank == 0:
                relay.send(state(), to=[1], step=step)
            else:
                check(relay.recv(source, into=into, step=step).state)


def test_sent_and_received(pool2: RankPool) -> None:
    pool2.run(relayed)


class Sub(collections.deque):  # type: ignore[type-arg]
    """Another type, which nobody has registered."""


@dataclasses.dataclass
class Config:
    width: int
    weights: torch.Tensor


@pytest.mark.parametrize(
    ("leaf", "remedy"),
    [
        (Config(1, torch.ones(1)), r"call torchrelay\.register\(Config\)"),
        (Sub(), r"call torchrelay\.register\(Sub, encode=list, decode=Sub\) on every rank"),
    ],
    ids=["dataclass", "subclass"],
)
def test_others_are_refused_with_the_remedy(tmp_path: Path, leaf: Any, remedy: str) -> None:
    with tr.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(tr.errors.UnsupportedLeafError, match=remedy) as caught:
            checkpointer.save(1, {"x": [leaf]})
        assert caught.value.path == "['x'][0]"


def test_a_dataclass_takes_one_call(tmp_path: Path) -> None:
    @tr.register
    @dataclasses.dataclass
    class Settings:
        place: Path
        history: collections.deque[float]
        weights: torch.Tensor

    saved = Settings(Path("a"), collections.deque([1.0, 2.0], maxlen=2), torch.arange(3.0))
    with tr.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"settings": saved})
        got = checkpointer.load().state["settings"]
    assert type(got) is Settings and got.place == saved.place and got.history == saved.history
    assert torch.equal(got.weights, saved.weights)
