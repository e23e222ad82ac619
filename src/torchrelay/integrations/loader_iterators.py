"""Iterators of torchdata's loaders that continue an epoch, and the random numbers they draw."""

from __future__ import annotations

from typing import Any

from torchrelay.integrations.random_state import unchanged

_MAKE = "_get_iterator"  # the method with which a `StatefulDataLoader` makes its iterators


def continue_without_drawing(loader: Any) -> None:
    """Have the next iterator that a `StatefulDataLoader` makes, and only that one, draw no random
    numbers: it continues what an iterator of another process began, which had drawn them."""
    draw_as_usual(loader)
    make = getattr(loader, _MAKE)

    def make_without_drawing() -> Any:
        draw_as_usual(loader)
        with unchanged(loader.generator):
            made = make()
        if made._finished:
            begin_at_the_first_sample(loader)  # with the next iterator, of the next epoch
        return made

    setattr(loader, _MAKE, make_without_drawing)


def draw_as_usual(loader: Any) -> None:
    vars(loader).pop(_MAKE, None)


def draws_nothing(loader: Any) -> bool:
    """Whether the next iterator of a loader draws no random numbers."""
    return _MAKE in vars(loader)


def begin_at_the_first_sample(loader: Any) -> None:
    """A `StatefulDistributedSampler` that has loaded the end of an epoch would begin there."""
    if getattr(loader.sampler, "next_yielded", None) is not None:
        loader.sampler.next_yielded = None
