"""Landing: the only code that writes into a caller's tensors.

Chunks come in any order, each once, by `write`, or a transport writes them itself to `places`.
`commit` ends the receive and returns the state. Bytes go to new tensors, to the caller's all at
once after everything has arrived (weights are old or new), or to those as they come in (least
memory).
"""

from __future__ import annotations

from dataclasses import replace

from torchrelay.landing.commit.ending import StateLanding
from torchrelay.landing.new_leaves import Filled
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.pairing import Pairing, PreparedDestination, paired
from torchrelay.landing.places import Landing
from torchrelay.landing.workspace import Workspace
from torchrelay.pause import gc_paused
from torchrelay.planning.rank_share import RankShare
from torchrelay.record.manifest import tensor_of
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import Record
from torchrelay.state.objects import OfferedTensor

__all__ = ["Landing", "land", "land_share", "prepared"]


def land(
    record: Record,
    into: object = None,
    options: LandingOptions | None = None,
    workspace: Workspace | None = None,
) -> StateLanding:
    """The landing for the state of one rank. Everything that can be refused is refused here.

    `into=None` makes new tensors. `into` may be a `PreparedDestination`, which leaves less to do
    here. Modules in it are filled in place; other objects with `load_state_dict` are
    given what is offered for them.
    """
    options, workspace = options or LandingOptions(), workspace or Workspace()
    with gc_paused():
        if into is None:
            return _all_new(record, options, workspace)
        rows = LeafRows(record)

        def offered(leaf: int) -> OfferedTensor | None:
            found = tensor_of(rows[leaf])
            return None if found is None else OfferedTensor(*found, in_boxes=False)

        pairing = paired(rows.tree, prepared(into), options, offered)
        return StateLanding(record, pairing, options, workspace)


def land_share(
    share: RankShare,
    into: object,
    options: LandingOptions,
    workspace: Workspace | None = None,
    filled: Filled | None = None,
) -> StateLanding:
    """The landing for this rank's share of a recorded state, which depends on the destination.
    `filled` may have memory with the bytes of an image already, for new tensors to keep."""
    workspace = workspace or Workspace()
    with gc_paused():
        if into is None:
            return _all_new(share.new(), options, workspace, filled)
        pairing = paired(share.tree, prepared(into), options, share.tensor_of, share.choice)
        here = pairing.into
        likes = {one.leaf: one.like for one in reversed(pairing.given)}
        record, pairing.matched, late = share.fitted(
            here.flat.leaves, here.layout, pairing.matched, likes
        )
        compared = [image for one in share.twins for image in (one.first, one.second)]
        return StateLanding(record, pairing, options, workspace, late, compared)


def _all_new(
    record: Record, options: LandingOptions, workspace: Workspace, filled: Filled | None = None
) -> StateLanding:
    """A landing without a destination: it lacks everything."""
    options = replace(options, make_missing=True)
    return StateLanding(record, Pairing.with_nothing(), options, workspace, filled=filled)


def prepared(into: object) -> PreparedDestination:
    """A destination as it is now; looked over again if tensors have moved since."""
    if not isinstance(into, PreparedDestination):
        return PreparedDestination(into)
    return PreparedDestination(into.into) if into.moved else into
