"""Offers, told in full once and by their digest while they stay the same.

What is long about an offer is the manifest and the fixed parts of the routes. A receiver that has
them from an earlier transfer says so when it joins, and the sender then leaves them out.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from torchrelay.errors import RemoteProtocolError
from torchrelay.record import codec
from torchrelay.record.digest import running_digest
from torchrelay.transports.protocol import wire
from torchrelay.transports.resources import Kept

_MOST_BYTES = 8 << 20  # of an offer that is kept
_MOST_SENDERS = 4


class Known(NamedTuple):
    """The long parts of an offer, and their digest. The manifest is without its step."""

    digest: bytes = b""
    manifest: bytes = b""
    fixed: tuple[tuple[str, bytes], ...] = ()  # by route


class Offers(Kept):
    """What senders have offered to this process. Threads may share it."""

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}  # by sender; never changed, only replaced

    def of(self, sender: int) -> Known:
        return self._known.get(sender, Known())

    def full(self, sender: int, offer: wire.Offer, known: Known) -> wire.Offer:
        """The offer with what it leaves out because `known` was said to be here."""
        if not offer.again:
            self._keep(sender, offer)
            return offer
        if not known.digest:
            raise RemoteProtocolError("an offer as before, where none was", rank=sender)
        fixed = dict(known.fixed)
        routes = {
            name: wire.RouteOffer(one.fresh, fixed.get(name, b""))
            for name, one in offer.routes.items()
        }
        manifest = codec.with_step(known.manifest, offer.step)
        return msgspec.structs.replace(offer, manifest=manifest, routes=routes)

    def _keep(self, sender: int, offer: wire.Offer) -> None:
        found = _long_parts(offer)
        others = {rank: known for rank, known in self._known.items() if rank != sender}
        if found is not None:
            others = dict(list(others.items())[1 - _MOST_SENDERS :])
            others[sender] = found
        self._known = others

    def forget(self) -> None:
        self._known = {}


def shortened(offer: wire.Offer, digest: bytes) -> wire.Offer:
    """The offer for a receiver that has the long parts with this digest."""
    found = _long_parts(offer) if digest else None
    if found is None or found.digest != digest:
        return offer
    routes = {name: wire.RouteOffer(one.fresh) for name, one in offer.routes.items()}
    step = codec.step_of(offer.manifest)
    return msgspec.structs.replace(offer, manifest=b"", routes=routes, again=True, step=step)


def _long_parts(offer: wire.Offer) -> Known | None:
    """None for parts that are too long to keep, or not as they should be."""
    fixed = tuple(sorted((name, one.fixed) for name, one in offer.routes.items() if one.fixed))
    if len(offer.manifest) + sum(len(part) for _, part in fixed) > _MOST_BYTES:
        return None
    try:
        manifest = codec.with_step(offer.manifest, None)
    except ValueError:
        return None
    digest = running_digest()
    parts = [manifest]
    for name, long in fixed:
        parts += [name.encode(), long]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return Known(digest.digest(), manifest, fixed)
