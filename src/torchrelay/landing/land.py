"""From a catalog to a destination: fit the one to the other, and make the landing.

`Landing` is the only code that writes to a caller's tensors. Bytes go to new tensors, to the
caller's all at once after everything has arrived (weights are old or new), or to those as they come
in (least memory).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchrelay.landing.commit.landing import Landing
from torchrelay.landing.new_leaves import StoredImages
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.pairing import Pairing, paired
from torchrelay.landing.workspace import Workspace
from torchrelay.pause import gc_paused
from torchrelay.planning.catalog import Catalog, LiveCatalog, RankShare
from torchrelay.planning.destination import Destination
from torchrelay.record.schema import Record


@dataclass(frozen=True)
class Fitted:
    """The share of a catalog that a destination takes, and the leaves and objects that take it."""

    share: RankShare
    pairing: Pairing
    options: LandingOptions

    def landing(
        self, workspace: Workspace | None = None, stored: StoredImages | None = None
    ) -> Landing:
        """Take the memory that is needed. `MismatchError` where the memory of the destination does
        not take what is offered. `stored`: the bytes exist already, and may be lent."""
        with gc_paused():
            workspace = workspace or Workspace()
            return Landing(self.share, self.pairing, self.options, workspace, stored)


def fitted(catalog: Catalog, into: object, options: LandingOptions) -> Fitted:
    """Fit a catalog to a destination. `into=None` makes new tensors; it may be a `Destination`.
    `MismatchError` where the two differ in more than the options allow. Pure."""
    with gc_paused():
        if into is None:  # it lacks everything
            options = replace(options, make_missing=True)
            return Fitted(catalog.whole_share(), Pairing.with_nothing(), options)
        destination = Destination.of(into)
        pairing = paired(catalog, destination, options)
        likes = {one.leaf: one.like for one in reversed(pairing.for_objects)}
        share = catalog.share_for(destination, pairing.matched, likes)
        return Fitted(share, pairing, options)


def land(
    offered: Catalog | Record,
    into: object = None,
    options: LandingOptions | None = None,
    workspace: Workspace | None = None,
) -> Landing:
    """The landing of what is offered; a record is that of one live rank. Everything that can be
    refused is refused here."""
    catalog = LiveCatalog(offered) if isinstance(offered, Record) else offered
    return fitted(catalog, into, options or LandingOptions()).landing(workspace)
