"""A load, from a committed step to the caller's state.

The step is offered to the destination as this rank's share of it, and refused there if it does not
fit. Then every digest is checked, new tensors are read, and everything that can fail is done; only
then is anything of the caller's written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch

from torchrelay.errors import MismatchError, StorageTimeoutError
from torchrelay.landing.commit.ending import Together, Watch, alone
from torchrelay.landing.places import Landed
from torchrelay.landing.seam import Landing, land
from torchrelay.landing.terms import Terms
from torchrelay.landing.workspace import Workspace
from torchrelay.plan.reads import BoxRead, plan_reads
from torchrelay.plan.region import Region
from torchrelay.plan.share import Portion, RankShare
from torchrelay.record.checkpoint.schema import Checkpoint
from torchrelay.record.checkpoint.stored import Shard, StoredTensor
from torchrelay.record.pause import gc_paused
from torchrelay.state import tensors as t
from torchrelay.state.tree import show
from torchrelay.stores.box_reads import ShardRead, Wave, arrived, by_name, waves
from torchrelay.stores.device_reading import DeviceFetch
from torchrelay.stores.reading import Fetch, opened
from torchrelay.stores.seam import LendingStep, OpenStep

if TYPE_CHECKING:
    from torchrelay.checkpointer.planners import PlannedReads

    # What a planner of the user's wants of a record, this rank's share of it and its landing.
    Planned = Callable[[Checkpoint, RankShare, Landing], PlannedReads]

_HOST = torch.empty(0, dtype=torch.uint8, device="cpu")


class Loading:
    """One load on one rank: planned by the constructor, then `check`, `make` and `end`.
    Nothing of the caller's is written before `end`.

    Without a `store` its bytes come by `arrive`.
    """

    def __init__(
        self,
        store: OpenStep | None,
        checkpoint: Checkpoint,
        into: object,
        terms: Terms,
        *,
        world: int,
        only: tuple[str, ...] = (),
        planned: Planned | None = None,
        progress: Callable[[int], None] | None = None,
        means: Workspace | None = None,
    ) -> None:
        self._store = store
        self._checkpoint = checkpoint
        self._told = progress
        self._checked, self._staged = False, terms.staged
        self._files = files = _StepFiles(store, checkpoint)
        # How reads are done that may hang; `left` is set where they have been left behind.
        self.within: Callable[[Callable[[], None]], None] = lambda read: read()
        self.left = threading.Event()
        self.instead: dict[str, str] = {}  # why a faster way was not taken
        with gc_paused():
            self._share = RankShare(
                checkpoint.outlines_for(terms.rank, world),
                by_name(checkpoint),
                only=only,
                guessed=checkpoint.planned,
                converts=planned is not None,
                look=files.look_at,
                lend=files.lend,
            )
            on = terms._replace(device=terms.device or torch.device("cpu"))
            self._landing = land(self._share, into=into, means=means, **on._asdict())
            self._shards: tuple[list[ShardRead], list[ShardRead]] = [], []
            self._planner = None
            if planned is not None:
                self._planner = planned(checkpoint, self._share, self._landing)
            reads = self._reads() if self._planner is None else self._planner.reads
            self._new, self._own = reads
        self._planned: tuple[list[Wave], list[Wave]] | None = None
        self._take: Callable[[BoxRead], torch.Tensor] | None = None

    def _reads(self) -> tuple[list[BoxRead], list[BoxRead]]:
        """What goes to new memory, and what goes to the caller's."""
        portions, (new_shards, own_shards) = self._share.portions, self._shards
        new: list[BoxRead] = []
        own: list[BoxRead] = []
        for image, storage, offset in self._landing.held():
            if image in self._share.lent:
                continue
            portion = portions[image]
            shard = None if self._store is None else portion.shard
            if shard is not None and storage.device.type == "cpu":
                if nbytes := portion.nbytes:
                    # The landing keeps the memory.
                    region = Region.dense(_HOST, storage.data_ptr() + offset, nbytes)
                    new_shards.append(ShardRead(shard.file, shard.start, region))
            else:
                new += _all_of(portion, portion.over(storage, offset))
        for image, tensor, _ in self._landing.own():
            portion = portions[image]
            shard = None if self._store is None else portion.shard
            if shard is not None and tensor.is_cpu and tensor.is_contiguous():
                if nbytes := portion.nbytes:
                    region = Region.dense(tensor, tensor.data_ptr(), nbytes)
                    own_shards.append(ShardRead(shard.file, shard.start, region))
            else:
                own += _all_of(portion, tensor.detach())
        return new, own

    @property
    def _waves(self) -> tuple[list[Wave], list[Wave]]:
        """Reads into new tensors, and into the caller's. Planned when they are first asked for."""
        if self._planned is None:
            new, own = self._shards
            self._planned = waves(self._new, new), waves(self._own, own)
        return self._planned

    def _progress(self, nbytes: int) -> None:
        if self.left.is_set():
            raise StorageTimeoutError("the load was given up")
        if self._told is not None:
            self._told(nbytes)

    @property
    def nbytes(self) -> int:
        lent = sum(self._share.portions[image].nbytes for image in self._share.lent)
        whole = sum(read.region.nbytes for some in self._shards for read in some)
        return lent + whole + sum(read.destination.nbytes for read in (*self._new, *self._own))

    @property
    def touched(self) -> bool:
        """Whether anything of the caller's has been written to, but for objects."""
        return self._landing.touched

    def wishes(self) -> Iterator[BoxRead]:
        """Every box that this load reads, for a source that brings all of them at once."""
        yield from self._new
        yield from self._own
        for *twins, _ in self._share.twins:
            for portion in twins:
                yield from _all_of(portion, _empty(portion, "meta"))

    def arrive(self, take: Callable[[BoxRead], torch.Tensor]) -> None:
        """In place of `check`: everything is here, and `take` gives the elements of a box."""
        self._take = take
        self._planned = [arrived(self._new, take)], [arrived(self._own, take)]

    def check(self) -> None:
        """Raise `DamagedError` unless all that is wanted has its digest.

        Where everything is staged, it is read now, and is not read again.
        """
        new, own = self._waves
        if self._staged:
            self._read(new, verify=True, own=False)
            return
        self._checked = True
        if self._store is not None and self._store.trusted:
            return
        for wave in (*new, *own):
            self._fetch(wave).check()

    def compare_twins(self) -> None:
        """Raise `MismatchError` where a tensor here would have to hold two values."""
        for first, second, path in self._share.twins:
            if not torch.equal(self._bits_of(first), self._bits_of(second)):
                raise MismatchError(
                    "tied to another tensor here, and saved with another value than "
                    f"{first.tensor.name}",
                    path=show(path),
                )

    def _bits_of(self, portion: Portion) -> torch.Tensor:
        self._files.look_at(portion.tensor)
        whole = _empty(portion, "cpu")
        reads = list(_all_of(portion, whole))
        for wave in waves(reads) if self._take is None else [arrived(reads, self._take)]:
            if not wave.arrived:
                self.within(self._fetch(wave).land)
            wave.finish()
        return t.raw_of(whole)

    def make(self, *, verify: bool) -> None:
        """Read what is new, and work out everything that will be the caller's."""
        self._read(self._waves[0], verify, own=False)
        if self._planner is not None:
            self._planner.tell_new()
        self._landing.make()

    def end(
        self, *, verify: bool, together: Together = alone, watch: Watch = nullcontext
    ) -> Landed:
        """Read everything into its place, as every landing ends."""

        def bring() -> None:
            self._read(self._waves[1], verify, own=True)
            if self._planner is not None:
                self._planner.tell_own()

        return self._landing.end(bring, together, watch)

    def _read(self, some: list[Wave], verify: bool, *, own: bool) -> None:
        landing = self._landing
        while some:
            wave = some.pop(0)  # its buffers are freed with it
            if not wave.arrived:
                fetch = self._fetch(wave)
                try:
                    self.within(partial(fetch.land, verify=verify, checked=self._checked))
                finally:
                    landing.torn = landing.torn or (own and fetch.begun)
                    if isinstance(fetch, DeviceFetch) and fetch.instead:
                        self.instead["device memory"] = fetch.instead
            landing.torn = landing.torn or own
            wave.finish()

    def _fetch(self, wave: Wave) -> Fetch | DeviceFetch:
        assert self._store is not None
        if wave.fetch is None:
            what = (self._store, self._checkpoint, wave.wanted)
            if wave.device is not None and not self._store.costly_reads:
                wave.fetch = DeviceFetch(*what, wave.device, progress=self._progress)
            else:
                wave.fetch = Fetch(*what, progress=self._progress)
        return wave.fetch


