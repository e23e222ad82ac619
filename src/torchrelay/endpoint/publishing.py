"""From a live state to a step that can be read: plan, reserve memory, copy, hash, show.

The caller waits until its state is copied. The rest happens on a thread, in the server's process.
All ranks publish a step, or none does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec

from torchrelay.coordination.call import Call
from torchrelay.coordination.coordinator import COORDINATOR, Coordinator
from torchrelay.coordination.messages import decoded
from torchrelay.deadlines import Deadline
from torchrelay.endpoint.encoding import Encoding
from torchrelay.endpoint.float8 import quantized
from torchrelay.endpoint.process import ServerLink
from torchrelay.endpoint.server import messages as m
from torchrelay.errors import EndpointError, UsageError
from torchrelay.memory.arena import Arena
from torchrelay.memory.gpu.side import settle
from torchrelay.memory.staging import Copy, stage
from torchrelay.metrics import Measurement
from torchrelay.parts.bitmaps import tiled
from torchrelay.parts.fields import Field
from torchrelay.pending import Pending, logger
from torchrelay.record.dtypes import itemsize
from torchrelay.record.encoding import content_digest, encode, encode_at_rest, state_digest
from torchrelay.record.schema import Record
from torchrelay.results import Report
from torchrelay.stores.safetensors import tensors_of
from torchrelay.stores.shares.commit_record import commit_record, decode_shares
from torchrelay.stores.shares.layout import Entry, FileLayout
from torchrelay.stores.shares.planner import PlannedShare, SharePlanner
from torchrelay.stores.shares.share import Share
from torchrelay.stores.writer.file_writer import WORKERS

_FINISH_SECONDS = 5.0  # for the last message of a publish


class Policy:
    """The part of a publish that differs between endpoints and keepers; this is an endpoint's. The
    coordinator's server lists the step, and names the others."""

    operation = "publish"  # its name in metrics

    def report(self, deadline: Deadline) -> bytes:
        """This rank's server reports to the coordinator before a step."""
        return b""

    def choose(self, reports: list[bytes], urls: list[str], step: int) -> tuple[bytes, str]:
        """The coordinator's: a decision for all servers, and why the step is skipped, if it is."""
        return b"", ""

    def meet(self, urls: list[str]) -> None:
        """The URLs of all ranks' servers; called where they have changed."""

    def check(self, parts: list[int], urls: list[str]) -> None:
        """The coordinator's: raise where the servers can never take parts of these sizes."""

    def listing(self, urls: list[str]) -> set[int]:
        """The ranks whose servers list the step."""
        return {COORDINATOR}


class _Offer(msgspec.Struct, array_like=True):
    """A rank at the beginning of a publish."""

    step: int
    url: str
    left: float
    report: bytes


class _Begin(msgspec.Struct, array_like=True):
    """The coordinator's answer: the server of each rank, or why the step is skipped."""

    urls: list[str]
    left: float
    decision: bytes
    skipped: str


class _Recorded(msgspec.Struct, array_like=True):
    """The record of all parts: its digest, and for ranks that list it all of it."""

    snapshot: str
    whole: m.StepRecord | None = None


_offer = msgspec.msgpack.Decoder(_Offer)
_begin = msgspec.msgpack.Decoder(_Begin)
_room = msgspec.msgpack.Decoder(tuple[int, str])
_recorded = msgspec.msgpack.Decoder(_Recorded)
_encode = msgspec.msgpack.encode


class StagedStep(NamedTuple):
    """A step that is copied here, on its way to be shown."""

    step: int
    slot: int
    planned: PlannedShare
    volumes: list[m.Volume]
    urls: list[str]
    seconds: float


