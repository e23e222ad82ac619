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
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from torchrelay.checkpointer.saves.agreement import agree
from torchrelay.checkpointer.saves.last_save import agreed_step
from torchrelay.checkpointer.saves.staging import arena_bytes
from torchrelay.deadlines import Deadline, Timeout, seconds_of, wait_until_set
from torchrelay.endpoint.process import StepProcess
from torchrelay.endpoint.server import messages as m
from torchrelay.errors import EndpointError
from torchrelay.memory.arena import Arena
from torchrelay.memory.gpu.side import settle
from torchrelay.memory.pages import PAGE, paged
from torchrelay.memory.staging import Copy, stage
from torchrelay.record.checkpoint.commit import content_digest, encode
from torchrelay.record.checkpoint.schema import Checkpoint
from torchrelay.record.dtypes import itemsize
from torchrelay.record.pause import gc_paused
from torchrelay.stores.shares import plan_limits, plans
from torchrelay.stores.shares.drafting import Share, Written, commit_record
from torchrelay.stores.shares.layout import DTYPES
from torchrelay.stores.shares.planning import RulePlanning
from torchrelay.stores.writer.ranges import WORKERS
from torchrelay.transports.group.assembly import COORDINATOR, Assembly, Call
from torchrelay.version import __version__

logger = logging.getLogger("torchrelay")

_TELL_SECONDS = 5.0  # that the server process may take to hear how a publish went


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
        if not wait_until_set(self._ended, None if timeout is None else seconds_of(timeout)):
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
    """Where a rank shows its part; `busy` says why its slot cannot be had; `note` is of who it
    shows it to, for the coordinator's."""

    step: int
    url: str
    left: float
    busy: str = ""
    note: bytes = b""


class _Answered(msgspec.Struct, array_like=True):
    """The coordinator's answer: where the ranks show their parts, each place once and the one that
    lists them all first; or why the step is skipped."""

    urls: list[str]
    left: float
    skipped: str = ""
    note: bytes = b""


class _Recorded(msgspec.Struct, array_like=True):
    """The record that all parts add up to: by its digest, and for ranks that show it too."""

    snapshot: str
    whole: bytes = b""


class RoomOffer(msgspec.Struct, array_like=True):
    """The slot that a rank has for its part, or why it has none."""

    slot: int
    why: str = ""


_offered = msgspec.msgpack.Decoder(_Offered)
_answered = msgspec.msgpack.Decoder(_Answered)
_recorded = msgspec.msgpack.Decoder(_Recorded)
_written = msgspec.msgpack.Decoder(Written)


class PlannedShare(NamedTuple):
    """What a rank has of a step; the coordinator also has what all ranks have."""

    share: Share
    outlines: plans.Outlines | None


class PlannedStep(NamedTuple):
    """A step that all ranks have room for, to be staged."""

    slot: int
    nbytes: int
    share: Share
    outlines: plans.Outlines | None
    urls: list[str]


