"""The keepers of a job as one source: the steps whose every volume some keeper has.

A volume that a keeper of this host has is read from its memory, the others over TCP. Every chunk is
compared with its digest as it is read; one that is wrong comes from another keeper that has it.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Sequence

from torchrelay.deadlines import Deadline
from torchrelay.errors import EndpointError
from torchrelay.record.checkpoint.schema import Checkpoint
from torchrelay.sources.connection import Host
from torchrelay.sources.endpoint import EndpointSource, StepFacts
from torchrelay.sources.mapped_step import LentMemory, MappedStep
from torchrelay.sources.remote_step import RemoteStep
from torchrelay.sources.suppliers import Supplier, Suppliers

ASK_SECONDS = 5.0  # that a keeper may take to say what it has: it may be gone with its host


class KeeperSource(EndpointSource):
    """Keepers by their URLs; those that do not answer have nothing."""

    most = 4096

    def __init__(
        self,
        urls: Sequence[str],
        *,
        name: str,
        token: str,
        context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(urls, token=token, context=context)
        self._name = name
        self._here: dict[tuple[str, str], list[str]] = {}  # volumes by keeper and snapshot

    @property
    def name(self) -> str:
        return self._name

    @property
    def cost(self) -> int:
        return 0

    def steps(
        self, deadline: Deadline, newer_than: int | None = None
    ) -> dict[int, list[tuple[Host, StepFacts]]]:
        """Who has some of which step, for steps that are whole in all of them together."""
        short = Deadline(min(deadline.left(), ASK_SECONDS))
        found: dict[tuple[int, str], list[tuple[Host, StepFacts]]] = {}
        for host, told in self._told(short, newer_than):
            for facts in told.steps:
                found.setdefault((facts.step, facts.snapshot), []).append((host, facts))
                self._here[host.url, facts.snapshot] = facts.here
        lacking = []
        whole: dict[int, list[tuple[Host, StepFacts]]] = {}
        for (step, _), holders in found.items():
            there = {name for _, facts in holders for name in facts.here}
            wanted = holders[0][1].volumes
            if len(there) >= wanted:
                whole.setdefault(step, []).extend(holders)
            else:
                lacking.append(f"of step {step} there are {len(there)} of {wanted} volumes")
        if not whole and lacking:
            faults = [f"{url}: {why}" for url, why in self.failed.items()]
            raise EndpointError("; ".join([*lacking, *faults]))
        return whole

    def _suppliers(
        self, hosts: list[Host], record: Checkpoint, snapshot: str, deadline: Deadline
    ) -> Suppliers:
        volumes: dict[str, list[Supplier]] = {file.name: [] for file in record.files}
        for host in hosts:
            supplier = Supplier(host)
            for name in self._here.get((host.url, snapshot), ()):
                if name in volumes:
                    volumes[name].append(supplier)
        return Suppliers(volumes, deadline, f"step {record.step}")

    def _nearest(
        self, remote: RemoteStep, record: Checkpoint, snapshot: str
    ) -> RemoteStep | MappedStep:
        """The same step, with the memory of this host's keepers to read from first."""
        for supplier in remote.suppliers.all:
            try:
                facts = self._local_facts(supplier.host, ASK_SECONDS)
                supplier.lend(LentMemory.all(facts, snapshot, self.reader))
            except (OSError, http.client.HTTPException, EndpointError) as fault:
                self.instead[supplier.host.url] = str(fault) or type(fault).__name__
        remote.look_near()
        self.mapped = not remote.costly_reads
        return remote
