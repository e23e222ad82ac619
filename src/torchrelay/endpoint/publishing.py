"""From a live state to a step that can be read: plan, stage into a slot, hash, show.

There are two slots. The newest step is in one of them; the other has the step before, for those
who still read it, or is free. A step is staged into the other one. Where readers get on with the
step that is there, the publish is skipped: neither do they lose it, nor does the trainer wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from torchrelay.checkpointer.saves.agreement import agree
from torchrelay.deadlines import Deadline, Timeout, seconds_of
from torchrelay.endpoint.process import ServerProcess
from torchrelay.endpoint.server import messages as m
from torchrelay.memory.arena import Arena
from torchrelay.memory.side import settle
from torchrelay.memory.staging import Copy, stage
from torchrelay.record.pause import gc_paused
from torchrelay.record.validation import itemsize
from torchrelay.stores.records import Checkpoint, content_digest, encode
from torchrelay.stores.shares import plan_limits, plans
from torchrelay.stores.shares.drafting import Share, Written, commit_record
from torchrelay.stores.shares.layout import DTYPES
from torchrelay.stores.shares.planning import RulePlanning
from torchrelay.stores.writer.ranges import WORKERS
from torchrelay.transports.group.assembly import COORDINATOR, Assembly, Call
from torchrelay.version import __version__

logger = logging.getLogger("torchrelay")

PAGE = 4096


class Published:
    """A step on its way to its readers. The state it was given may change.

    `skipped` says why it was never begun, where readers had the memory that it needed.
    """

    def __init__(self, step: int, skipped: str | None = None) -> None:
        self.step = step
        self.skipped = skipped
        self._ended = threading.Event()
        self._fault: BaseException | None = None
        if skipped is not None:
            self._ended.set()

    def done(self) -> bool:
        """Whether the step can be read, or will not come."""
        return self._ended.is_set()

    def wait(self, timeout: Timeout | None = None) -> None:
        """Wait until the step can be read. Raises what went wrong; `TimeoutError` after
        `timeout` seconds, and it goes on."""
        if not self._ended.wait(None if timeout is None else seconds_of(timeout)):
            raise TimeoutError(f"step {self.step} cannot be read yet")
        if self._fault is not None:
            raise self._fault

    def end(self, fault: BaseException | None) -> None:
        """Called once by whoever publishes it."""
        self._fault = fault
        if fault is not None:
            logger.error("publishing step %d failed: %s", self.step, fault)
        self._ended.set()


class _Offered(msgspec.Struct, array_like=True):
    """Where a rank shows its part; `busy` says why its slot cannot be had."""

    url: str
    left: float
    busy: str = ""


class _Answered(msgspec.Struct, array_like=True):
    """The coordinator's answer: where all parts are listed, or why the step is skipped."""

    url: str
    left: float
    skipped: str = ""


_offered = msgspec.msgpack.Decoder(_Offered)
_answered = msgspec.msgpack.Decoder(_Answered)
_written = msgspec.msgpack.Decoder(Written)


class _StagedStep(NamedTuple):
    """A step that is staged here, on its way to be shown."""

    step: int
    slot: int
    share: Share
    volumes: list[m.Volume]
    outlines: plans.Outlines | None
    urls: list[str]
    stage_seconds: float