class StagedStep(NamedTuple):
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

    def __init__(self, assembly: Assembly, server: StepProcess, url: Callable[[], str]) -> None:
        self._all = assembly
        self._server = server
        self._url = url
        self._planning = RulePlanning(assembly.rank, assembly.world, None, assembly.members)
        self._arenas: dict[int, Arena] = {}  # by slot
        self._newest = 1  # the slot that has the newest step
        self._last: Published | None = None
        self.urls: list[str] = []  # where the ranks show their parts; the first lists them all

    def publish(self, state: object, step: int, deadline: Deadline) -> Published:
        return self._publish(lambda call: self._plan(call, state, deadline), step, deadline)[0]

    def _publish(
        self, plan: Callable[[Call], PlannedShare], step: int, deadline: Deadline
    ) -> tuple[Published, StagedStep | None]:
        """Stage what is planned, and have it shown; all of it, or it is skipped."""
        call = self._all.call(f"publish {step}")
        with call.telling("plan", deadline):
            if self._last is not None and not wait_until_set(self._last._ended, deadline.left()):
                raise TimeoutError(f"step {self._last.step} is still being published")
            begun = time.monotonic()
            try:
                self._begin(deadline)
            except EndpointError:  # it was lost just now
                if deadline.passed:
                    raise
                self._begin(deadline)
        try:
            planned = self._make_room(call, plan, step, deadline)
        except BaseException:
            self._give_up()
            raise
        if isinstance(planned, str):
            self._server.ask(m.Expect(False), m.Obeyed, deadline.left())
            self._note(step, 0, time.monotonic() - begun, 0.0, planned)
            return Published(step, skipped=planned), None
        self._last = published = Published(step)
        try:
            staged = self._stage(planned, step, deadline, begun)
        except BaseException as fault:
            self._give_up()
            # The others are told by a thread: they come to hear it when they have staged their own.
            self._in_background(self._tell_failure, call, fault, published, deadline)
            raise
        self._in_background(self._finish, call, staged, published, deadline)
        return published, staged

    def _give_up(self) -> None:
        """No step comes. Never raises: what went wrong is raised."""
        self._planning.forget()
        with suppress(EndpointError):
            self._server.ask(m.Expect(False), m.Obeyed, _TELL_SECONDS)

    def _in_background(self, act: Callable[..., None], *args: object) -> None:
        threading.Thread(target=act, args=args, name="torchrelay-publish", daemon=True).start()

    def _begin(self, deadline: Deadline) -> None:
        """Have the process that serves, and tell it that a step comes."""
        if self._server.start(deadline.left()):
            self._begin_anew()
        self._server.ask(m.Expect(True), m.Obeyed, deadline.left())

    # What an endpoint and a keeper do in ways of their own.

    def _begin_anew(self) -> None:
        """The process that serves was started: it has nothing yet. Whoever the one before lent
        memory to may still read it, so that is not written to again."""
        self._newest = 1
        for slot in list(self._arenas):
            self._drop_arena(slot)

    def _busy(self, deadline: Deadline) -> str:
        """Why a step cannot be taken on now, before anything is planned."""
        asked = self._server.ask(
            m.Reclaim(1 - self._newest, ask=True), m.Reclaimed, deadline.left()
        )
        return "" if asked.free else asked.why or "it is read"

    def _note_for_all(self, deadline: Deadline) -> bytes:
        """What this rank's process has to say to the others'."""
        return b""

    def _confer(self, notes: list[bytes], urls: list[str]) -> tuple[bytes, str]:
        """The coordinator's: what the notes of all ranks add up to; why the step is skipped."""
        return b"", ""

    def _meet(self, urls: list[str], note: bytes, deadline: Deadline) -> None:
        """All ranks said where they show their parts, and what they had to say."""
        self.urls = urls

    def _room(self, call: Call, nbytes: int, step: int, deadline: Deadline) -> RoomOffer:
        """A slot for so many bytes. All ranks have one, or none does."""
        slot = 1 - self._newest
        freed = self._server.ask(m.Reclaim(slot, ask=False), m.Reclaimed, deadline.left())
        if freed.mapped:  # others have its memory, and are to keep what is in it
            self._drop_arena(slot)
        return RoomOffer(slot)

    def _listing(self, urls: list[str]) -> set[int]:
        """The ranks, beside the coordinator, whose processes get the record of all parts."""
        return set()

    # Plan and stage, while the caller waits.

    def _plan(self, call: Call, state: object, deadline: Deadline) -> PlannedShare:
        with gc_paused():
            agreed = agree(self._planning, call, deadline, state, lambda: ("published", ""))
            share = Share(*self._planning.resolve(agreed.plan))
        return PlannedShare(share, self._planning.outlines if self._all.coordinates else None)

    def _make_room(
        self, call: Call, plan: Callable[[Call], PlannedShare], step: int, deadline: Deadline
    ) -> PlannedStep | str:
        """What all ranks stage, and where; or why they do not."""
        urls: list[str] = []

        def mine() -> bytes:
            busy = self._busy(deadline)
            note = self._note_for_all(deadline)
            return msgspec.msgpack.encode(_Offered(step, self._url(), deadline.left(), busy, note))

        def decide(said: list[bytes]) -> list[bytes]:
            offers = [plan_limits.read(_offered, data, rank) for rank, data in enumerate(said)]
            agreed_step([offer.step for offer in offers])
            deadline.hasten(min(offer.left for offer in offers))
            urls.extend(offer.url for offer in offers)
            busy = next((offer.busy for offer in offers if offer.busy), "")
            note, full = self._confer([offer.note for offer in offers], urls)
            answer = _Answered(list(dict.fromkeys(urls)), deadline.left(), busy or full, note)
            return [msgspec.msgpack.encode(answer)] * len(said)

        call.at("planning a publish")
        answer = plan_limits.read(
            _answered, call.round("plan", mine, decide, deadline), COORDINATOR
        )
        deadline.hasten(answer.left)
        if answer.skipped:
            self._meet(answer.urls, answer.note, deadline)
            return answer.skipped
        with call.telling("plan", deadline):
            self._meet(answer.urls, answer.note, deadline)
        share, outlines = plan(call)
        call.at("staging")
        nbytes = max(PAGE, arena_bytes(share.files))
        room = self._room(call, nbytes, step, deadline)
        return room.why or PlannedStep(room.slot, nbytes, share, outlines, urls)

    def _stage(
        self, planned: PlannedStep, step: int, deadline: Deadline, begun: float
    ) -> StagedStep:
        slot, nbytes, share, outlines, urls = planned
        settle()
        volumes = self._copy(share, slot, nbytes, deadline)
        seconds = time.monotonic() - begun
        return StagedStep(step, slot, share, volumes, outlines, urls, seconds)

    def _copy(self, share: Share, slot: int, nbytes: int, deadline: Deadline) -> list[m.Volume]:
        """Copy a share into its slot; where in it each of its volumes lies."""
        volumes, end = [], 0
        share.hash_on_devices()
        for file in share.files:
            volumes.append(m.Volume(file.name, end, file.nbytes, file.chunk_bytes, file.digests))
            end += paged(file.nbytes)
        arena = self._arena(slot, nbytes, share)
        copies = [
            Copy(stream, 0, volume.nbytes, volume.start)
            for stream, volume in zip(share.streams, volumes, strict=True)
        ]
        stage(copies, arena.tensor, threads=WORKERS)
        share.check_unchanged()
        self._server.attach(slot, arena.fd, arena.nbytes, deadline.left())
        return volumes

    def _arena(self, slot: int, nbytes: int, share: Share) -> Arena:
        """The memory of a slot: what it had, unless that is too small."""
        pinned = any(stream.devices for stream in share.streams)
        arena = self._arenas.get(slot)
        if arena is not None and (arena.nbytes < nbytes or (pinned > arena.pinned)):
            self._drop_arena(slot)
        if slot not in self._arenas:
            self._arenas[slot] = Arena(nbytes, pinned=pinned)
        return self._arenas[slot]

    def _drop_arena(self, slot: int) -> None:
        if arena := self._arenas.pop(slot, None):
            arena.close()

    # Hash and show, on a thread.

    def _finish(
        self, call: Call, staged: StagedStep, published: Published, deadline: Deadline
    ) -> None:
        begun = time.monotonic()
        fault: BaseException | None = None
        try:
            self._show(call, staged, deadline)
            self._newest = staged.slot
            seconds = time.monotonic() - begun
            self._note(staged.step, staged.share.nbytes, staged.stage_seconds, seconds, None)
        except BaseException as found:
            fault = found
        try:
            if fault is not None:
                self._server.ask(m.Expect(False), m.Obeyed, _TELL_SECONDS)
        except Exception as lost:
            logger.debug("the server process cannot be told: %s", lost)
        call.farewell()
        published.end(fault)

    def _hashed(self, staged: StagedStep, deadline: Deadline) -> Written:
        asked = m.Hash(staged.slot, staged.volumes)
        return staged.share.written(
            self._server.ask(asked, m.VolumeDigests, deadline.left()).digests
        )

    def _tell_failure(
        self, call: Call, fault: BaseException, published: Published, deadline: Deadline
    ) -> None:
        """This rank could not stage its part, which its caller hears from it."""
        try:
            with call.telling("write", deadline):
                raise fault
        except BaseException as told:
            logger.debug("step %d given up: %s", published.step, told)
        call.farewell()
        published.end(None)

    def _show(self, call: Call, staged: StagedStep, deadline: Deadline) -> None:
        """Every rank shows its volumes; the record of them all is shown by the coordinator when
        all are there, and by the other ranks that list them."""
        listing = self._listing(staged.urls)

        def decide(said: list[bytes]) -> list[bytes]:
            shares = [plan_limits.read(_written, data, rank) for rank, data in enumerate(said)]
            assert staged.outlines is not None
            record = commit_record(staged.step, shares, staged.outlines, __version__)
            places = [rank for rank, share in enumerate(shares) for _ in share.files]
            snapshot = content_digest(record)
            whole = msgspec.msgpack.encode(_whole(record, snapshot, staged.urls, places))
            brief = msgspec.msgpack.encode(_Recorded(snapshot))
            full = msgspec.msgpack.encode(_Recorded(snapshot, whole))
            return [full if rank in (COORDINATOR, *listing) else brief for rank in range(len(said))]

        written: list[Written] = []

        def hash_mine() -> bytes:
            written.append(self._hashed(staged, deadline))
            return msgspec.msgpack.encode(written[0])

        heard = call.round("write", hash_mine, decide, deadline)
        found = plan_limits.read(_recorded, heard, COORDINATOR)
        own = [
            msgspec.structs.replace(volume, digests=file.digests)
            for volume, file in zip(staged.volumes, written[0].files, strict=True)
        ]
        shown = m.Show(staged.slot, staged.step, found.snapshot, b"", own, places=[0] * len(own))

        def mine() -> bytes:
            self._server.ask(shown, m.Obeyed, deadline.left())
            if found.whole and not self._all.coordinates:
                self._server.forward(found.whole, m.Obeyed, deadline.left())
            return b""

        def last(said: list[bytes]) -> list[bytes]:
            self._server.forward(found.whole, m.Obeyed, deadline.left())
            return said

        call.round("show", mine, last, deadline)

    def _note(
        self, step: int, nbytes: int, staging: float, hashing: float, skipped: str | None
    ) -> None:
        self._server.ask(m.Note(step, nbytes, staging, hashing, skipped), m.Obeyed, _TELL_SECONDS)

    def settle(self, seconds: float) -> None:
        """Wait for what is being published."""
        if self._last is not None:
            wait_until_set(self._last._ended, seconds)

    def forsake(self) -> None:
        for arena in self._arenas.values():
            arena.forsake()

    def close(self) -> None:
        for slot in list(self._arenas):
            self._drop_arena(slot)


def _whole(record: Checkpoint, snapshot: str, urls: list[str], places: list[int]) -> m.Show:
    """A record with everything that it lists, wherever that is."""
    return m.Show(
        -1,
        record.step,
        snapshot,
        encode(record),
        [
            m.Volume(file.name, -1, file.nbytes, file.chunk_bytes, file.digests)
            for file in record.files
        ],
        list(map(_volume_tensor, record.tensors)),
        urls,
        places,
    )


def _volume_tensor(stored: Any) -> m.VolumeTensor:
    size = itemsize(stored.dtype)
    known = DTYPES.get(stored.dtype)
    shown = stored.shape if known else (*stored.shape, size)
    boxes = tuple(
        m.VolumeBox(shard.offsets, shard.sizes, shard.file, shard.start) for shard in stored.shards
    )
    return m.VolumeTensor(stored.name, known or "U8", shown, stored.shape, size, boxes)
