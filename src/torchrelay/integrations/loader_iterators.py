"""Iterators of torchdata's loaders that continue an epoch, and the random numbers they draw."""

from __future__ import annotations

from typing import Any

from torchrelay.integrations.random_state import unchanged

_MAKE = "_get_iterator"  # the method with which a `StatefulDataLoader` makes its iterators


def continue_without_drawing(loader: Any, sampler: Any = None) -> None:
    """Have the next iterator that a `StatefulDataLoader` makes, and only that one, draw no random
    numbers: it continues what an iterator of another process began, which had drawn them.

    `sampler` is where the order comes from, if that is not the loader's own.
    """
    draw_as_usual(loader)
    make = getattr(loader, _MAKE)
    sampler = loader.sampler if sampler is None else sampler

    def make_without_drawing() -> Any:
        draw_as_usual(loader)
        epoch = getattr(sampler, "epoch", None)
        with unchanged(loader.generator):
            made = make()
        if made._finished:
            # For workers it has read a finished epoch, and accelerate's sampler is in the next.
            if epoch is not None and sampler.epoch != epoch:
                sampler.set_epoch(epoch)
            begin_at_the_first_sample(loader)  # with the next iterator, of the next epoch
        return made

    setattr(loader, _MAKE, make_without_drawing)


def begin_with_its_sampler(loader: Any) -> None:
    """Make the first iterator of a `StatefulDataLoader` again, if somebody asked for the loader's
    state before the first epoch, and with that started its workers.

    They have read the first samples already. Accelerate replaces the sampler afterwards, so no seed
    gives the order of that epoch again.
    """
    if loader._initial_iter_for_state_dict and loader.num_workers:
        loader._iterator = getattr(loader, _MAKE)()


def draw_as_usual(loader: Any) -> None:
    vars(loader).pop(_MAKE, None)


def draws_nothing(loader: Any) -> bool:
    """Whether the next iterator of a loader draws no random numbers."""
    return _MAKE in vars(loader)


def begin_at_the_first_sample(loader: Any) -> None:
    """A `StatefulDistributedSampler` that has loaded the end of an epoch would begin there."""
    if getattr(loader.sampler, "next_yielded", None) is not None:
        loader.sampler.next_yielded = None
