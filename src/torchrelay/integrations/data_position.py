"""The position of a `StatefulDataLoader` in its data, on any number of ranks.

sampler = StatefulDistributedSampler(dataset, shuffle=True)
loader = StatefulDataLoader(dataset, batch_size=8, sampler=sampler)
state = {"model": model, ..., "data": DataPosition(loader)}
"""

from __future__ import annotations

from typing import Any

from torchrelay.errors import MismatchError, UsageError
from torchrelay.integrations.extras import extra
from torchrelay.integrations.loader_iterators import (
    continue_without_drawing,
    draw_as_usual,
    draws_nothing,
)

with extra("data"):
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler


class DataPosition:
    """An object for a state: where a loader is, in samples of all ranks together.

    On the same number of ranks the loader gets its own state back. On another number every rank
    skips what all ranks had taken of the epoch, so no sample comes twice or is left out, but for
    those with which the sampler fills the last batches of an epoch up. It needs a map-style dataset
    and a `StatefulDistributedSampler`, whose `set_epoch` is called for each epoch.

    Making the loader's iterator draws random numbers, once in each epoch. An epoch that continues
    after `load_state_dict` draws none, so random numbers that were loaded as well (`RandomState`)
    continue where they were saved. The loader's own `generator` is part of this state.
    """

    def __init__(self, loader: StatefulDataLoader) -> None:
        sampler = loader.sampler
        if not isinstance(sampler, StatefulDistributedSampler):
            raise UsageError(
                "DataPosition needs a StatefulDistributedSampler, which can begin anywhere; the "
                f"loader has a {type(sampler).__name__}"
            )
        self._loader, self._sampler = loader, sampler
        # Samples of an epoch that all ranks had taken before this loader began to count.
        self._skipped, self._skipped_epoch = 0, -1
        self._loaded: dict[str, Any] | None = None  # the loader's own state, until it is used

    def state_dict(self) -> dict[str, Any]:
        sampler = self._sampler
        # A loader that has not begun starts its workers to say where it is: it need not.
        begun = self._loader._iterator is not None
        loader = self._loader.state_dict() if begun else self._loaded
        skipped = self._skipped if sampler.epoch == self._skipped_epoch else 0
        finished = loader is not None and loader["_iterator_finished"]
        per_round = self._loader.batch_size * sampler.num_replicas
        taken = skipped
        if loader is not None:
            # Batches that the loop has got, without those that workers have ready.
            batches = loader.get("_num_yielded")
            if batches is None:
                batches = loader["_snapshot"]["_snapshot_step"] + loader["_steps_since_snapshot"]
            taken += batches * per_round
        generator = self._loader.generator
        return {
            "epoch": sampler.epoch,
            "taken": 0 if finished else taken,
            "begun": (begun or draws_nothing(self._loader)) and not finished,
            "skipped": skipped,
            "ranks": sampler.num_replicas,
            "batch": self._loader.batch_size,
            "workers": self._loader.num_workers,
            **self._order(),
            "loader": loader,
            "generator": None if generator is None else generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """`MismatchError` if the data are others, or cannot be divided among these ranks."""
        for name, mine in self._order().items():
            if state[name] != mine:
                raise MismatchError(f"the data have {name} {mine}, and had {state[name]}")
        sampler, loader = self._sampler, self._loader
        here = (sampler.num_replicas, loader.batch_size, loader.num_workers)
        same = (state["ranks"], state["batch"], state["workers"]) == here
        yielded, rest = divmod(state["taken"], sampler.num_replicas)
        if rest and not same:
            raise MismatchError(
                f"{state['taken']} samples of epoch {state['epoch']} were taken, which "
                f"{sampler.num_replicas} ranks cannot skip alike: resume on a number of ranks that "
                "divides them"
            )
        sampler.set_epoch(state["epoch"])
        self._loaded = state["loader"] if same else None
        if self._loaded is not None:
            loader.load_state_dict(self._loaded)
            self._skipped = state["skipped"]
        else:
            loader._iterator = None
            sampler.load_state_dict({"yielded": yielded})
            self._skipped = state["taken"]
        self._skipped_epoch = state["epoch"]
        if self._loaded is not None or _has_begun(state):
            continue_without_drawing(loader)
        else:
            draw_as_usual(loader)
        # Steps that were saved before this was part of the state have none.
        if loader.generator is not None and state.get("generator") is not None:
            loader.generator.set_state(state["generator"])

    @property
    def epoch(self) -> int:
        """The epoch that the next batch is of, as `set_epoch` has it."""
        epoch: int = self._sampler.epoch
        return epoch

    def _order(self) -> dict[str, Any]:
        """Two loaders read the same samples in the same order if these agree."""
        sampler = self._sampler
        samples = len(self._loader.dataset)
        return {"samples": samples, "seed": sampler.seed, "shuffle": sampler.shuffle}


def _has_begun(state: dict[str, Any]) -> bool:
    """Whether the epoch of a state had an iterator, which had drawn its random numbers."""
    loader = state["loader"]
    begun: bool = state.get("begun", loader is not None and not loader["_iterator_finished"])
    return begun
