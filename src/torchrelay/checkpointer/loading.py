"""A load, from a committed step to the caller's state.

What a rank wants is worked out against the commit record first, and refused there if it does not
fit. Then every digest is checked, new tensors are read, and everything that can fail is done; only
then is anything of the caller's written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from torchrelay.checkpointer.demand import Demand, Layers
from torchrelay.errors import MismatchError, StorageTimeoutError
from torchrelay.landing.leaves import copy_late, late_copy
from torchrelay.landing.places import Landed
from torchrelay.plan.overlay import pruned
from torchrelay.record.pause import gc_paused
from torchrelay.state import tensors as t
from torchrelay.state.paths import Path
from torchrelay.state.tree import show, unflatten
from torchrelay.stores.box_reads import (
    BoxRead,
    Wave,
    all_of,
    arrived,
    by_name,
    shard_at,
    waves,
    wishes_for,
)
from torchrelay.stores.device_reading import DeviceFetch
from torchrelay.stores.metadata import metadata_of
from torchrelay.stores.reading import Fetch
from torchrelay.stores.records import Checkpoint, StoredTensor
from torchrelay.stores.seam import OpenStep


class Loading:
    """One load on one rank: planned by the constructor, then `check`, `make`, `tell`, `land` and
    `commit`. Nothing of the caller's is written before `land`, and `tell` has a way back.

    `touched` says whether anything of the caller's has been written to, but for objects.
    """

    def __init__(
        self,
        store: OpenStep,
        checkpoint: Checkpoint,
        *,
        rank: int,
        world: int,
        into: object = None,
        strict: bool = True,
        atomic: bool = True,
        only: tuple[str, ...] = (),
        device: torch.device | None = None,
        planner: LoadPlanner | None = None,
        coordinator: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._store = store
        self._checkpoint = checkpoint
        self._tensors = by_name(checkpoint)
        self._only = only
        self._told = progress
        self._planner = planner
        self._checked = False
        self._items: list[ReadItem] = []
        self._places: list[torch.Tensor] = []
        self.touched = False
        # How reads are done that may hang; `left` is set where they have been left behind.
        self.within: Callable[[Callable[[], None]], None] = lambda read: read()
        self.left = threading.Event()
        self.instead: dict[str, str] = {}  # why a faster way was not taken
        with gc_paused():
            self._wants = Demand(
                store,
                checkpoint,
                rank=rank,
                world=world,
                into=into,
                strict=strict,
                atomic=atomic,
                only=only,
                device=device,
                converts=planner is not None,
            )
            self._new = self._plan(self._wants.new, coordinator)
            self._new_items = len(self._items)
            self._own = self._plan(self._wants.own, coordinator)
        self._planned: tuple[list[Wave], list[Wave]] | None = None
        self._take: Callable[[BoxRead], torch.Tensor] | None = None

    def _plan(self, layers: Layers, coordinator: bool) -> list[BoxRead]:
        if self._planner is not None:
            return list(self._ask(self._planner, layers, coordinator))
        return [
            wish
            for layer in layers
            for name, destination in layer.items()
            for wish in wishes_for(self._tensors[name], destination)
        ]

    def _ask(self, planner: LoadPlanner, layers: Layers, coordinator: bool) -> Iterator[BoxRead]:
        """What a planner of the user's own wants."""
        metadata = metadata_of(self._checkpoint)
        for layer in layers:
            planner.set_up_planner(dict(layer), metadata, coordinator)
            plan = planner.create_local_plan()
            plan = planner.finish_plan(planner.create_global_plan([plan])[0])
            for item in plan.items:
                if item.type.name != "TENSOR":
                    continue
                place = planner.resolve_tensor(item).detach()
                self._items.append(item)
                self._places.append(place)
                index = item.storage_index
                stored = self._tensors[index.fqn]
                shard = shard_at(stored, index.offset or (), index.index)
                offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
                yield BoxRead(stored, shard, offsets, lengths, place)

    @property
    def _waves(self) -> tuple[list[Wave], list[Wave]]:
        """Reads into new tensors, and into the caller's. Planned when they are first asked for."""
        if self._planned is None:
            self._planned = waves(self._new), waves(self._own)
        return self._planned

    def _progress(self, nbytes: int) -> None:
        if self.left.is_set():
            raise StorageTimeoutError("the load was given up")
        if self._told is not None:
            self._told(nbytes)

    @property
    def nbytes(self) -> int:
        return sum(wish.destination.nbytes for wish in (*self._new, *self._own))

    def wishes(self) -> Iterator[BoxRead]:
        """Every box that this load reads, for a source that brings all of them at once."""
        yield from self._new
        yield from self._own
        for *twins, _ in self._wants.twins:
            for stored in twins:
                whole = torch.empty(stored.shape, dtype=t.dtype_named(stored.dtype), device="meta")
                yield from all_of(stored, whole)

    def arrive(self, take: Callable[[BoxRead], torch.Tensor]) -> None:
        """In place of `check`: everything is here, and `take` gives the elements of a box."""
        self._take = take
        self._planned = [arrived(self._new, take)], [arrived(self._own, take)]

    def check(self) -> None:
        """Raise `DamagedError` unless all that is wanted has its digest.

        Bytes that are costly to read are kept for `land`, in memory of their own.
        """
        self._checked = True
        for some in self._waves:
            for number, wave in enumerate(some):
                if not self._store.costly_reads:
                    self._fetch(wave).check()
                    continue
                held = wave.held()
                self._fetch(held).land()
                some[number] = held

    def compare_twins(self) -> None:
        """Raise `MismatchError` where a tensor here would have to hold two values."""
        for first, second, path in self._wants.twins:
            one, other = self._bits_of(first), self._bits_of(second)
            if not torch.equal(one, other):
                raise MismatchError(
                    f"tied to another tensor here, and saved with another value than {first.name}",
                    path=show(path),
                )

    def _bits_of(self, stored: StoredTensor) -> torch.Tensor:
        self._wants.look_at_files(stored)
        whole = torch.empty(stored.shape, dtype=t.dtype_named(stored.dtype), device="cpu")
        wishes = all_of(stored, whole)
        for wave in waves(wishes) if self._take is None else [arrived(wishes, self._take)]:
            if not wave.arrived:
                self.within(self._fetch(wave).land)
            wave.finish()
        return t.raw_of(whole)

    def make(self, *, verify: bool) -> None:
        """Read what is new, and work out everything that will be the caller's."""
        self._read(self._waves[0], verify, own=False)
        with gc_paused():
            self._make_leaves()

    def _make_leaves(self) -> None:
        wants = self._wants
        self._tell_planner(0, self._new_items)
        self._leaves = {index: wants.leaf(index, path) for index, path in wants.made.items()}
        self._copies = [late_copy(pair, wants.part_of(index)) for pair, index in wants.late]
        if wants.handover is None:
            self._state = self._new_state()
            return
        inside = {index: wants.stand_in(index, path, place) for index, path, place in wants.inside}
        values = {place: self._leaves[index] for place, index in wants.values.items()}
        told = {**wants.filled, **self._leaves, **wants.grown}
        wants.handover.make(values, told, inside)

    def _tell_planner(self, first: int, stop: int) -> None:
        """What a planner of the user's hears of tensors that have been read."""
        if self._planner is not None:
            for item, place in zip(self._items[first:stop], self._places[first:stop], strict=True):
                self._planner.commit_tensor(item, place)

    def tell(self) -> None:
        """Tell objects their state. `MismatchError` where one refuses; then all have their old."""
        if self._wants.handover is not None:
            self._wants.handover.tell()

    def take_back(self) -> list[Path]:
        """Undo `tell`; returns the objects for which that failed."""
        return [] if self._wants.handover is None else self._wants.handover.take_back()

    def land(self, *, verify: bool) -> None:
        """Read everything into its place."""
        self._read(self._waves[1], verify, own=True)

    def _read(self, some: list[Wave], verify: bool, *, own: bool) -> None:
        while some:
            wave = some.pop(0)  # its buffers are freed with it
            if not wave.arrived:
                fetch = self._fetch(wave)
                try:
                    self.within(partial(fetch.land, verify=verify, checked=self._checked))
                finally:
                    self.touched = self.touched or (own and fetch.begun)
                    if isinstance(fetch, DeviceFetch) and fetch.instead:
                        self.instead["device memory"] = fetch.instead
            self.touched = self.touched or own
            wave.finish()

    def _fetch(self, wave: Wave) -> Fetch | DeviceFetch:
        if wave.fetch is None:
            what = (self._store, self._checkpoint, wave.wanted)
            if wave.device is not None and not self._store.costly_reads:
                wave.fetch = DeviceFetch(*what, wave.device, progress=self._progress)
            else:
                wave.fetch = Fetch(*what, progress=self._progress)
        return wave.fetch

    # The end.

    def commit(self) -> Landed:
        """Everything has arrived: finish the caller's state, or build a new one."""
        with gc_paused():
            return self._commit()

    def _commit(self) -> Landed:
        wants = self._wants
        if wants.handover is None:
            return Landed(self._state, [], [])
        self.touched = True
        self._tell_planner(self._new_items, len(self._items))
        for destination, source in self._copies:
            copy_late(destination, source)
        written = [x for x in wants.written if not isinstance(x, t.ShardedTensor)]
        torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])
        return Landed(wants.handover.finish(), wants.missing, wants.extra)

    def _new_state(self) -> object:
        if not self._only:
            return unflatten(self._wants.offer.tree, self._leaves)
        return unflatten(*pruned(self._wants.offer.tree, self._leaves))
