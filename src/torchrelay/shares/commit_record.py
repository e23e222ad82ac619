"""The record of a step: built from what the ranks have written, and checked."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from torchrelay.errors import CheckpointError, ManifestError
from torchrelay.geometry.boxes import Comparisons
from torchrelay.pause import gc_paused
from torchrelay.planning.stored import Names
from torchrelay.record.checks.images import check_kind
from torchrelay.record.encoding import decode, decode_at_rest, encode_at_rest
from torchrelay.record.schema import Origin, Record, ReplicaMark
from torchrelay.shares.joined import with_boxes
from torchrelay.stores.draft import Draft
from torchrelay.version import __version__


def decode_shares(step: int, reports: Sequence[bytes]) -> list[Record]:
    """The boxes and volumes that each rank reports to have written."""
    shares = []
    with gc_paused():  # once for all: each of many ranks would end a pause of its own
        for rank, data in enumerate(reports):
            with refused("a report of a share of the step", "commit", rank, step):
                shares.append(decode(data, "part"))
    return shares


def commit_record(
    step: int,
    shares: Sequence[Record],
    outlined: Record,
    save_id: str | None = None,
    metrics: Mapping[str, float] | None = None,
    names: Sequence[str] | None = None,
    reused: tuple[int, int] = (0, 0),
    mark: ReplicaMark | None = None,
) -> Record:
    """The record of a step that all ranks have written. `outlined` has their outlines. `names`: of
    its images, where the caller knows them. `reused` and `mark`: see `Origin`."""
    names = Names(outlined).all() if names is None else names
    with refused("a report of a share of the step", "commit", None, step), gc_paused():
        joined = with_boxes(outlined, names, shares)
    _check_covered(joined, names, step)
    torch_version: Any = torch.__version__
    saved = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    versions = str(torch_version), __version__
    origin = Origin(saved, *versions, save_id, dict(metrics or {}), *reused, mark)
    return msgspec.structs.replace(joined, step=step, origin=origin)


def _check_covered(record: Record, names: Sequence[str], step: int) -> None:
    """`CheckpointError` unless the ranks have written all of each tensor."""
    comparisons = Comparisons()
    for number, kind in enumerate(record.image_kinds):
        try:
            check_kind(kind, "whole", comparisons)
        except ManifestError as fault:
            image = record.image_kind.tolist().index(number)
            raise CheckpointError(
                f"the step would not be whole, {fault.message}: save with a group of all ranks "
                "that have a part of the tensor",
                step=step,
                phase="commit",
                path=names[image],
            ) from fault


@contextmanager
def refused(what: str, phase: str, rank: int | None, step: int | None = None) -> Iterator[None]:
    """Within: a record that a rank has sent and that is none is a `CheckpointError`."""
    try:
        yield
    except ManifestError as fault:
        raise CheckpointError(
            f"{what} is wrong, {fault.message}: see whether all ranks run the same version of "
            "torchrelay",
            rank=rank,
            step=step,
            phase=phase,
            path=fault.path,
        ) from fault


def sealed(record: Record) -> bytes:
    """The bytes to commit: the record, encoded, read back and compared.

    `CheckpointError` if a reader would refuse it, or would not find in it what was written.
    """
    data = encode_at_rest(record)
    try:
        if encode_at_rest(decode_at_rest(data)) == data:
            return data
        why = "it reads back as another one"
    except ManifestError as fault:
        why = f"it cannot be read back: {fault.message}"
    raise CheckpointError(
        f"the step was not committed because its commit record is wrong ({why}): report this, "
        "with the state's structure",
        step=record.step,
        phase="commit",
    )


def check_files(draft: Draft, record: Record) -> None:
    """`CheckpointError` unless the data files that a record names are in the draft, whole."""
    there = draft.sizes()
    for file in record.volumes:
        if (found := there.get(file.name)) != file.nbytes:
            what = "is gone from it" if found is None else f"has {found} bytes in it"
            raise CheckpointError(
                f"the draft was changed after it was written: {file.name}, {file.nbytes} bytes, "
                f"{what}. The step was not committed: save it again",
                file=file.name,
            )
