"""One whole version of a model's weights, for programs that load weights by name.

Adapters of serving programs read weights here and nowhere else. They get a version that is complete
and verified, or an error and no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchrelay.deadlines import Timeout, seconds_of
from torchrelay.endpoint.pull import pull
from torchrelay.errors import MismatchError
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
    read the same step, all of them or none; `False`: this process alone.
    """

    def __init__(
        self,
        source: Place,
        *,
        key: str | None = "model",
        access: Access | None = None,
        group: Any = None,
        timeout: Timeout = 300.0,
    ) -> None:
        self._source, self._key, self._access, self._group = source, key, access, group
        self.timeout = seconds_of(timeout)

    def read(self, *, step: int | None = None, newer_than: int | None = None) -> Version:
        """The version of `step`, or of the first step above `newer_than`, or the newest.

        Every digest was compared when this returns, also of memory that is mapped on this host.
        Raises what `pull` raises, and `MismatchError` unless the state is a flat dict of tensors.
        """
        got = pull(
            self._source,
            step=step,
            newer_than=newer_than,
            key=self._key,
            access=self._access,
            group=self._group,
            device="cpu",
            verify=True,
            timeout=self.timeout,
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
