"""Offers, told in full once and by their digest while they stay the same.

What is long about an offer is the manifest and the table of memory. A receiver that has both from
an earlier transfer says so when it joins, and the sender then leaves them out.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from torchrelay.errors import RemoteProtocolError
from torchrelay.record import codec
from torchrelay.record.digest import running_digest
from torchrelay.transports.protocol import wire

_MOST_BYTES = 8 << 20  # of an offer that is kept
_MOST_SENDERS = 4


class Known(NamedTuple):
    """The long parts of an offer, and their digest. The manifest is without its step."""

    digest: bytes = b""
    manifest: bytes = b""
    host: bytes = b""


class Offers:
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
        memory = offer.memory and msgspec.structs.replace(offer.memory, host=known.host)
        manifest = codec.with_step(known.manifest, offer.step)
        return msgspec.structs.replace(offer, manifest=manifest, memory=memory)

    def _keep(self, sender: int, offer: wire.Offer) -> None:
        found = _long_parts(offer)
        others = {rank: known for rank, known in self._known.items() if rank != sender}
        if found is not None:
            others = dict(list(others.items())[1 - _MOST_SENDERS :])
            others[sender] = found
        self._known = others

    def clear(self) -> None:
        self._known = {}


def shortened(offer: wire.Offer, digest: bytes) -> wire.Offer:
    """The offer for a receiver that has the long parts with this digest."""
    found = _long_parts(offer) if digest else None
    if found is None or found.digest != digest:
        return offer
    memory = offer.memory and msgspec.structs.replace(offer.memory, host=b"")
    step = codec.step_of(offer.manifest)
    return msgspec.structs.replace(offer, manifest=b"", memory=memory, again=True, step=step)


def _long_parts(offer: wire.Offer) -> Known | None:
    """None for parts that are too long to keep, or not as they should be."""
    host = offer.memory.host if offer.memory is not None else b""
    if len(offer.manifest) + len(host) > _MOST_BYTES:
        return None
    try:
        manifest = codec.with_step(offer.manifest, None)
    except ValueError:
        return None
    digest = running_digest()
    for part in (manifest, host):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return Known(digest.digest(), manifest, host)
