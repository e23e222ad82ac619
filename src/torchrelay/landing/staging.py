"""The memory of a landing: where each image of a share lies until the landing ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum

import numpy as np

from torchrelay.describing.pieces import Pieces
from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.chunks import Chunks
from torchrelay.landing.image_memory import ImageMemory
from torchrelay.landing.new_leaves import NewLeaves, StoredImages
from torchrelay.landing.workspace import Workspace
from torchrelay.record.rows import Marks


class Purpose(IntEnum):
    """What happens to the bytes of an image.

    | image                                              | staged     | not staged |
    |----------------------------------------------------|------------|------------|
    | nothing takes it                                   | UNUSED     | UNUSED     |
    | tensors of the caller take it as it is             | STAGED     | IN_PLACE   |
    | the same, and some bytes go to several tensors     | STAGED     | STAGED     |
    | new leaves alone are made of it                    | KEPT       | KEPT       |
    | new leaves, and tensors of the caller              | ON_HOST    | ON_HOST    |
    | plain values, copies or comparisons need it        | ON_HOST    | ON_HOST    |
    """

    UNUSED = 0
    IN_PLACE = 1  # its bytes go to the caller's tensors as they come
    STAGED = 2  # in a buffer until the commit, on the device where all of it goes
    ON_HOST = 3  # in a buffer of the host
    KEPT = 4  # in new memory, which becomes the caller's


def purposes(pieces: Pieces, made: Marks, needed: Marks, *, staged: bool) -> Numbers:
    """The purpose of each image. `pieces` are memory of the caller's tensors; of images that are
    `made`, new leaves are made; `needed` ones are looked at on the host."""
    found: Numbers = np.full(len(made), Purpose.UNUSED, np.int64)
    found[pieces.image] = Purpose.STAGED if staged else Purpose.IN_PLACE
    found[pieces.overlapping] = Purpose.STAGED
    written = found != Purpose.UNUSED
    found[made & ~written] = Purpose.KEPT
    found[(made & written) | needed] = Purpose.ON_HOST
    return found


class Staging:
    """Memory for images by their `purposes`: `memory` has those that are staged or kept, `direct`
    the pieces of the caller's tensors that are filled in place."""

    def __init__(self, pieces: Pieces, purposes: Numbers, chunks: Chunks) -> None:
        self._pieces, self._purposes, self._chunks = pieces, purposes, chunks
        self.memory = ImageMemory(chunks)
        self.direct = pieces.some(purposes[pieces.image] == Purpose.IN_PLACE)

    def images(self, *some: Purpose) -> Numbers:
        """The images with one of these purposes."""
        return np.flatnonzero(np.isin(self._purposes, some))

    def allocate(self, new: NewLeaves, workspace: Workspace, stored: StoredImages | None) -> None:
        """Take the memory. `MismatchError` where there is not so much."""
        if stored is not None:
            stored.check(self.images(Purpose.STAGED, Purpose.ON_HOST, Purpose.KEPT))
        kept = self.images(Purpose.KEPT)
        new.take_memory(kept, self.memory, self._chunks, workspace, stored)
        for device, images in self._by_device():
            with suppress(MismatchError):  # the host may have so much
                self.memory.stage(images, workspace, device)
        wanted = self.images(Purpose.STAGED, Purpose.ON_HOST)
        self.memory.stage(wanted[~self.memory.marks[wanted]], workspace)

    def _by_device(self) -> Iterator[tuple[int, Numbers]]:
        """The images to stage all of whose bytes go to one device."""
        pieces = self._pieces
        for number in np.unique(pieces.device[~pieces.on_host]).tolist():
            marks = self._purposes == Purpose.STAGED
            marks[pieces.image[pieces.device != number]] = False
            there = np.zeros(len(marks), bool)
            there[pieces.image[pieces.device == number]] = True
            yield number, np.flatnonzero(marks & there)

    def keep(self, image: int) -> None:
        """Copy an image to new memory, unless it is in such memory: the caller keeps it."""
        if self._purposes[image] != Purpose.KEPT:
            self.memory.add([image], [self.memory.bytes(image).clone()])
            self._purposes[image] = Purpose.KEPT

    def target_pieces(self) -> Pieces:
        """The memory that takes bytes as they come."""
        return self.memory.pieces().joined(self.direct)

    def in_place(self) -> ImageMemory:
        """The caller's tensors that are filled in place, where each takes all of an image."""
        found, rows = ImageMemory(self._chunks), self.direct
        memory = [rows.memory[number] for number in rows.keep.tolist()]
        found.add(
            rows.image,
            memory,
            numbers=np.arange(len(memory)),
            sizes=rows.nbytes,
            addresses=rows.address,
            devices=rows.device,
        )
        return found
