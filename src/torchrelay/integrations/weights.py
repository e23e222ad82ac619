"""One whole version of a model's weights, for programs that load weights by name.

Adapters of serving programs read weights here and nowhere else. They get a version that is complete
and verified, or an error and no tensors. A trainer can announce its next version before it has it:

offers = WeightOffers("10.0.0.1", timeout=600)
offer = offers.announce()          # to the readers, by whatever connects them
offers.publish(weights)            # meanwhile: version = read_offer(offer, timeout=600)
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchrelay.deadlines import Timeout, seconds_of
from torchrelay.endpoint.front import Endpoint, serve
from torchrelay.endpoint.pull import pull
from torchrelay.errors import EndpointError, MismatchError, StepMismatchError, UsageError
from torchrelay.options import PullOptions
from torchrelay.sources.access import Access
from torchrelay.sources.places import Place
from torchrelay.state import tensors as t


@dataclass(frozen=True, eq=False)
class Version:
    """The weights of one step, in host memory, by the names that the trainer gave them."""

    step: int
    tensors: dict[str, torch.Tensor]

    def take(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor in the trainer's order, and let go of it: its memory is free when the
        consumer drops it."""
        while self.tensors:
            name = next(iter(self.tensors))
            yield name, self.tensors.pop(name)


class WeightReader:
    """Reads versions from one source: URLs of endpoints, a `Checkpointer`, a directory or a bucket.

    `key` names the subtree that holds the weights; None: the state is the weights. Ranks of `group`
    read the same step, all of them or none; `no_dist`: this process alone.
    """

    def __init__(
        self,
        source: Place,
        *,
        key: str | None = "model",
        access: Access | None = None,
        group: Any = None,
        no_dist: bool = False,
        timeout: Timeout = 300.0,
    ) -> None:
        self._source, self._key, self._access = source, key, access
        self._ranks: dict[str, Any] = {"group": group, "no_dist": no_dist}
        self.timeout = seconds_of(timeout)

    def read(self, *, step: int | None = None, newer_than: int | None = None) -> Version:
        """The version of `step`, or of the first step above `newer_than`, or the newest.

        Every digest was compared when this returns, also of memory that is mapped on this host.
        Raises what `pull` raises, and `MismatchError` unless the state is a flat dict of tensors.
        """
        got = pull(
            self._source,
            step=step,
            key=self._key,
            access=self._access,
            **self._ranks,
            timeout=self.timeout,
            options=PullOptions(newer_than=newer_than, device="cpu", verify="all"),
        )
        assert got.step is not None  # sources of `pull` number their states
        return Version(got.step, named_tensors(got.state, self._key))


def named_tensors(weights: object, key: str | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a flat dict; `MismatchError` where a loader of weights could not use it."""
    where = "the state" if key is None else f"the state below {key!r}"
    if not isinstance(weights, Mapping) or not weights:
        raise MismatchError(f"{where} holds no weights: name the key of a dict of tensors")
    found: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor) or not t.is_plain(value):
            raise MismatchError(
                f"{where} is not a flat dict of whole tensors: serve the model's state_dict()",
                path=str(name),
            )
        found[str(name)] = value.detach()
    return found


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
            no_dist=True,
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


def read_offer(
    offer: WeightOffer,
    *,
    group: Any = None,
    no_dist: bool = False,
    timeout: Timeout = 600.0,
) -> Version:
    """Wait for the version of an offer and read all of it, verified.

    Ranks of `group` all have it, or all raise. Raises `StepMismatchError` if the trainer
    published a later version.
    """
    reader = WeightReader(
        [offer.url],
        key=None,
        access=Access(token=offer.token),
        group=group,
        no_dist=no_dist,
        timeout=timeout,
    )
    version = reader.read(newer_than=offer.version - 1)
    if version.step != offer.version:
        raise StepMismatchError(
            f"the trainer has published version {version.step} where {offer.version} was offered: "
            "is another update running?",
            step=offer.version,
        )
    return version
