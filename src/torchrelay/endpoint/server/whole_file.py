"""A step as one standard safetensors file of whole tensors. Nothing of it is held but its header.

Readers of a file compare no digests, so they get copies: memory may be written to again while it is
on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from torchrelay.arguments import matches
from torchrelay.endpoint.server.step_reader import StepReader
from torchrelay.inspection.file_bytes import PIECE_BYTES, FileBytes
from torchrelay.inspection.opened_state import Contents
from torchrelay.record.dtypes import itemsize
from torchrelay.record.encoding import decode_at_rest
from torchrelay.stores.safetensors import header, tensors_of

COPY_BYTES = 1 << 20  # of this server's memory, at once
FILES_KEPT = 8  # headers


class WholeFile:
    """The file of a step's tensors whose names match one of the patterns; of all, without any."""

    def __init__(self, data: bytes, patterns: Sequence[str], snapshot: str) -> None:
        record = decode_at_rest(data)
        metadata = {"step": str(record.step), "snapshot": snapshot}
        tensors = [one for one in tensors_of(record) if not patterns or matches(one.name, patterns)]
        # In descending order of item size each is aligned without holes.
        tensors.sort(key=lambda tensor: -itemsize(tensor.dtype))
        self.contents = Contents(record.step, len(record.ranks), tensors, ())
        table = ((one.name, one.dtype, one.shape) for one in tensors)
        self._bytes = FileBytes(header(table, metadata), tensors)
        self.nbytes = self._bytes.nbytes

    def pieces(self, reader: StepReader, start: int, stop: int) -> Iterator[bytes | memoryview]:
        """The bytes of a range, in order. Each piece is valid until the next one."""

        def at_once(volume: int) -> int:
            return COPY_BYTES if reader.is_here(volume) else PIECE_BYTES

        return self._bytes.pieces(reader, start, stop, at_once)


whole_file = lru_cache(FILES_KEPT)(WholeFile)  # a reader may ask for many ranges of one
