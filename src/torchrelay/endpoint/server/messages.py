"""What a trainer and its server process say to each other, as records. No torch."""

from __future__ import annotations

import msgspec


class Volume(msgspec.Struct, array_like=True, frozen=True):
    """A run of bytes laid out as a `.safetensors` file. `start`: where it lies in its slot, or -1
    where another rank has it; `digests`: those of its chunks, as far as they are known."""

    name: str
    start: int
    nbytes: int
    chunk_bytes: int
    digests: bytes = b""


class VolumeBox(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A box of a tensor: its elements, row-major, from byte `start` of a volume on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    volume: int
    start: int


class VolumeTensor(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A tensor of the step. `kind` and `shown` are dtype and shape as a safetensors file has
    them; `shape` is what the boxes are cut from, of elements of `itemsize` bytes."""

    name: str
    kind: str
    shown: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int
    boxes: tuple[VolumeBox, ...]


class Listen(msgspec.Struct, tag="listen"):
    """Open the port. Answered with `Listening`."""

    host: str
    port: int
    token: str | None
    certfile: str | None
    keyfile: str | None
    hold: float
    connections: int
    stall: float
    version: str


class AttachSlot(msgspec.Struct, tag="attach"):
    """An arena of `nbytes` for a slot; its descriptor comes with this message."""

    slot: int
    nbytes: int


class Hash(msgspec.Struct, tag="hash"):
    """Make the digests that volumes in a slot lack. Answered with `VolumeDigests`."""

    slot: int
    volumes: list[Volume]


class Show(msgspec.Struct, tag="show"):
    """A step that is in a slot is there to be read from here on.

    A rank shows its own volumes, with no `record`. Who lists the step is also shown the record of
    all volumes, in no slot (-1). `ranks`: the URL of each, and `places` the index in it for each
    volume. `marks`: where in the slot there is a byte for each
    chunk that says whether it is here; -1 where all of them are.
    """

    slot: int
    step: int
    snapshot: str
    record: bytes
    volumes: list[Volume]
    tensors: list[VolumeTensor] = []
    ranks: list[str] = []
    places: list[int] = []
    marks: int = -1


class Reclaim(msgspec.Struct, tag="reclaim"):
    """A slot is wanted for another step; `ask`: may it be had, without taking it. Answered with
    `Reclaimed`."""

    slot: int
    ask: bool


class Expect(msgspec.Struct, tag="expect"):
    """A step is being staged (`pending`), or will not come after all: who asks for the newest
    waits for it."""

    pending: bool


class Note(msgspec.Struct, tag="note"):
    """How a publish went, for those who watch."""

    step: int
    nbytes: int
    stage_seconds: float
    hash_seconds: float
    skipped: str | None


class Tell(msgspec.Struct, tag="tell"):
    """What goes on. Answered with `Told`, whose text is that of `/status.json`."""


class Obeyed(msgspec.Struct, tag="done"):
    pass


class Listening(msgspec.Struct, tag="listening"):
    port: int


class VolumeDigests(msgspec.Struct, tag="hashed"):
    digests: list[bytes]


class Reclaimed(msgspec.Struct, tag="reclaimed"):
    """`free`: nobody reads from the slot any more. `mapped`: a process of this host has its memory
    mapped, so that it must not be written to again. `why` says who reads."""

    free: bool
    mapped: bool = False
    why: str = ""


class StatusText(msgspec.Struct, tag="status"):
    text: bytes


class Refused(msgspec.Struct, tag="refused"):
    message: str


ServerRequest = Listen | AttachSlot | Hash | Show | Reclaim | Expect | Note | Tell
ServerAnswer = Obeyed | Listening | VolumeDigests | Reclaimed | StatusText | Refused
