"""How a step is staged in the keepers of a job: what they report, decide and list."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import msgspec

from torchrelay.coordination.messages import decoded
from torchrelay.deadlines import Deadline
from torchrelay.endpoint.publish.policy import Policy
from torchrelay.endpoint.publish.publisher import StagedStep
from torchrelay.endpoint.publish.server_process import ServerLink
from torchrelay.endpoint.server import messages as m
from torchrelay.errors import EndpointError
from torchrelay.keeper.choice import check_budget, choose
from torchrelay.keeper.server import messages as k
from torchrelay.memory.arena import Arena

_RELEASE_SECONDS = 5.0
_reported = msgspec.msgpack.Decoder(tuple[int, k.KeeperReport])


class KeeperPolicy(Policy):
    """Every keeper lists the step. `tell`: called with the keepers of all ranks."""

    operation = "stage"
    on_devices = False

    def __init__(
        self, keeper: ServerLink, join: k.JoinKeeper, tell: Callable[[list[str]], None]
    ) -> None:
        self._keeper, self._memory, self._copies = keeper, join.memory, join.copies
        self._tell = tell
        self._budgets: list[int] = []  # the coordinator's: of each rank's keeper

    def report(self, deadline: Deadline) -> bytes:
        found = self._keeper.ask(k.AskReport(), k.KeeperReport, deadline.left())
        return msgspec.msgpack.encode((self._memory, found))

    def choose(self, reports: list[bytes], urls: list[str], step: int) -> tuple[bytes, str]:
        found = [decoded(_reported, data, rank) for rank, data in enumerate(reports)]
        self._budgets = [memory for memory, _ in found]
        copies = len(set(urls)) > 1 and self._copies > 0
        once = {url: reported for url, (_, reported) in zip(urls, found, strict=True)}
        decision, why = choose(list(once.values()), step, copies=copies)
        return msgspec.msgpack.encode(decision), why

    def meet(self, urls: list[str]) -> None:
        self._tell(urls)

    def check(self, parts: list[int], urls: list[str]) -> None:
        check_budget(parts, urls, self._budgets, self._copies)

    def listing(self, urls: list[str]) -> set[int]:
        return {urls.index(url) for url in urls}


class LentSlot:
    """The memory of a staged step, for a `Checkpointer` that writes it to disk: files as in an
    `Arena`, and where each volume starts. It stays as it is until `release`, whatever becomes of
    the keeper."""

    def __init__(self, keeper: ServerLink, arena: Arena, staged: StagedStep) -> None:
        self._keeper, self._generation = keeper, keeper.generation
        self._slot = staged.slot
        self.fds = [os.dup(fd) for fd in arena.fds]
        self.each, self.nbytes = arena.each, arena.nbytes
        self.starts = [volume.start for volume in staged.volumes]

    def release(self) -> None:
        """Another step may be staged there. Never raises."""
        fds, self.fds = self.fds, []
        for fd in fds:
            os.close(fd)
        if fds and self._keeper.generation == self._generation:
            with suppress(EndpointError):  # it is lost, and its slots with it
                self._keeper.ask(k.HoldSlot(self._slot, False), m.Obeyed, _RELEASE_SECONDS)
