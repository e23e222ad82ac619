"""A trainer announces its next version of weights before it has them, and readers wait for it.

offers = WeightOffers("10.0.0.1", timeout=600)
offer = offers.announce()          # to the readers, by whatever connects them
offers.publish(weights)            # meanwhile: version = read_offer(offer, timeout=600)
"""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple

import torch

from torchrelay.deadlines import Timeout, seconds_of
from torchrelay.endpoint.front import Endpoint, serve
from torchrelay.errors import EndpointError, StepMismatchError, UsageError
from torchrelay.integrations.weights import Version, WeightReader
from torchrelay.sources.access import Access


class WeightOffer(NamedTuple):
    """Where a version will be. The token admits readers: send it over trusted connections only."""

    url: str
    token: str
    version: int


class WeightOffers:
    """Versions of weights at one endpoint of this process, numbered from 1."""

    def __init__(self, host: str, *, timeout: Timeout = 600.0) -> None:
        self._timeout = seconds_of(timeout)
        self._token = secrets.token_urlsafe()
        self._version = 0
        place = f"[{host}]:0" if ":" in host else f"{host}:0"
        # Version 0 is empty: readers learn the URL before there are weights.
        self._endpoint: Endpoint = serve(
            {},
            step=0,
            address=place,
            access=Access(token=self._token),
            group=False,
            timeout=self._timeout,
        )

    def announce(self) -> WeightOffer:
        """Return the offer of the next version. Readers of an offer that is never published wait
        until their own deadline."""
        self._version += 1
        return WeightOffer(self._endpoint.url, self._token, self._version)

    def publish(self, weights: dict[str, torch.Tensor]) -> None:
        """Publish the version that was announced last; returns when it can be read."""
        if self._version == 0:
            raise UsageError("no version was announced: call announce first")
        pending = self._endpoint.publish(weights, step=self._version)
        if pending.skipped:
            raise EndpointError(
                f"the weights were not published: {pending.skipped}", step=self._version
            )
        pending.result(self._timeout)

    def close(self) -> None:
        self._endpoint.close()


def read_offer(offer: WeightOffer, *, group: Any = None, timeout: Timeout = 600.0) -> Version:
    """Wait for the version of an offer and read all of it, verified.

    Ranks of `group` all have it, or all raise. Raises `StepMismatchError` if the trainer
    published a later version.
    """
    reader = WeightReader(
        [offer.url], key=None, access=Access(token=offer.token), group=group, timeout=timeout
    )
    version = reader.read(newer_than=offer.version - 1)
    if version.step != offer.version:
        raise StepMismatchError(
            f"the trainer has published version {version.step} where {offer.version} was offered: "
            "is another update running?",
            step=offer.version,
        )
    return version