class Publisher:
    """Publishes the states of one rank, one at a time."""

    def __init__(self, assembly: Assembly, server: ServerProcess, url: Callable[[], str]) -> None:
        self._all = assembly
        self._server = server
        self._url = url
        self._planning = RulePlanning(assembly.rank, assembly.world, None)
        self._arenas: list[Arena | None] = [None, None]
        self._newest = 1  # the slot that has the newest step
        self._last: Published | None = None
        self.front = ""  # the URL that lists all ranks

    def publish(self, state: object, step: int, deadline: Deadline) -> Published:
        call = self._all.call(f"publish {step}")
        if self._last is not None and not self._last._ended.wait(deadline.left()):
            raise TimeoutError(f"step {self._last.step} is still being published")
        begun = time.monotonic()
        if self._server.start():
            self._newest = 1
        slot = 1 - self._newest
        self._server.ask(m.Expect(True), m.Obeyed, deadline.left())
        try:
            staged = self._stage(call, state, step, slot, deadline, begun)
        except BaseException:
            self._planning.forget()
            self._server.ask(m.Expect(False), m.Obeyed, deadline.left() + 1)
            raise
        if isinstance(staged, str):
            self._server.ask(m.Expect(False), m.Obeyed, deadline.left())
            self._note(step, 0, time.monotonic() - begun, 0.0, staged)
            return Published(step, skipped=staged)
        self._last = published = Published(step)
        threading.Thread(
            target=self._finish,
            args=(call, staged, published, deadline),
            name="torchrelay-publish",
            daemon=True,
        ).start()
        return published

    # Plan and stage, while the caller waits.

    def _stage(
        self, call: Call, state: object, step: int, slot: int, deadline: Deadline, begun: float
    ) -> _StagedStep | str:
        urls: list[str] = []

        def mine() -> bytes:
            asked = self._server.ask(m.Reclaim(slot, ask=True), m.Reclaimed, deadline.left())
            busy = "" if asked.free else asked.why or "it is read"
            return msgspec.msgpack.encode(_Offered(self._url(), deadline.left(), busy))

        def decide(said: list[bytes]) -> list[bytes]:
            offers = [plan_limits.read(_offered, data, rank) for rank, data in enumerate(said)]
            deadline.hasten(min(offer.left for offer in offers))
            urls.extend(offer.url for offer in offers)
            busy = next((offer.busy for offer in offers if offer.busy), "")
            answer = _Answered(urls[COORDINATOR], deadline.left(), busy)
            return [msgspec.msgpack.encode(answer)] * len(said)

        call.at("planning a publish")
        answer = plan_limits.read(
            _answered, call.round("plan", mine, decide, deadline), COORDINATOR
        )
        self.front = answer.url
        deadline.hasten(answer.left)
        if answer.skipped:
            return answer.skipped
        with gc_paused():
            agreed = agree(self._planning, call, deadline, state, lambda: ("published", ""))
            share = Share(*self._planning.resolve(agreed.plan))
        outlines = self._planning.outlines if self._all.coordinates else None
        call.at("staging")
        settle()
        volumes = self._copy(share, slot, deadline)
        seconds = time.monotonic() - begun
        return _StagedStep(step, slot, share, volumes, outlines, urls, seconds)

    def _copy(self, share: Share, slot: int, deadline: Deadline) -> list[m.Volume]:
        """Copy a share into its slot; where in it each of its volumes lies."""
        freed = self._server.ask(m.Reclaim(slot, ask=False), m.Reclaimed, deadline.left())
        volumes, end = [], 0
        share.hash_on_devices()
        for file in share.files:
            volumes.append(m.Volume(file.name, end, file.nbytes, file.chunk_bytes, file.digests))
            end += -(-file.nbytes // PAGE) * PAGE
        arena = self._arena(slot, end, share, mapped=freed.mapped)
        copies = [
            Copy(stream, 0, volume.nbytes, volume.start)
            for stream, volume in zip(share.streams, volumes, strict=True)
        ]
        stage(copies, arena.tensor, threads=WORKERS)
        share.check_unchanged()
        self._server.attach(slot, arena.fd, arena.nbytes, deadline.left())
        return volumes

    def _arena(self, slot: int, nbytes: int, share: Share, *, mapped: bool) -> Arena:
        """The memory of a slot: what it had, unless that is too small, or others have it mapped
        and are to keep what is in it."""
        pinned = any(
            region.keep.is_cuda for stream in share.streams for _, region in stream.elsewhere
        )
        arena = self._arenas[slot]
        if arena is not None and (mapped or arena.nbytes < nbytes or (pinned > arena.pinned)):
            self._arenas[slot] = None
            arena.close()
            arena = None
        if arena is None:
            arena = Arena(max(PAGE, nbytes), pinned=pinned)
            self._arenas[slot] = arena
        return arena

    # Hash and show, on a thread.

    def _finish(
        self, call: Call, staged: _StagedStep, published: Published, deadline: Deadline
    ) -> None:
        begun = time.monotonic()
        fault: BaseException | None = None
        try:
            written = self._hashed(staged, deadline)
            self._show(call, staged, written, deadline)
            self._newest = staged.slot
            seconds = time.monotonic() - begun
            self._note(staged.step, staged.share.nbytes, staged.stage_seconds, seconds, None)
        except BaseException as found:
            fault = found
        try:
            if fault is not None:
                self._server.ask(m.Expect(False), m.Obeyed, 5.0)
        except Exception as lost:
            logger.debug("the server process cannot be told: %s", lost)
        call.farewell()
        published.end(fault)

    def _hashed(self, staged: _StagedStep, deadline: Deadline) -> Written:
        asked = m.Hash(staged.slot, staged.volumes)
        return staged.share.written(
            self._server.ask(asked, m.VolumeDigests, deadline.left()).digests
        )

    def _show(self, call: Call, staged: _StagedStep, written: Written, deadline: Deadline) -> None:
        """Every rank shows its volumes; the coordinator then shows the record of them all."""
        records: list[tuple[Checkpoint, list[int]]] = []

        def decide(said: list[bytes]) -> list[bytes]:
            shares = [plan_limits.read(_written, data, rank) for rank, data in enumerate(said)]
            assert staged.outlines is not None
            record = commit_record(staged.step, shares, staged.outlines, __version__)
            places = [rank for rank, share in enumerate(shares) for _ in share.files]
            records.append((record, places))
            return [content_digest(record).encode()] * len(said)

        payload = msgspec.msgpack.encode(written)
        snapshot = call.round("write", lambda: payload, decide, deadline).decode()
        digests = [file.digests for file in written.files]
        own = [
            msgspec.structs.replace(volume, digests=known)
            for volume, known in zip(staged.volumes, digests, strict=True)
        ]
        shown = m.Show(staged.slot, staged.step, snapshot, b"", own, places=[0] * len(own))
        if self._all.world == 1:
            self._show_all(shown, *records[0], staged.urls, deadline)
            return

        def mine() -> bytes:
            if not self._all.coordinates:
                self._server.ask(shown, m.Obeyed, deadline.left())
            return b""

        def last(said: list[bytes]) -> list[bytes]:
            self._show_all(shown, *records[0], staged.urls, deadline)
            return said

        call.round("show", mine, last, deadline)

    def _show_all(
        self,
        shown: m.Show,
        record: Checkpoint,
        places: list[int],
        urls: list[str],
        deadline: Deadline,
    ) -> None:
        own = {volume.name: volume for volume in shown.volumes}
        shown.record = encode(record)
        shown.volumes = [
            own.get(file.name)
            or m.Volume(file.name, -1, file.nbytes, file.chunk_bytes, file.digests)
            for file in record.files
        ]
        shown.tensors = list(map(_volume_tensor, record.tensors))
        shown.ranks, shown.places = urls, places
        self._server.ask(shown, m.Obeyed, deadline.left())

    def _note(
        self, step: int, nbytes: int, staging: float, hashing: float, skipped: str | None
    ) -> None:
        self._server.ask(m.Note(step, nbytes, staging, hashing, skipped), m.Obeyed, 5.0)

    def settle(self, seconds: float) -> None:
        """Wait for what is being published."""
        if self._last is not None:
            self._last._ended.wait(seconds)

    def forsake(self) -> None:
        for arena in filter(None, self._arenas):
            arena.forsake()

    def close(self) -> None:
        for arena in filter(None, self._arenas):
            arena.close()
        self._arenas = [None, None]


def _volume_tensor(stored: Any) -> m.VolumeTensor:
    size = itemsize(stored.dtype)
    known = DTYPES.get(stored.dtype)
    shown = stored.shape if known else (*stored.shape, size)
    boxes = tuple(
        m.VolumeBox(shard.offsets, shard.sizes, shard.file, shard.start) for shard in stored.shards
    )
    return m.VolumeTensor(stored.name, known or "U8", shown, stored.shape, size, boxes)
