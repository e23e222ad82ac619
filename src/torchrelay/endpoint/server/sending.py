"""Bytes of a step on their way to a reader, a piece at a time, with an eye on who does not take
them.

Volumes go by `sendfile` from the arena. Their readers compare digests, so it does no harm that a
page may be written to again while it is in a socket. Who gets a file compares nothing, and is sent
copies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import xxhash
from aiohttp import ClientError, ClientSession, ClientTimeout, web

from torchrelay.endpoint.server.messages import Volume
from torchrelay.endpoint.server.snapshots import ServedStep, Slot
from torchrelay.endpoint.server.spans import Span, send_span
from torchrelay.endpoint.server.transfers import Ledger, Transfer
from torchrelay.endpoint.server.whole_file import Band, Run, WholeFile
from torchrelay.geometry import DIGEST_BYTES

COPY_BYTES = 1 << 20
REMOTE_BYTES = 4 << 20
REMOTE_SECONDS = 30.0


Pieces = AsyncIterator[bytes | Span]


async def volume_pieces(slot: Slot, volume: Volume, start: int, stop: int) -> Pieces:
    yield Span(slot.file, volume.start + start, stop - start)


async def copied(slot: Slot, volume: Volume, start: int, stop: int) -> Pieces:
    for at in range(start, stop, COPY_BYTES):
        yield _copy(slot, volume, at, min(at + COPY_BYTES, stop))


def _copy(slot: Slot, volume: Volume, start: int, stop: int) -> bytes:
    return bytes(slot.view[volume.start + start : volume.start + stop])


class FileReader:
    """Reads a whole file of a step, from this rank's memory and from other ranks' servers."""

    def __init__(self, snapshot: ServedStep, session: ClientSession) -> None:
        self._snapshot = snapshot
        self._session = session

    async def pieces(self, file: WholeFile, start: int, stop: int) -> Pieces:
        for part in file.within(start, stop):
            if isinstance(part, bytes):
                yield part
            elif isinstance(part, Run):
                async for data in self._run(part):
                    yield data
            else:
                band, low, high = part
                yield (await self._band(band))[low:high]

    async def _run(self, run: Run) -> AsyncIterator[bytes]:
        volume = self._snapshot.order[run.volume]
        size = COPY_BYTES if self._snapshot.place(volume.name) else REMOTE_BYTES
        for at in range(run.start, run.stop, size):
            yield await self._read(Run(run.volume, at, min(at + size, run.stop)))

    async def _band(self, band: Band) -> bytes:
        parts = [(box, await self._read(run)) for run, box in band.runs()]
        return band.put_together(parts)

    async def _read(self, run: Run) -> bytes:
        volume = self._snapshot.order[run.volume]
        if place := self._snapshot.place(volume.name):
            return _copy(*place, run.start, run.stop)
        url = self._snapshot.ranks[self._snapshot.places[run.volume]]
        size = volume.chunk_bytes
        first, last = run.start // size, -(-run.stop // size)
        start, stop = first * size, min(last * size, volume.nbytes)
        data = await self._fetch(f"{url}/volumes/{self._snapshot.id}/{volume.name}", start, stop)
        for chunk in range(first, last):
            piece = memoryview(data)[chunk * size - start : (chunk + 1) * size - start]
            at = chunk * DIGEST_BYTES
            if xxhash.xxh3_128_digest(piece) != volume.digests[at : at + DIGEST_BYTES]:
                raise SourceFault(f"{url} has other bytes than it had when they were published")
        return data[run.start - start : run.stop - start]

    async def _fetch(self, url: str, start: int, stop: int) -> bytes:
        wanted = {"Range": f"bytes={start}-{stop - 1}"}
        limit = ClientTimeout(total=REMOTE_SECONDS)
        try:
            async with self._session.get(url, headers=wanted, timeout=limit) as answer:
                if answer.status != 206:
                    raise SourceFault(f"{url} answered {answer.status}")
                data = await answer.content.readexactly(stop - start)
        except (ClientError, asyncio.IncompleteReadError, asyncio.TimeoutError) as fault:
            raise SourceFault(f"{url} cannot be read: {type(fault).__name__}") from fault
        return data


class SourceFault(Exception):
    """Another rank's server does not give its part."""


async def send(
    request: web.BaseRequest,
    response: web.StreamResponse,
    pieces: Pieces,
    transfer: Transfer,
    ledger: Ledger,
    stall: float,
) -> None:
    """Send all pieces. `TimeoutError` of asyncio where the reader takes none for `stall` seconds,
    `ConnectionError` where it is gone, and `CancelledError` where its transfer is cut."""

    async def send_each() -> None:
        async for piece in pieces:
            transport = request.transport
            if transport is None or transport.is_closing():
                raise ConnectionResetError("the reader went away")
            if isinstance(piece, Span):
                await send_span(transport, piece, partial(ledger.moved, transfer), stall)
            else:
                await asyncio.wait_for(response.write(piece), stall)
                ledger.moved(transfer, len(piece))

    task = asyncio.ensure_future(send_each())
    transfer.tasks.add(task)
    try:
        await task
    finally:
        transfer.tasks.discard(task)
