"""How endpoints and keepers differ in a publish."""

from __future__ import annotations

from torchrelay.coordination.coordinator import COORDINATOR
from torchrelay.deadlines import Deadline


class Policy:
    """The part of a publish that differs between endpoints and keepers; this is an endpoint's. The
    coordinator's server lists the step, and names the others."""

    operation = "publish"  # its name in metrics
    on_devices = True  # whether its server lends memory of GPUs

    def report(self, deadline: Deadline) -> bytes:
        """This rank's server reports to the coordinator before a step."""
        return b""

    def choose(self, reports: list[bytes], urls: list[str], step: int) -> tuple[bytes, str]:
        """The coordinator's: a decision for all servers, and why the step is skipped, if it is."""
        return b"", ""

    def meet(self, urls: list[str]) -> None:
        """The URLs of all ranks' servers; called where they have changed."""

    def check(self, parts: list[int], urls: list[str]) -> None:
        """The coordinator's: raise where the servers can never take parts of these sizes."""

    def listing(self, urls: list[str]) -> set[int]:
        """The ranks whose servers list the step."""
        return {COORDINATOR}
