"""A committed step of a checkpoint as a state to be looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeGuard

import torch

from torchrelay.inspection.numbers import memory_of
from torchrelay.inspection.seam import Alias, BoxedTensor, Contents, PlainValue, VolumeFacts
from torchrelay.plan.outline import dotted
from torchrelay.plan.region import Region
from torchrelay.progress import Bar, ProgressCallback
from torchrelay.record import manifest as m
from torchrelay.record.checkpoint.schema import Checkpoint, Outline
from torchrelay.record.checkpoint.stored import StoredTensor
from torchrelay.record.manifest import parts
from torchrelay.record.values import decode_value
from torchrelay.sources.seam import Opened
from torchrelay.state.tree import slots
from torchrelay.stores.reading import Fetch, everything
from torchrelay.stores.shares.layout import rank_of

WINDOWS_BYTES = 64 << 20  # kept of chunks, which tensors share
LONGEST = 80  # characters of a value that are shown


class _Window(NamedTuple):
    """Bytes of a volume that were read and checked, from one of them on."""

    start: int
    data: memoryview

    @property
    def stop(self) -> int:
        return self.start + self.data.nbytes


class StepSource:
    """Implements `StateSource` on an open step, of a store or of endpoints, which it closes;
    `ended` is called then."""

    def __init__(self, name: str, held: Opened, ended: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self._held = held
        self._ended = ended
        self._windows: dict[int, _Window] = {}  # one of a volume, what was used last at the end
        try:
            self.contents = contents_of(held.record)
        except BaseException:
            held.close()
            raise

    def read_into(self, volume: int, start: int, view: memoryview) -> None:
        """See `StateReader`. The chunks that have these bytes are read whole and checked."""
        window = self._windows.pop(volume, None)
        if window is None or not window.start <= start <= start + view.nbytes <= window.stop:
            window = self._read_chunks(volume, start, start + view.nbytes)
        self._windows[volume] = window
        kept = sum(one.data.nbytes for one in self._windows.values())
        while kept > WINDOWS_BYTES and len(self._windows) > 1:
            kept -= self._windows.pop(next(iter(self._windows))).data.nbytes
        view[:] = window.data[start - window.start : start - window.start + view.nbytes]

    def _read_chunks(self, volume: int, start: int, stop: int) -> _Window:
        record = self._held.record
        file = record.files[volume]
        first = start // file.chunk_bytes * file.chunk_bytes
        last = min(-(-stop // file.chunk_bytes) * file.chunk_bytes, file.nbytes)
        memory = torch.empty(last - first, dtype=torch.uint8, device="cpu")
        place = (first, Region.row_major(memory))
        Fetch(self._held.files, record, {volume: [place]}, workers=1).land()
        return _Window(first, memory_of(memory.numpy()))

    def verify(self, progress: ProgressCallback) -> str:
        record = self._held.record
        bar = Bar(progress, record.nbytes)
        Fetch(self._held.files, record, everything(record), progress=bar.add).check()
        return ""

    def close(self) -> None:
        self._windows.clear()
        self._held.close()
        self._ended()


def contents_of(record: Checkpoint) -> Contents:
    """What a commit record tells, in the words of all sources."""
    outline = record.outline(0)
    names = set(record.tensors.names)
    others = [dict(own.leaves) for own in record.own]
    found_values: list[PlainValue] = []
    aliases: list[Alias] = []
    empty: list[BoxedTensor] = []
    for path, index in slots(outline.tree):
        name = dotted(path)
        if name in names:
            continue
        leaf = outline.leaves[index]
        if _is_empty(leaf):
            empty.append(StoredTensor(name, leaf.dtype, leaf.shape, ()))
            continue
        text = _text(leaf)
        if text is not None:
            own = {_text(leaves[index]) for leaves in others if index in leaves}
            found_values.append(PlainValue(name, text, len(own | {text})))
        else:
            target = _target(outline, index)
            if target is not None:
                aliases.append(Alias(name, target))
    return Contents(
        record.step,
        record.world,
        (*record.tensors, *empty),
        tuple(
            VolumeFacts(file.name, file.nbytes, rank_of(file.name), file.chunk_bytes, file.digests)
            for file in record.files
        ),
        tuple(found_values),
        tuple(aliases),
        record.time,
        record.torch,
    )


def _is_empty(leaf: m.Leaf) -> TypeGuard[m.TensorLeaf]:
    """Whether a leaf is a tensor without elements: it has no box, and is a tensor all the same."""
    return isinstance(leaf, m.TensorLeaf) and 0 in leaf.shape and not leaf.flags & m.META


def _text(leaf: m.Leaf) -> str | None:
    """A leaf that has no bytes, in words."""
    if isinstance(leaf, m.ValueLeaf):
        value = decode_value(leaf.value)
        return shown(value) if leaf.kind == "plain" else f"{leaf.kind} {value}"[:LONGEST]
    if isinstance(leaf, m.SizeLeaf):
        return shown(leaf.size)
    if any(part.storage >= 0 for part in parts(leaf)):
        return None
    shape = getattr(leaf, "shape", ())
    return f"a tensor without bytes, {'x'.join(map(str, shape)) or '()'}"[:LONGEST]


def shown(value: object) -> str:
    """A plain value as text that is short."""
    if isinstance(value, (str, bytes)):
        value = value[:LONGEST]
    elif isinstance(value, int) and value.bit_length() > 1024:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _target(outline: Outline, index: int) -> str | None:
    found = [part.storage for part in parts(outline.leaves[index]) if part.storage >= 0]
    return outline.names[found[0]] if len(found) == 1 else None
