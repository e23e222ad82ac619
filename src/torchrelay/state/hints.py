"""What to do about a destination that does not fit: the usual reasons, looked for afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchrelay.errors import MismatchError
from torchrelay.record import manifest as m
from torchrelay.state.paths import Path
from torchrelay.state.tree import show

SHARDED_TO_WHOLE = (
    "the sender's tensor is cut over the ranks of its mesh, and this one is whole: receive into a "
    "model that is sharded the same way, or save a step with Checkpointer on the sender's ranks "
    "and load that here, which puts the parts together"
)
WHOLE_TO_SHARDED = (
    "the sender's tensor is whole, and this one is cut over the ranks of its mesh: send from a "
    "model that is sharded the same way, or save a step with Checkpointer there and load that "
    "here, which cuts it"
)
CUT_OTHERWISE = (
    "receive from the rank with the same place in a mesh of the same shape; a step that is saved "
    "with Checkpointer is cut anew when it is loaded"
)


@contextmanager
def with_hints(offered: m.Node, here: m.Node) -> Iterator[None]:
    """Add to a `MismatchError` of two trees what probably is the reason, and the remedy."""
    try:
        yield
    except MismatchError as fault:
        for path in _fresh_optimizers(offered, here, ()):
            if show((*path, "state")) not in fault.message:
                continue  # it is told its state as an object, or left out
            fault.message += (
                f"; {show(path)} is the state dict of an optimizer that has made no step on one "
                "of the two sides: pass the optimizer itself, which takes whatever is offered"
            )
            break
        raise


def _fresh_optimizers(offered: m.Node, here: m.Node, path: Path) -> Iterator[Path]:
    """Where both sides have the state dict of an optimizer, and one of them is empty."""
    if not isinstance(offered, m.DictNode) or not isinstance(here, m.DictNode):
        return
    ours = dict(zip(here.keys, here.items, strict=True))
    theirs = dict(zip(offered.keys, offered.items, strict=True))
    states = [side.get("state") for side in (ours, theirs)]
    if "param_groups" in ours and "param_groups" in theirs:
        sizes = [len(state.items) for state in states if isinstance(state, m.DictNode)]
        if len(sizes) == 2 and (sizes[0] == 0) != (sizes[1] == 0):
            yield path
    for key, child in ours.items():
        if key in theirs and isinstance(key, str):
            yield from _fresh_optimizers(theirs[key], child, (*path, key))