class Publisher:
    """Publishes the states of one rank, one at a time. `start` has the server run, within seconds,
    and returns whether it is a new one. Without an `encoding` no changes are found."""

    def __init__(
        self,
        ranks: Coordinator,
        server: ServerLink,
        start: Callable[[float], bool],
        url: Callable[[], str],
        policy: Policy,
        encoding: Encoding | None = None,
    ) -> None:
        self._encoding = encoding or Encoding(history=0)
        self._all, self._server, self._policy = ranks, server, policy
        self._start, self._url = start, url
        block = self._encoding.float8_block
        self._planner = SharePlanner(
            ranks.rank,
            ranks.world,
            None,
            ranks.members,
            self._encoding.dtype,
            None if block is None else partial(quantized, block=block),
        )
        self.arenas: dict[int, Arena] = {}  # by slot
        self._last: Pending | None = None
        self._fields = KnownFields()
        self.urls: list[str] = []  # of the ranks' servers, each once; the first lists all parts

    def publish(self, state: object, step: int, deadline: Deadline) -> Pending:
        """Publish a state: returns when it is copied."""
        return self.publish_planned(
            lambda call: self._planner.plan(state, call, deadline), step, deadline
        )[0]

    def publish_planned(
        self, plan: Callable[[Call], PlannedShare], step: int, deadline: Deadline
    ) -> tuple[Pending, StagedStep | None]:
        """The same for what `plan` returns; no staged step where it is skipped."""
        operation = self._policy.operation
        with self._all.measured(operation, step, background=True) as measured:
            return self._publish(plan, step, deadline, measured)

    def _publish(
        self,
        plan: Callable[[Call], PlannedShare],
        step: int,
        deadline: Deadline,
        measured: Measurement,
    ) -> tuple[Pending, StagedStep | None]:
        call = self._all.call("publish", step)
        with call.reporting("plan", deadline):
            if self._last is not None and not self._last.ends_within(deadline.left()):
                raise TimeoutError(f"step {self._last.step} is still being published")
            begun = time.monotonic()
            self._have_server(deadline)
        begin = self._agree(call, step, deadline)
        slot, why = -1, begin.skipped
        if not why:
            try:
                planned = plan(call)
                slot, why = self._reserve(call, step, planned.share, begin, deadline)
            except BaseException:
                self._give_up(step, unused=True)
                raise
        if why:
            seconds = time.monotonic() - begun
            ended = m.FinishPublish(step, 0, seconds, skipped=why, unused=True)
            self._server.ask(ended, m.Obeyed, _FINISH_SECONDS)
            return Pending(step, "publishing", why, measured), None
        self._last = pending = Pending(step, "publishing", measured=measured)
        try:
            volumes = self._copy(planned.share, slot)
        except BaseException as fault:
            self._give_up(step)
            # A thread tells the other ranks: they read it when they have copied their own parts.
            self._in_background(self._tell_failure, call, fault, pending, deadline)
            raise
        seconds = time.monotonic() - begun
        staged = StagedStep(step, slot, planned, volumes, begin.urls, seconds)
        self._in_background(self._finish, call, staged, pending, deadline)
        return pending, staged

    def _have_server(self, deadline: Deadline) -> None:
        if self._start(deadline.left()):
            # Processes that the one before lent memory to may still read it: it stays unchanged.
            self._drop_arenas()
            self.urls = []

    def _give_up(self, step: int, *, unused: bool = False) -> None:
        """The step will not come. Never raises: what went wrong is raised."""
        with suppress(EndpointError):
            ended = m.FinishPublish(step, failed=True, unused=unused)
            self._server.ask(ended, m.Obeyed, _FINISH_SECONDS)

    def _in_background(self, act: Callable[..., None], *args: object) -> None:
        threading.Thread(target=act, args=args, name="torchrelay-publish", daemon=True).start()

    # Agree, reserve and copy, while the caller waits.

    def _agree(self, call: Call, step: int, deadline: Deadline) -> _Begin:
        """All ranks publish the same step, and know each other's servers."""

        def mine() -> bytes:
            try:
                report = self._policy.report(deadline)
            except EndpointError:  # the server was lost just now
                self._have_server(deadline)
                report = self._policy.report(deadline)
            return _encode(_Offer(step, self._url(), deadline.left(), report))

        def decide(said: list[bytes]) -> list[bytes]:
            offers = [decoded(_offer, data, rank) for rank, data in enumerate(said)]
            steps = sorted({offer.step for offer in offers})
            if len(steps) > 1:
                raise UsageError(f"ranks name different steps: {steps}. Name the same on all")
            deadline.hasten(min(offer.left for offer in offers))
            urls = [offer.url for offer in offers]
            decision, why = self._policy.choose([offer.report for offer in offers], urls, step)
            return [_encode(_Begin(urls, deadline.left(), decision, why))] * len(said)

        call.at("agreeing on a publish")
        found = decoded(_begin, call.round("begin", mine, decide, deadline), COORDINATOR)
        deadline.hasten(found.left)
        urls = list(dict.fromkeys(found.urls))
        if urls != self.urls:
            with call.reporting("plan", deadline):
                self._policy.meet(urls)
            self.urls = urls
        return found

    def _reserve(
        self, call: Call, step: int, share: Share, begin: _Begin, deadline: Deadline
    ) -> tuple[int, str]:
        """A slot for this rank's part, or why there is none. All ranks have one, or none does."""
        nbytes = m.laid_out(share.files)[1]
        found: list[m.Reserved] = []

        def mine() -> bytes:
            wanted = m.Reserve(step, nbytes, begin.decision)
            found.append(self._server.ask(wanted, m.Reserved, deadline.left()))
            for slot in found[0].dropped:
                self._drop_arena(slot)
            return _encode((nbytes, found[0].why))

        def decide(said: list[bytes]) -> list[bytes]:
            rooms = [decoded(_room, data, rank) for rank, data in enumerate(said)]
            self._policy.check([size for size, _ in rooms], begin.urls)
            return [next((why for _, why in rooms if why), "").encode()] * len(said)

        call.at("reserving memory")
        why = call.round("reserve", mine, decide, deadline).decode()
        return found[0].slot, why

    def _copy(self, share: Share, slot: int) -> list[m.Volume]:
        """Copy a share into its slot; where each of its volumes begins."""
        settle()
        share.hash_on_devices()
        volumes, nbytes = m.laid_out(share.files)
        pinned = any(stream.devices for stream in share.streams)
        arena = self.arenas.get(slot)
        if arena is None or arena.nbytes < nbytes or pinned > arena.pinned:
            self._drop_arena(slot)
            arena = self.arenas[slot] = Arena(nbytes, pinned=pinned)
        copies = [
            Copy(stream, 0, volume.nbytes, volume.start)
            for stream, volume in zip(share.streams, volumes, strict=True)
        ]
        stage(copies, arena.tensor, threads=WORKERS)
        share.check_unchanged()
        return volumes

    def _drop_arena(self, slot: int) -> None:
        if arena := self.arenas.pop(slot, None):
            arena.close()

    # Hash and show, on a thread.

    def _finish(self, call: Call, staged: StagedStep, pending: Pending, deadline: Deadline) -> None:
        begun = time.monotonic()
        report: Report | None = None
        fault: BaseException | None = None
        try:
            self._show(call, staged, deadline)
            ended = m.FinishPublish(staged.step, staged.planned.share.nbytes, staged.seconds)
            ended.hash_seconds = time.monotonic() - begun
            self._server.ask(ended, m.Obeyed, _FINISH_SECONDS)
            seconds = {"stage": staged.seconds, "hash": ended.hash_seconds}
            report = Report(staged.step, staged.planned.share.nbytes, seconds)
        except BaseException as found:
            fault = found
            self._give_up(staged.step)
        call.drain()
        pending.end(report, fault)

    def _tell_failure(
        self, call: Call, fault: BaseException, pending: Pending, deadline: Deadline
    ) -> None:
        """This rank could not copy its part, which its caller knows."""
        try:
            with call.reporting("write", deadline):
                raise fault
        except BaseException as told:
            logger.debug("step %d given up: %s", pending.step, told)
        call.drain()
        pending.end(None, None)

    def _show(self, call: Call, staged: StagedStep, deadline: Deadline) -> None:
        """Every rank shows its volumes, those that list the step with the record of all of them.
        The coordinator is the last: what it lists can be read."""
        listing = self._policy.listing(staged.urls)
        written: list[Record] = []

        def hash_mine() -> bytes:
            written.append(self._hashed(staged, deadline))
            return encode(written[0])

        def decide(said: list[bytes]) -> list[bytes]:
            shares = decode_shares(staged.step, said)
            assert staged.planned.outlined is not None
            record = commit_record(staged.step, shares, staged.planned.outlined)
            places = [rank for rank, share in enumerate(shares) for _ in share.volumes]
            snapshot = content_digest(record)
            whole = _whole(record, staged.urls, places)
            brief, full = _encode(_Recorded(snapshot)), _encode(_Recorded(snapshot, whole))
            return [full if rank in listing else brief for rank in range(len(said))]

        heard = call.round("write", hash_mine, decide, deadline)
        found = decoded(_recorded, heard, COORDINATOR)
        own = [
            msgspec.structs.replace(volume, digests=file.digests)
            for volume, file in zip(staged.volumes, written[0].volumes, strict=True)
        ]
        shown = m.Show(staged.slot, staged.step, found.snapshot, own, found.whole)

        def show() -> bytes:
            self._server.ask(shown, m.Obeyed, deadline.left())
            return b""

        def show_last(said: list[bytes]) -> list[bytes]:
            show()
            return said

        mine = (lambda: b"") if self._all.coordinates else show
        call.round("show", mine, show_last, deadline)

    def _hashed(self, staged: StagedStep, deadline: Deadline) -> Record:
        arena = self.arenas[staged.slot]
        request = m.StageSlot(staged.slot, arena.nbytes, staged.volumes, attached=True)
        if self._encoding.history:
            request.fields = self._fields.of(staged.planned.share)
        found = self._server.stage(request, arena.fd, deadline.left())
        return staged.planned.share.written(found.digests)

    # The end.

    def settle(self, seconds: float) -> None:
        """Wait for what is being published."""
        if self._last is not None:
            self._last.ends_within(seconds)

    def forsake(self) -> None:
        """In a child of a fork: the server and the memory are the parent's."""
        self._server.process.detach_after_fork()
        for arena in self.arenas.values():
            arena.forsake()

    def close(self, seconds: float) -> None:
        """Wait that long for what is being published, then let go of the server and the memory."""
        self.settle(seconds)
        self._server.process.close()
        self._drop_arenas()

    def _drop_arenas(self) -> None:
        for slot in list(self.arenas):
            self._drop_arena(slot)


class KnownFields:
    """The fields of a share's volumes. Those of the last one are kept: shares of one plan have the
    same layouts."""

    def __init__(self) -> None:
        self._last: tuple[Sequence[FileLayout], list[list[Field]]] | None = None

    def of(self, share: Share) -> list[list[Field]]:
        if self._last is None or self._last[0] is not share.layouts:
            entries = share.contents.all_entries()
            self._last = share.layouts, [_fields(file, entries) for file in share.layouts]
        return self._last[1]


def _fields(file: FileLayout, entries: Sequence[Entry]) -> list[Field]:
    placed = (
        Field(start, start + entries[index].nbytes, itemsize(entries[index].dtype))
        for start, index in file.placed
    )
    return tiled(placed, file.nbytes)


def _whole(record: Record, urls: list[str], places: list[int]) -> m.StepRecord:
    """A record with everything that it lists, wherever that is."""
    volumes = [
        m.Volume(file.name, -1, file.nbytes, file.chunk_bytes, file.digests)
        for file in record.volumes
    ]
    count = len(tensors_of(record))
    state = state_digest(record)
    return m.StepRecord(encode_at_rest(record), volumes, count, urls, places, state)
