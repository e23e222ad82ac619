"""One attempt to save a step on one rank, from the draft to the commit.

| stage   | act                                                                        | next      |
|---------|----------------------------------------------------------------------------|-----------|
| NEW     | `begin`: the ranks wait for the save before, the coordinator makes a draft | BEGUN     |
| BEGUN   | `plan`: the ranks compare what they have, and each knows what it writes    | PLANNED   |
| PLANNED | `write` this rank's share                                                  | WRITTEN   |
| PLANNED | `copy` the share: the caller may change the state                          | STAGED    |
| STAGED  | `write_copy`, in the background                                            | WRITTEN   |
| WRITTEN | `commit`: the coordinator writes the commit record, and puts the step in   | COMMITTED |
|         | place                                                                      |           |

Before `commit`, a failure is reported to the other ranks, which then fail too, and the draft is
removed (`give_up`). A commit may end without an answer on some rank: `step_draft` says how it finds
out then whether the step is there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Annotated

import msgspec

from torchrelay.checkpointer.catalog import StepCatalog
from torchrelay.checkpointer.marks import OnReplicas, mark_of, warn_of_mark
from torchrelay.checkpointer.previous import Previous, PreviousSteps
from torchrelay.checkpointer.share_writer import Save, ShareWriter, StagedShare, WrittenShare
from torchrelay.coordination.call import returned
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.coordination.messages import decoded
from torchrelay.errors import CheckpointError, StorageTimeoutError
from torchrelay.memory.bounded import bounded
from torchrelay.pending import logger
from torchrelay.record.encoding import encode
from torchrelay.results import Outcome, Report
from torchrelay.shares.commit_record import commit_record, decode_shares
from torchrelay.shares.planner import PlannedShare, SharePlanner
from torchrelay.shares.share import Share
from torchrelay.shares.step_draft import GRACE, StepDraft
from torchrelay.state.frozen import frozen_storages
from torchrelay.stores.tokens import new_token


class _ShareReport(msgspec.Struct, array_like=True, frozen=True):
    """The report of a rank that has written its share: its part of the record, and the bytes that
    it reused."""

    record: bytes
    reused: Annotated[int, msgspec.Meta(ge=0)]


# Token, id and path or URL of a draft, as the coordinator has them; and the step to take files of.
_begun = msgspec.msgpack.Decoder(tuple[str, str, str, Previous | None])
_reports = msgspec.msgpack.Decoder(_ShareReport)
_encode = msgspec.msgpack.Encoder().encode


class SaveStage(Enum):
    NEW = "nothing was done"
    BEGUN = "there is a draft"
    PLANNED = "this rank knows its share"
    STAGED = "the share is copied"
    WRITTEN = "the share is in files"
    COMMITTED = "the step is in place"


class SaveAttempt:
    """The acts are called in the order of the table, each once."""

    def __init__(
        self,
        save: Save,
        ranks: Coordinator,
        catalog: StepCatalog,
        planner: SharePlanner,
        writer: ShareWriter,
        steps: PreviousSteps | None,
        replicas: OnReplicas = "keep",
    ) -> None:
        self._replicas: OnReplicas = replicas
        self.save, self._ranks, self._catalog = save, ranks, catalog
        self._planner, self._writer, self._steps = planner, writer, steps
        self._previous: Previous | None = None
        self.stage = SaveStage.NEW
        self._planned: PlannedShare | None = None
        self._staged: StagedShare | None = None
        self._written: WrittenShare | None = None

    def begin(self, wait: Callable[[float], None]) -> None:
        """Create the draft, once the save before has ended: `wait` raises unless it does so within
        that many seconds, with success."""
        self._enter(SaveStage.NEW)
        save, store, deadline = self.save, self._catalog.store, self.save.deadline

        def mine() -> bytes:
            wait(deadline.left())
            return b"damage" if self._steps is not None and self._steps.saw_damage() else b""

        def decide(messages: list[bytes]) -> list[bytes]:
            look = partial(self._catalog.check_order, save.step, overwrite=save.overwrite)
            listing = bounded(look, deadline.early(), "list the steps", file=store.url)
            if save.step in listing and self._catalog.is_marked(save.step):
                save.overwrite = True  # the run went back to a step before it
            draft = StepDraft(
                store, save.step, new_token(), deadline.early, overwrite=save.overwrite
            )
            draft.begin(listing)
            save.draft = draft
            if self._steps is not None and not any(messages):
                choose = partial(self._steps.choose, listing)
                self._previous = bounded(choose, deadline.early(), "look at the step before")
            answer = _encode((draft.token, draft.id, draft.files.place, self._previous))
            return [answer] * self._ranks.world

        save.call.at("waiting for the save before")
        begun = save.call.round("begin", mine, decide, deadline)
        if save.draft is None:
            name, id_, place, self._previous = decoded(_begun, begun, rank=0)
            draft = StepDraft(store, save.step, name, deadline.early, overwrite=save.overwrite)
            draft.id = id_
            draft.check_visible(self._ranks.rank, place)
            save.draft = draft
        self.stage = SaveStage.BEGUN

    def plan(self, state: object) -> None:
        self._enter(SaveStage.BEGUN)
        save = self.save

        def check_space(nbytes: int) -> None:
            # What rested last time will rest, mostly; what does not is written, if there is room.
            reused = self._previous.reused if self._previous is not None else 0
            act = partial(self._catalog.check_space, max(0, nbytes - reused))
            bounded(act, save.deadline.early(), "look for free space", file=self._catalog.url)

        with save.watch("plan"):
            save.call.at("planning")
            planned = self._planner.plan(state, save.call, save.deadline, check_space)
            mark = mark_of(planned.differing, planned.differ, save.step, self._replicas)
            self._planned = planned._replace(mark=mark)
            self._plan_reuse(state, planned.share)
        if mark is not None and self._ranks.coordinates:
            warn_of_mark(mark, save.step)
        self.stage = SaveStage.PLANNED

    def _plan_reuse(self, state: object, share: Share) -> None:
        """Have the share take what did not change from the step before, once it is hashed."""
        steps, draft = self._steps, self.save.draft
        if steps is None or draft is None:
            return
        act = partial(steps.known, self._previous)
        known = bounded(act, self.save.deadline.early(), "look at the step before")
        if not steps.reuse.begun:
            steps.reuse.begin(share, frozen_storages(state), known)
        self.save.decide = partial(steps.reuse.decide, step=known, draft=draft.files)

    def write(self) -> None:
        """Write this rank's share, from where it is."""
        self._enter(SaveStage.PLANNED)
        assert self._planned is not None
        with self.save.watch("write"):
            self._written = self._writer.write(self.save, self._planned.share)
        self.stage = SaveStage.WRITTEN

    def copy(self) -> None:
        """Copy this rank's share, so that the caller may change the state."""
        self._enter(SaveStage.PLANNED)
        assert self._planned is not None
        with self.save.watch("stage"):
            self._staged = self._writer.stage(self.save, self._planned)
        self.stage = SaveStage.STAGED

    def write_copy(self) -> None:
        self._enter(SaveStage.STAGED)
        assert self._staged is not None
        self.save.call.at(self._staged.share.phase)
        with self.save.watch("write"):
            self._written = self._staged.finish()
        self.stage = SaveStage.WRITTEN

    def commit(self) -> Report:
        """The last round: the coordinator commits what all ranks have written. A failure needs no
        `give_up`."""
        self._enter(SaveStage.WRITTEN)
        assert self._planned is not None and self._written is not None
        save, planned, written = self.save, self._planned, self._written
        payload = _encode(_ShareReport(encode(written.record), written.reused))
        sizes: dict[str, int] = {}

        def decide(messages: list[bytes]) -> list[bytes]:
            assert planned.outlined is not None and save.draft is not None
            reports = [decoded(_reports, data, rank) for rank, data in enumerate(messages)]
            shares = decode_shares(save.step, [one.record for one in reports])
            reused = sum(one.reused for one in reports)
            since_full = self._previous.since_full + 1 if reused and self._previous else 0
            record = commit_record(
                save.step,
                shares,
                planned.outlined,
                metrics=save.metrics,
                names=planned.names,
                reused=(reused, since_full),
                mark=planned.mark,
            )
            save.draft.commit(record)
            sizes.update((file.name, file.nbytes) for file in record.volumes)
            if self._steps is not None:
                act = partial(self._steps.saved, save.step, save.draft.token, reused, since_full)
                with suppress(StorageTimeoutError):
                    bounded(act, max(GRACE, save.deadline.left()), "look at the step")
            return [b""] * len(messages)

        with save.watch("commit"):
            try:
                save.call.round("write", lambda: payload, decide, save.deadline)
            except BaseException as fault:
                self._find_outcome(fault)
            finally:
                save.call.drain()
        self.stage = SaveStage.COMMITTED
        if self._steps is not None and save.draft is not None:
            if self._previous is None:
                self._steps.wrote_everything()
            self._steps.reuse.committed(save.draft.token, written.share, written.digests)
        if self._ranks.coordinates:
            self._prune(sizes, marked=planned.mark is not None)
        url, seconds = f"{self._catalog.url}/step-{save.step}", dict(save.watch.seconds)
        return Report(
            save.step,
            written.share.nbytes,
            seconds,
            {url: Outcome(route="storage")},
            bytes_written=written.share.nbytes - written.reused,
            bytes_reused=written.reused,
            instead=written.instead,
            differing=planned.differing,
        )

    def _find_outcome(self, fault: BaseException) -> None:
        """The commit failed, or this rank had no answer. Raises unless the step is in place."""
        save, draft = self.save, self.save.draft
        assert draft is not None
        known = save.call.answered or not isinstance(fault, CheckpointError)
        if known or (self._ranks.coordinates and draft.files.revoke()):
            self._discard(fault)
            raise fault
        assert isinstance(fault, CheckpointError)
        draft.look(fault)

    def _prune(self, sizes: dict[str, int], *, marked: bool) -> None:
        """Remove old steps. The step is committed by now: nothing here fails the save."""
        save = self.save
        seconds = max(GRACE, save.deadline.left())
        try:
            act = partial(self._catalog.prune, save.step, sizes, save.metrics, marked=marked)
            bounded(act, seconds, "remove old steps", file=self._catalog.url)
        except StorageTimeoutError as overdue:
            logger.warning("%s", overdue)

    def give_up(self, fault: BaseException) -> None:
        """This rank failed before the last round: report it to the others, then clean up."""
        if self.save.call.awaited:
            try:
                self.save.call.round("write", fault, returned, self.save.deadline)
            except BaseException as raised:  # the caller raises the failure itself
                logger.debug("step %d given up: %s", self.save.step, raised)
                fault = raised  # that of another rank, if this one only had to end
        self._discard(fault)

    def _discard(self, fault: BaseException) -> None:
        source_failed = isinstance(fault, CheckpointError) and fault.phase == "reuse"
        if source_failed and self._steps is not None and self._previous is not None:
            self._steps.refuse(self._previous)
        if self._ranks.coordinates and self.save.draft is not None:
            self.save.draft.discard()

    def release(self) -> None:
        """Let go of the state and of its copy: the attempt is over."""
        staged, self._staged = self._staged, None
        self._planned = self._written = None
        if staged is not None:
            staged.release()

    def _enter(self, stage: SaveStage) -> None:
        assert self.stage is stage, f"{self.stage.name}, not {stage.name}"
