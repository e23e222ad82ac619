"""What a receiver and the next one say where the next one reads: 64-bit numbers.

They go on the lane of the chunks. The one that reads says a nonce, the other where it is, and then
where its chunks lie.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from torchrelay.errors import RemoteProtocolError

_NONCE = struct.Struct("<2q")
HAIL_NUMBERS = 2
PROCESS_NUMBERS = 3  # process id, descriptor and address, as in `place.Process`
NOTE_CHUNKS = 6  # that one note can tell of
NOTE_NUMBERS = 1 + 2 * NOTE_CHUNKS


def hail(nonce: bytes) -> list[int]:
    return list(_NONCE.unpack(nonce))


def read_hail(numbers: Sequence[int]) -> bytes:
    return _NONCE.pack(*numbers)


def read_process(numbers: Sequence[int]) -> tuple[int, int, int]:
    """Process id, descriptor and address."""
    pid, fd, address = numbers
    if not (0 <= pid <= 1 << 22 and -1 <= fd < 1 << 31 and address >= 0):
        raise RemoteProtocolError("a process that cannot be")
    return pid, fd, address


def note(chunks: Sequence[tuple[int, int]]) -> list[int]:
    """Where chunks lie: how many, then address and size of each; zeros at the end."""
    numbers = [len(chunks), *(number for chunk in chunks for number in chunk)]
    return numbers + [0] * (NOTE_NUMBERS - len(numbers))


def read_note(numbers: Sequence[int]) -> list[tuple[int, int]]:
    count = numbers[0]
    if not 0 < count <= NOTE_CHUNKS:
        raise RemoteProtocolError(f"a note of {count} chunks")
    chunks = list(zip(numbers[1::2], numbers[2::2], strict=True))[:count]
    if any(address <= 0 or size <= 0 for address, size in chunks):
        raise RemoteProtocolError("a note of memory that cannot be")
    return chunks
