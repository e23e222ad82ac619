"""From what a caller names to a source."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torchrelay.errors import UsageError
from torchrelay.sources.access import Access
from torchrelay.sources.endpoint import EndpointSource
from torchrelay.sources.seam import Source
from torchrelay.sources.store import StoreSource


@runtime_checkable
class HasSource(Protocol):
    """A `Checkpointer` or a `Keeper`."""

    def source(self) -> Source: ...


Place = str | os.PathLike[str] | Sequence[str] | HasSource | Source


def as_source(
    place: Place, access: Access | None = None, *, same_host: bool = True, verify: bool = False
) -> Source:
    """The source that a URL, several URLs of endpoints, a path, a bucket's URL, a `Checkpointer` or
    a `Keeper` stands for, or a source itself. The options are those of endpoints."""
    if isinstance(place, str) and place.startswith(("http://", "https://")):
        place = [place]
    if isinstance(place, (str, os.PathLike)):
        return StoreSource(place)
    if isinstance(place, HasSource):
        return place.source()
    if isinstance(place, Source):
        return place
    if isinstance(place, Sequence) and place and all(isinstance(one, str) for one in place):
        return EndpointSource(place, access=access, same_host=same_host, verify=verify)
    raise UsageError(
        f"a source is a URL, a path, a Checkpointer, a Keeper or Relay.peer(rank), not {place!r}"
    )
