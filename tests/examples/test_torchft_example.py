"""`examples/torchft`: a replica that joins late has the state of the one that went on."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "torchft" / "train.py"


@pytest.fixture(autouse=True)
def without_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier tests of this process may have imported parts of torchft without its native one."""
    if getattr(sys.modules.get("torchft"), "__spec__", None) is None:
        for name in [one for one in sys.modules if one.partition(".")[0] == "torchft"]:
            monkeypatch.delitem(sys.modules, name)


def example() -> Any:
    spec = importlib.util.spec_from_file_location("torchft_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("torchft") is not None:
        pytest.skip("torchft is here")
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    with pytest.raises(SystemExit, match="needs torchft with its native part"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def test_replicas_train_together() -> None:
    torchft = pytest.importorskip(
        "torchft", reason="torchft's native part has wheels for x86_64 alone"
    )
    lighthouse = torchft.coordination.LighthouseServer(
        bind="[::]:0", min_replicas=2, join_timeout_ms=100
    )
    try:
        with ThreadPoolExecutor(2) as pool:
            runs = [
                pool.submit(example().train, replica, 2, 4, lighthouse.address())
                for replica in range(2)
            ]
            losses = [run.result(100) for run in runs]
    finally:
        lighthouse.shutdown()
    assert all(set(one) == {1, 2, 3, 4} for one in losses)
