"""Nothing is committed that was not read back: a step that no reader takes is a failed save."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

import torchrelay as tr
from torchrelay import dropin
from torchrelay.dcp import Reader, Writer
from torchrelay.describing.at_rest import describe
from torchrelay.dropin.stock_dcp import read_stock, write_stock
from torchrelay.errors import CheckpointError
from torchrelay.record.encoding import encode
from torchrelay.shares.commit_record import commit_record, decode_shares, sealed

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

LONG = namedtuple("N" * 300, ["a"])  # type: ignore[misc]  # a longer name than readers take


def deep(levels: int) -> dict[str, Any]:
    state: dict[str, Any] = {"w": torch.ones(2)}
    for _ in range(levels):
        state = {"a": state}
    return state


def steps(place: Path) -> list[int]:
    with tr.Checkpointer(place, no_dist=True) as held:
        return held.steps()


def leftovers(place: Path) -> list[str]:
    return [path.name for path in place.iterdir() if "step-" in path.name]


@pytest.mark.parametrize("call", ["save", "save_async"])
def test_checkpointer_commits_no_record_that_it_cannot_read(tmp_path: Path, call: str) -> None:
    with tr.Checkpointer(tmp_path) as held:
        held.save(1, {"w": torch.ones(2)})
        with pytest.raises(CheckpointError, match=r"not committed.*cannot be read back"):
            if call == "save":
                held.save(2, {"w": torch.ones(2), "t": LONG(1)})
            else:
                held.save_async(2, {"w": torch.ones(2), "t": LONG(1)}).result()
        assert held.steps() == [1]
        assert held.load().step == 1
    assert leftovers(tmp_path) == ["step-1"]


@pytest.mark.parametrize("call", ["save", "async_save"])
def test_dropin_checkpointer_commits_no_record_that_it_cannot_read(
    tmp_path: Path, call: str
) -> None:
    held = dropin.Checkpointer(Writer(tmp_path), Reader(tmp_path), no_dist=True)
    held.save({"w": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"not committed.*deeper than"):
        if call == "save":
            held.save(deep(130))
        else:
            held.async_save(deep(130)).result(timeout=60)
    into = {"w": torch.zeros(2)}
    held.load(into)
    assert into["w"].all() and leftovers(tmp_path) == ["step-0"]


def test_dcp_save_commits_no_record_that_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"(?s)not committed.*deeper than"):
        dcp.save(deep(130), storage_writer=Writer(tmp_path), no_dist=True)
    assert steps(tmp_path) == [] and leftovers(tmp_path) == []


class Forgetful(DefaultSavePlanner):
    """Its metadata names a value that it plans no write for."""

    def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.state_dict_metadata["lost"] = BytesStorageMetadata()
        return plans, metadata


def test_what_no_rank_has_written_is_not_left_out_in_silence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"(?s)no rank has written it.*lost"):
        dcp.save(
            {"w": torch.ones(2)}, storage_writer=Writer(tmp_path), planner=Forgetful(), no_dist=True
        )
    assert steps(tmp_path) == []


def test_a_written_tensor_that_no_state_has_is_not_committed(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path) as held:
        held.save(1, {"a": torch.ones(2), "b": torch.ones(3)})
    found = Reader(tmp_path).record
    share = msgspec.structs.replace(
        found, outlines=(), ranks=(), names=((0, "a"), (1, "b")), origin=None
    )
    outlined = describe({"a": torch.ones(2)}).record
    with pytest.raises(CheckpointError, match="in no rank's state") as failed:
        commit_record(1, decode_shares(1, [encode(share)]), outlined)
    assert failed.value.path == "b"
    with pytest.raises(CheckpointError, match="cannot be read back"):
        sealed(msgspec.structs.replace(found, starts=found.starts + 1))


def test_a_stock_directory_that_cannot_be_read_back_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="read back"):
        write_stock(tmp_path / "deep", deep(250))
    assert not (tmp_path / "deep" / ".metadata").exists()
    write_stock(tmp_path / "flat", deep(3))
    assert read_stock(tmp_path / "flat")["a"]["a"]["a"]["w"].all()


def test_saving_without_collectives_is_refused(tmp_path: Path) -> None:
    """Each rank would commit a step of its own part in place of the others'."""
    with pytest.raises(ValueError, match="use_collectives"):
        dcp.save(
            {"w": torch.ones(2)},
            storage_writer=Writer(tmp_path),
            use_collectives=False,
            no_dist=True,
        )
    assert steps(tmp_path) == []
