"""What happens to the bytes of each image."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchrelay.describing.pieces import HOST, NO_PIECES, Pieces
from torchrelay.geometry.chunks import Chunks
from torchrelay.landing.image_memory import ImageMemory
from torchrelay.landing.staging import Purpose, Staging, purposes
from torchrelay.landing.workspace import Workspace

P = Purpose
IMAGES = 6


def pieces(*rows: tuple[int, int]) -> Pieces:
    """Pieces for whole images of 16 bytes, on devices."""
    memory = [torch.zeros(16, dtype=torch.uint8) for _ in rows]
    found = [
        (16 * image, one.data_ptr(), 16, device, image, number)
        for number, ((image, device), one) in enumerate(zip(rows, memory, strict=True))
    ]
    return Pieces.of(found, memory).in_order()


def marks(*images: int) -> np.ndarray:
    return np.isin(np.arange(IMAGES), images)


@pytest.mark.parametrize("staged", [True, False])
def test_each_image_has_one_purpose(staged: bool) -> None:
    taken = pieces((0, HOST), (1, HOST), (1, HOST), (2, HOST), (3, HOST))
    found = purposes(taken, marks(2, 4), marks(3), staged=staged)
    first = P.STAGED if staged else P.IN_PLACE
    assert [*map(Purpose, found)] == [first, P.STAGED, P.ON_HOST, P.ON_HOST, P.KEPT, P.UNUSED]


def test_an_image_is_staged_where_all_of_it_goes() -> None:
    taken = pieces((0, 0), (1, HOST), (2, 0), (2, HOST), (3, 1))
    found = purposes(taken, marks(), marks(), staged=True)
    staging = Staging(taken, found, Chunks([16] * IMAGES, [16 * IMAGES]))
    assert {number: images.tolist() for number, images in staging._by_device()} == {0: [0], 1: [3]}


def test_a_piece_says_where_its_bytes_lie() -> None:
    memory = torch.arange(32, dtype=torch.uint8)
    rows = [(0, memory.data_ptr() + 8, 4, HOST, 0, 0), (16, memory.data_ptr(), 8, HOST, 1, 0)]
    found = Pieces.of(rows, [memory])
    assert found.bytes_of(0).tolist() == [8, 9, 10, 11]
    assert [at for at, _ in found.tensors()] == [0, 16]
    both = found.joined(Pieces.of([(8, 1, 8, HOST, 0, 0)], [torch.zeros(8)]))
    assert both.at.tolist() == [0, 8, 16] and both.keep.tolist() == [0, 1, 0]
    assert len(found.joined(NO_PIECES)) == 2 and not len(found.overlapping)
    assert len(found.joined(found).once()) == 2


def test_images_of_one_buffer_know_the_space_that_is_left() -> None:
    chunks = Chunks([12, 4, 8], [64])
    memory = ImageMemory(chunks)
    memory.stage(np.array([0, 2]), Workspace())
    assert memory.marks.tolist() == [True, False, True]
    assert memory.space.tolist() == [32, 0, 16]
    memory.bytes(2).fill_(7)
    assert memory.bytes(0).tolist() != [7] * 12 and memory.bytes(2).tolist() == [7] * 8
    found = memory.pieces()
    assert found.at.tolist() == [0, 32] and found.image.tolist() == [0, 2]
    assert found.nbytes.tolist() == [16, 16]  # padding too, so that few runs are copied
