"""Files whose chunks have several cells, as those of many gigabytes have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torchrelay as tr
from torchrelay.memory.digest import CELL_BYTES, digest
from torchrelay.shares import layout

CHUNK = 2 * CELL_BYTES
LONG = 60.0


@pytest.fixture(autouse=True)
def large_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "CHUNK_BYTES", (CHUNK, CHUNK))


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"w": torch.randn(CELL_BYTES), "small": torch.randn(5)}  # 4 MiB and a header


@pytest.mark.parametrize("background", [False, True])
def test_they_are_hashed_in_cells_by_writer_and_readers(tmp_path: Path, background: bool) -> None:
    with tr.Checkpointer(tmp_path, timeout=LONG) as there:
        if background:
            there.save_async(1, state()).result()
        else:
            there.save(1, state())
        (large,) = [one for one in there.record(1).volumes if one.nbytes > CHUNK]
        assert large.chunk_bytes == CHUNK
        data = (tmp_path / "step-1" / large.name).read_bytes()
        chunks = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
        assert large.digests == b"".join(map(digest, chunks))
        assert there.verify() == 1
        assert torch.equal(there.load().state["w"], state()["w"])
        into = {"w": torch.zeros(CELL_BYTES), "small": torch.zeros(5)}
        there.load(into=into)
        assert torch.equal(into["w"], state()["w"])
        path = tmp_path / "step-1" / large.name
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        with pytest.raises(tr.errors.DamagedError, match="are not those written"):
            there.load(step=1)


def test_they_are_served(tmp_path: Path) -> None:
    with tr.serve(state(), step=1, timeout=LONG) as endpoint:
        got = tr.pull(endpoint.url, timeout=LONG)
        assert torch.equal(got.state["w"], state()["w"])
        into = {"w": torch.zeros(CELL_BYTES), "small": torch.zeros(5)}
        with tr.subscribe(endpoint.url, into=into, timeout=LONG) as following:
            assert following.update().step == 1
            assert torch.equal(into["w"], state()["w"])
            endpoint.publish({name: one + 1 for name, one in state().items()}, step=2).result(LONG)
            assert following.update().step == 2
            assert torch.equal(into["w"], state()["w"] + 1)
