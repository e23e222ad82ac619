"""What servers have: each endpoint has whole steps, the keepers of a job have parts of them.

`EndpointSource` asks them in the same way. Here is what differs. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torchrelay.sources.connection import Host
from torchrelay.sources.requests import StepFacts

Holders = list[tuple[Host, StepFacts]]  # the servers that have something of a step


class Listing(NamedTuple):
    """The steps that can be read, each with its holders; and what others lack."""

    steps: dict[int, Holders]
    lacking: list[str]


class ServerKind(Protocol):
    """`most`: servers of a source. `seconds`: that one may take to answer a small request. `whole`:
    whether each has whole steps, and names other servers that have volumes of them. `verifies`:
    whether memory that they lend is verified in any case."""

    @property
    def most(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def whole(self) -> bool: ...
    @property
    def verifies(self) -> bool: ...

    def name(self, urls: Sequence[str]) -> str:
        """How messages name them."""

    def cost(self, are_here: bool) -> int:
        """See `Source.cost`. `are_here`: whether their URLs are of this machine."""

    def list(self, answers: Iterable[tuple[Host, Sequence[StepFacts]]]) -> Listing:
        """What can be read of the steps that servers list, each oldest first."""


class Endpoints:
    """Endpoints. Each has the whole step."""

    most, seconds, whole, verifies = 64, 20.0, True, False

    def name(self, urls: Sequence[str]) -> str:
        return ", ".join(urls)

    def cost(self, are_here: bool) -> int:
        return 0 if are_here else 1

    def list(self, answers: Iterable[tuple[Host, Sequence[StepFacts]]]) -> Listing:
        steps: dict[int, Holders] = {}
        for host, listed in answers:
            # Of two steps with one number the last replaced the first.
            for facts in {one.step: one for one in listed}.values():
                steps.setdefault(facts.step, []).append((host, facts))
        return Listing(steps, [])


class Keepers:
    """The keepers of a job. A step is there where they have all of its volumes together. A keeper
    may be gone with its host, so it gets less time."""

    most, seconds, whole, verifies = 4096, 5.0, False, True

    def __init__(self, job: str) -> None:
        self._job = job

    def name(self, urls: Sequence[str]) -> str:
        return f"keeper {self._job}"

    def cost(self, are_here: bool) -> int:
        return 0

    def list(self, answers: Iterable[tuple[Host, Sequence[StepFacts]]]) -> Listing:
        steps: dict[int, Holders] = {}
        for host, listed in answers:
            # Of two steps with one number both may be needed: other keepers have parts of either.
            for facts in {(one.step, one.snapshot): one for one in listed}.values():
                steps.setdefault(facts.step, []).append((host, facts))
        return _complete(steps)


def _complete(steps: Mapping[int, Holders]) -> Listing:
    """Steps whose volumes the keepers have together."""
    complete: dict[int, Holders] = {}
    lacking = []
    for step, some in steps.items():
        for holders in by_snapshot(some).values():
            there = {name for _, facts in holders for name in facts.here}
            wanted = max(facts.volumes for _, facts in holders)
            if len(there) >= wanted:
                complete.setdefault(step, []).extend(holders)
            else:
                lacking.append(f"step {step} has {len(there)} of its {wanted} volumes")
    return Listing(complete, lacking)


def by_snapshot(listed: Holders) -> dict[str, Holders]:
    """The holders of a step by the content that they have of it."""
    found: dict[str, Holders] = {}
    for host, facts in listed:
        found.setdefault(facts.snapshot, []).append((host, facts))
    return found
