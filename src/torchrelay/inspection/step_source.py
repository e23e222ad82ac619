"""A committed step of a checkpoint as an `OpenedState`. No torch."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import xxhash

from torchrelay.inspection.opened_state import Alias, Contents, PlainValue
from torchrelay.planning.selection import Texts
from torchrelay.progress import Bar, ProgressCallback
from torchrelay.record import manifest as m
from torchrelay.record.manifest import parts
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import Record
from torchrelay.record.typed import spelled
from torchrelay.record.values import decode_value
from torchrelay.sources.source import Opened
from torchrelay.state.paths import slots
from torchrelay.stores.reading.chunks import Task, VerifiedFiles, check_chunks, read_chunks
from torchrelay.stores.safetensors import tensors_of

_encode = msgspec.msgpack.Encoder().encode
WINDOWS_BYTES = 64 << 20  # kept of chunks, which tensors share
LONGEST = 80  # characters of a value that are shown


class StepSource:
    """Implements `OpenedState` on an open step, of a store or of endpoints, which it closes;
    `ended` is called then."""

    def __init__(self, name: str, step: Opened, ended: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self._step = step
        self._ended = ended
        # By volume, the newest at the end: where the bytes that were checked last begin, and they.
        self._windows: dict[int, tuple[int, memoryview]] = {}
        try:
            self.contents = contents_of(step.record)
        except BaseException:
            step.close()
            raise

    def read_into(self, volume: int, start: int, view: memoryview) -> None:
        """See `StateReader`. The chunks that have these bytes are read whole and checked."""
        first, data = self._windows.pop(volume, (0, memoryview(b"")))
        if not first <= start <= start + view.nbytes <= first + data.nbytes:
            record = self._step.record
            file = record.volumes[volume]
            first = start // file.chunk_bytes * file.chunk_bytes
            last = -(-(start + view.nbytes) // file.chunk_bytes) * file.chunk_bytes
            task = Task(volume, first, min(last, file.nbytes))
            data = read_chunks(self._step.files, record, task)
        self._windows[volume] = first, data
        nbytes = sum(one.nbytes for _, one in self._windows.values())
        while nbytes > WINDOWS_BYTES and len(self._windows) > 1:
            nbytes -= self._windows.pop(next(iter(self._windows)))[1].nbytes
        view[:] = data[start - first : start - first + view.nbytes]

    def verify(self, progress: ProgressCallback, known: VerifiedFiles | None = None) -> str:
        record = self._step.record
        check_chunks(self._step.files, record, Bar(progress, record.volume_bytes).add, known)
        return ""

    def close(self) -> None:
        self._windows.clear()
        self._step.close()
        self._ended()


def contents_of(record: Record) -> Contents:
    """The contents that the record of a step describes."""
    rows = LeafRows(record, at_rest=True)
    tensors = tensors_of(record)
    names = {tensor.name for tensor in tensors}
    others = [dict(one.leaves) for one in record.differences]
    found_values: list[PlainValue] = []
    aliases: list[Alias] = []
    texts = Texts(len(rows))
    for path, index in slots(rows.tree):
        name = texts.of(path)
        if name in names:
            continue
        leaf = rows[index]
        text = _text(leaf)
        if text is not None:
            every = [leaf, *(leaves[index] for leaves in others if index in leaves)]
            several = len({(_text(one), _digest(one)) for one in every})
            found_values.append(PlainValue(name, text, several, _digest(leaf)))
        else:
            images = [part.storage for part in parts(leaf) if part.storage >= 0]
            if len(images) == 1:
                aliases.append(Alias(name, tensors[images[0]].name))
    return Contents(
        record.step,
        len(record.ranks),
        tuple(tensors),
        record.volumes,
        tuple(found_values),
        tuple(aliases),
        record.saved.time,
        record.saved.torch,
    )


def _text(leaf: m.Leaf) -> str | None:
    """A leaf that has no bytes, in words."""
    if isinstance(leaf, m.ValueLeaf) and leaf.kind == "object":
        return short(spelled(leaf.value))
    if isinstance(leaf, m.ValueLeaf):
        value = decode_value(leaf.value)
        return shown(value) if leaf.kind == "plain" else f"{leaf.kind} {value}"[:LONGEST]
    if isinstance(leaf, m.SizeLeaf):
        return shown(leaf.size)
    if any(part.storage >= 0 for part in parts(leaf)):
        return None
    shape = getattr(leaf, "shape", ())
    return f"a tensor without bytes, {'x'.join(map(str, shape)) or '()'}"[:LONGEST]


def _digest(leaf: m.Leaf) -> str:
    if not isinstance(leaf, (m.ValueLeaf, m.SizeLeaf)):
        return ""
    return xxhash.xxh3_64_hexdigest(_encode(leaf))


def shown(value: object) -> str:
    """A plain value as text that is short."""
    if isinstance(value, (str, bytes)):
        value = value[:LONGEST]
    elif isinstance(value, int) and value.bit_length() > 1024:
        return f"an integer of {value.bit_length()} bits"
    return short(repr(value))


def short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
