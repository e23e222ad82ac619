"""The messages between a process that publishes steps and the server that shows them. No torch.

A publish takes four: `Reserve` memory, `StageSlot` the copy, `Show` it, and `FinishPublish`. A step
that is kept on a GPU is shown there first.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from torchrelay.memory.pages import PAGE, paged
from torchrelay.parts.fields import Field
from torchrelay.sources.access import Access
from torchrelay.sources.lent_memory import DeviceExport
from torchrelay.sources.remote_step import ChunkedVolume

HOLD_SECONDS = 60.0
STALL_SECONDS = 10.0
CONNECTIONS = 256


class Volume(msgspec.Struct, array_like=True, frozen=True):
    """A run of bytes laid out as a `.safetensors` file. `start`: where it begins in its slot, or -1
    where another rank has it; `digests`: those of its chunks, as far as they are known."""

    name: str
    start: int
    nbytes: int
    chunk_bytes: int
    digests: bytes = b""

    @property
    def chunks(self) -> int:
        return -(-self.nbytes // self.chunk_bytes)


def laid_out(files: Iterable[ChunkedVolume]) -> tuple[list[Volume], int]:
    """Volumes one behind the other in a slot, each on pages of its own; and the slot's bytes."""
    volumes, end = [], 0
    for file in files:
        volumes.append(Volume(file.name, end, file.nbytes, file.chunk_bytes, file.digests))
        end += paged(file.nbytes)
    return volumes, max(PAGE, end)


class Listen(msgspec.Struct, tag="listen"):
    """Open the port. Answered with `Listening`. `hold`, `stall` and `connections` are those of
    `serve`, `history` that of its `Encoding`."""

    host: str
    port: int
    token: str | None
    certfile: str | None
    keyfile: str | None
    cafile: str | None
    hold: float = HOLD_SECONDS
    stall: float = STALL_SECONDS
    connections: int = CONNECTIONS
    history: int = 0

    @classmethod
    def at(cls, host: str, port: int, access: Access) -> Listen:
        return cls(host, port, access.secret(), *access.paths())


class Listening(msgspec.Struct, tag="listening"):
    port: int


class Reserve(msgspec.Struct, tag="reserve"):
    """Memory for a step, which readers of the newest step now wait for. `decision`: for keepers, a
    `KeeperDecision`. `on_device`: memory of a GPU, too. Answered with `Reserved`."""

    step: int
    nbytes: int
    decision: bytes = b""
    on_device: bool = False


class Reserved(msgspec.Struct, tag="reserved"):
    """A slot that may be written to, or `why` there is none. Memory of slots in `dropped` no longer
    belongs to the client. `device`: the number of a slot on the GPU, which is not lent until it is
    shown; -1 if none was asked for, or all of them are being read."""

    slot: int
    why: str = ""
    dropped: list[int] = []
    device: int = -1


class FoundChanges(msgspec.Struct, array_like=True):
    """The bits of changed elements since the snapshot `base`, which a GPU has found: where in the
    slot those of each field of each volume begin, and how many elements it is."""

    base: str
    places: list[list[int]]
    changed: int


class StageSlot(msgspec.Struct, tag="stage"):
    """A slot has its bytes. With `attached`, a descriptor of its memory follows. Answered with
    `SlotStaged`: the digests of each volume's chunks. `fields`: those that tile each volume, where
    the server is to find changes, unless they are `found`."""

    slot: int
    nbytes: int
    volumes: list[Volume]
    attached: bool
    fields: list[list[Field]] = []
    found: FoundChanges | None = None


class SlotStaged(msgspec.Struct, tag="staged"):
    digests: list[bytes]


class StepRecord(msgspec.Struct, array_like=True):
    """The record of a step, and the volumes of all ranks. `tensors`: how many the step has.
    `ranks`: the URL of each, and `places` the index in it for each volume. `state`: a digest that
    steps with the same state share, if it is known. `layout`: a digest of the record but for its
    step and the digests of chunks."""

    record: bytes
    volumes: list[Volume]
    tensors: int
    ranks: list[str]
    places: list[int]
    state: str = ""
    layout: str = ""


class Show(msgspec.Struct, tag="show"):
    """Volumes of a step can be read from a slot. A server that lists the step also gets the
    record of all volumes. With `export`, the slot is memory of a GPU, which processes of this host
    can read; another `Show` follows when the bytes are in host memory."""

    slot: int
    step: int
    snapshot: str
    volumes: list[Volume]
    whole: StepRecord | None = None
    export: DeviceExport | None = None


class FinishPublish(msgspec.Struct, tag="finish"):
    """How a publish ended: shown, skipped or `failed`. `unused`: the slot that was reserved has not
    been written to."""

    step: int
    nbytes: int = 0
    stage_seconds: float = 0.0
    hash_seconds: float = 0.0
    skipped: str | None = None
    failed: bool = False
    unused: bool = False
    on_device: bool = False  # the step is in memory of a GPU, too


class Tell(msgspec.Struct, tag="tell"):
    """Answered with `StatusText`, the text of `/status.json`."""


class StatusText(msgspec.Struct, tag="status"):
    text: bytes


class Obeyed(msgspec.Struct, tag="done"):
    pass


class Refused(msgspec.Struct, tag="refused"):
    message: str


class SeedAnnouncement(msgspec.Struct):
    """`POST /seeds`: where a puller serves what it has of a step."""

    url: str
    snapshot: str


class SeedAnswer(msgspec.Struct):
    """The other seeds of the step, and whether this server has all of it."""

    seeds: list[str]
    complete: bool


PublishRequest = Reserve | StageSlot | Show | FinishPublish | Tell
PublishAnswer = Reserved | SlotStaged | StatusText | Obeyed | Refused
ServerRequest = Listen | PublishRequest
ServerAnswer = Listening | PublishAnswer