class _StepFiles:
    """The files of a step, for those who plan with them. It knows nothing of its load: where the
    two knew each other, memory of a state would wait for the garbage collector."""

    def __init__(self, store: OpenStep | None, checkpoint: Checkpoint) -> None:
        self._store, self._checkpoint = store, checkpoint
        self._seen: set[int] = set()  # files that are there, with their sizes

    def look_at(self, stored: StoredTensor) -> None:
        """No memory is taken for a tensor whose files are not as large as the record says."""
        if self._store is None:
            return
        for shard in stored.shards:
            if shard.file not in self._seen:
                opened(self._store, self._checkpoint, shard.file).close()
                self._seen.add(shard.file)

    def lend(self, shard: Shard, nbytes: int) -> torch.Tensor | None:
        """A new tensor's bytes, where the step has them in memory that a tensor can keep."""
        if not isinstance(self._store, LendingStep) or not self._store.trusted:
            return None
        name = self._checkpoint.files[shard.file].name
        return torch.frombuffer(self._store.lend(name, shard.start, nbytes), dtype=torch.uint8)


def _all_of(portion: Portion, place: torch.Tensor) -> Iterable[BoxRead]:
    return plan_reads(portion.tensor, portion.box, place)


def _empty(portion: Portion, device: str) -> torch.Tensor:
    dtype = t.dtype_named(portion.tensor.dtype)
    return torch.empty(portion.box[1], dtype=dtype, device=device)
