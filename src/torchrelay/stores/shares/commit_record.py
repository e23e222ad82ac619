"""The commit record of a step: built from what the ranks have written, and checked."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from torchrelay.errors import CheckpointError, ManifestError
from torchrelay.record.checkpoint.commit import decode, encode
from torchrelay.record.checkpoint.joined import joined
from torchrelay.record.checkpoint.places import check_tensors
from torchrelay.record.checkpoint.schema import Blob, Checkpoint, DataFile
from torchrelay.record.checkpoint.stored import Tensors
from torchrelay.stores.seam import Draft
from torchrelay.stores.shares.outlines import Outlines
from torchrelay.stores.shares.share import Written
from torchrelay.version import __version__


def commit_record(
    step: int, shares: Sequence[Written], outlines: Outlines, save_id: str | None = None
) -> Checkpoint:
    """The commit record of a step that all ranks have written."""
    files: list[DataFile] = []
    firsts: list[int] = []
    blobs: list[Blob] = []
    for rank, share in enumerate(shares):
        first = len(files)
        with _refused(step, rank):
            check_tensors(share.tensors, [file.nbytes for file in share.files], whole=False)
        files += share.files
        firsts.append(first)
        blobs += [msgspec.structs.replace(blob, file=first + blob.file) for blob in share.blobs]
    with _refused(step):
        tensors = joined([share.tensors for share in shares], firsts)
    _check_covered(tensors, [file.nbytes for file in files], step)
    torch_version: Any = torch.__version__
    return Checkpoint(
        step=step,
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        torch=str(torch_version),
        torchrelay=__version__,
        outlines=outlines.outlines,
        ranks=outlines.ranks,
        own=outlines.own,
        tensors=tensors,
        files=tuple(files),
        blobs=tuple(blobs),
        save_id=save_id,
    )


def _check_covered(tensors: Tensors, files: Sequence[int], step: int) -> None:
    """`CheckpointError` unless the ranks have written all of each tensor."""
    try:
        check_tensors(tensors, files)
    except ManifestError as fault:
        raise CheckpointError(
            f"the step would not be whole, {fault.message}: save with a group of all ranks that "
            "have a part of the tensor",
            step=step,
            phase="commit",
            path=fault.path,
        ) from fault


@contextmanager
def _refused(step: int, rank: int | None = None) -> Iterator[None]:
    try:
        yield
    except ManifestError as fault:
        raise CheckpointError(
            f"a report of a share of the step is wrong, {fault.message}: see whether all ranks run "
            "the same version of torchrelay",
            rank=rank,
            step=step,
            phase="commit",
            path=fault.path,
        ) from fault


def sealed(record: Checkpoint) -> bytes:
    """The bytes to commit: the record, encoded, read back and compared.

    `CheckpointError` if a reader would refuse it, or would not find in it what was written.
    """
    data = encode(record)
    try:
        found = decode(data)
    except ManifestError as fault:
        raise _not_sealed(record, f"it cannot be read back: {fault.message}") from fault
    if encode(found) != data:
        raise _not_sealed(record, "it reads back as another one")
    held = {name for outline in found.outlines for name in outline.names}
    held.update(name for own in found.own for _, name in own.names)
    lost = next((name for name in found.tensors.names if name not in held), None)
    if lost is not None:
        raise _not_sealed(record, "a tensor that was written is in no rank's state", path=lost)
    return data


def check_files(draft: Draft, record: Checkpoint) -> None:
    """`CheckpointError` unless the data files that a record names are in the draft, whole."""
    there = draft.sizes()
    for file in record.files:
        if (found := there.get(file.name)) != file.nbytes:
            what = "is gone from it" if found is None else f"has {found} bytes in it"
            raise CheckpointError(
                f"the draft was changed after it was written: {file.name}, {file.nbytes} bytes, "
                f"{what}. The step was not committed: save it again",
                step=record.step,
                phase="commit",
                file=file.name,
            )


def _not_sealed(record: Checkpoint, why: str, path: str | None = None) -> CheckpointError:
    return CheckpointError(
        f"the step was not committed because its commit record is wrong ({why}): report this, "
        "with the state's structure",
        step=record.step,
        phase="commit",
        path=path,
    )
