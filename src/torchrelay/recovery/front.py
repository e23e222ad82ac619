"""`recover`: the newest state that verifies, from the nearest source that has it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch

from torchrelay.checkpointer.front import Checkpointer
from torchrelay.checkpointer.loader import Loaded, Loader, Wanted
from torchrelay.deadlines import Deadline, Stopwatch, Timeout, seconds_of
from torchrelay.endpoint.security import find_token
from torchrelay.errors import (
    FormatError,
    NothingToRecoverError,
    RelayError,
    StateError,
    TornStateError,
    UsageError,
)
from torchrelay.keeper.front import Keeper
from torchrelay.progress import ProgressCallback
from torchrelay.recovery.candidates import Candidates
from torchrelay.recovery.report import Recovered, RecoveryReport
from torchrelay.recovery.resharing import Resharing
from torchrelay.sources.endpoint import EndpointSource
from torchrelay.sources.peer import PeerSource
from torchrelay.sources.seam import Source
from torchrelay.sources.store import StoreSource
from torchrelay.steps import check_step
from torchrelay.transports.group.assembly import Assembly, Call

SHARE = 0.6  # of the time that is left, which an attempt may take where there are others

Place = str | os.PathLike[str] | Checkpointer | Keeper | Source
_said = msgspec.msgpack.Decoder(tuple[list[int], str])


def recover(
    *,
    into: object = None,
    sources: Sequence[Place],
    min_step: int | None = None,
    max_age: Timeout | None = None,
    strict: bool = True,
    atomic: bool = True,
    device: torch.device | str | None = None,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    group: Any = None,
    reshare: bool = False,
    timeout: Timeout = 300.0,
    progress: ProgressCallback | None = None,
) -> Recovered:
    """Bring a state back from the freshest place that verifies.

    All sources are asked at once what they have. The newest step is taken, from the nearest source
    that has it: memory of this machine, then a network, a file system, a bucket; of several, the
    one that was given first. A little is read from each, and one that would take less than half the
    time is preferred. Chunks that the source does not give, or gives wrong, come from others that
    have the same bytes. Where that cannot be, the next source or the next step is tried.
    `report.explain()` says what came of each.

    - `sources`: URLs of endpoints, checkpoint places, `Checkpointer`s, `Keeper`s, ranks that share
      their state (`Relay.peer`), or what has a `Source`'s methods.
    - `into`, `strict`, `atomic`, `device`, `progress`: as for `Checkpointer.load`.
    - `min_step`, `max_age` (seconds): nothing below, nothing older.
    - `token`, `token_file`: for all endpoints, as for `pull`.
    - `group`: ranks that recover together. All land the newest step that each of them can get, from
      any mix of sources, or none of them does. By default this process is on its own.
    - `reshare`: ranks that take a step from an endpoint or a peer at once take it from each other
      too, so that its source sends about one copy. Each reads all of the step, to memory beside
      the state's. With a `group` each serves the others until all have it.

    `NothingToRecoverError` where no source has such a step; its message has the reason of each.
    A step that does not fit `into` is no reason to take an older one: that is raised.
    """
    if min_step is not None:
        check_step(min_step)
    age = None if max_age is None else seconds_of(max_age, "max_age")
    if isinstance(sources, (str, os.PathLike)) or not isinstance(sources, Iterable):
        raise UsageError(f"sources is a list of them, not {sources!r}: sources=[{sources!r}]")
    found = [_source(place, find_token(token, token_file)) for place in sources]
    if not found:
        raise UsageError("no source to recover from")
    assembly = Assembly.lasting(group, "recover")
    wanted = Wanted.of(into, None, strict=strict, atomic=atomic, device=device, progress=progress)
    resharing = Resharing() if reshare else None
    candidates = Candidates(found, min_step, age, resharing)
    recovery = _Recovery(candidates, assembly, wanted, Deadline(timeout))
    try:
        return recovery.run()
    finally:
        if resharing is not None:
            resharing.close()
        for source in found:
            if isinstance(source, (EndpointSource, PeerSource)):
                source.end(recovery.reason)


def _source(place: Place, token: str | None) -> Source:
    if isinstance(place, Checkpointer):
        return StoreSource(place.url)
    if isinstance(place, Keeper):
        return place.source()
    if isinstance(place, (str, os.PathLike)):
        name = os.fspath(place)
        if name.startswith(("http://", "https://")):
            return EndpointSource(name, token=token)
        return StoreSource(name)
    if not all(hasattr(place, name) for name in ("steps", "open", "cost")):
        raise UsageError(f"a source is a URL, a place or a Checkpointer, not {place!r}")
    return place


class _Recovery:
    """One call of `recover`."""

    def __init__(
        self, candidates: Candidates, assembly: Assembly, wanted: Wanted, deadline: Deadline
    ) -> None:
        self._candidates, self._all = candidates, assembly
        self._wanted, self._deadline = wanted, deadline
        self._watch = Stopwatch()
        self._torn: RelayError | None = None
        self._unknown: tuple[int, FormatError] | None = None  # the newest that could not be read
        self.reason = "it was interrupted"  # why it failed; empty if it did not

    def run(self) -> Recovered:
        call = self._all.call()
        # What a rank shares with the others is there once it has come here.
        call.round("gather", lambda: b"", lambda said: said, self._deadline)
        with self._watch("ask"):
            self._candidates.ask(self._deadline)
        while True:
            step = self._agree(call)
            try:
                loaded = self._try(call, step)
            except StateError as fault:
                self.reason = fault.message
                raise
            except RelayError as fault:
                self._torn = fault if isinstance(fault, TornStateError) else self._torn
                if isinstance(fault, FormatError):
                    self._unknown = self._unknown or (step, fault)
                if fault.rank in (None, self._all.rank) or isinstance(fault, TornStateError):
                    self._candidates.pass_over(step, fault)
                continue
            self.reason = ""
            return self._recovered(step, loaded)

    def _agree(self, call: Call) -> int:
        """The newest step that every rank can get. `FormatError` where that is older than one which
        a later version wrote."""
        mine = self._candidates.steps()
        accounts = "\n".join(f"  {account}" for account in self._candidates.accounts())
        passed = self._deadline.passed

        def decide(said: list[bytes]) -> list[bytes]:
            words = [_said.decode(data) for data in said]
            common = set(words[0][0]).intersection(*(steps for steps, _ in words))
            if common:
                return [msgspec.msgpack.encode(max(common))] * len(said)
            several = len(words) > 1
            raise NothingToRecoverError(
                "nothing to recover from"
                + "".join(
                    f"\n{f' rank {rank}:' + chr(10) if several else ''}{told}"
                    for rank, (_, told) in enumerate(words)
                ),
                phase="recover",
            )

        word = msgspec.msgpack.encode(([] if passed else mine, accounts))
        try:
            heard = call.round("recover", lambda: word, decide, self._deadline)
            step = int(msgspec.msgpack.decode(heard, type=int))
            if self._unknown is not None and step < self._unknown[0]:
                raise self._unknown[1]
        except RelayError as fault:
            if self._unknown is not None and isinstance(fault, NothingToRecoverError):
                fault = self._unknown[1]
            self.reason = fault.message
            if self._torn is not None:
                raise TornStateError(
                    f"the destination is part old, part new, and {fault.message}", phase="recover"
                ) from self._torn
            raise fault
        return step

    def _try(self, call: Call, step: int) -> Loaded:
        with self._watch("ask"):
            self._candidates.choose(step, self._deadline)
        left = max(self._deadline.left(), 0.01)
        attempt = Deadline(left * SHARE if self._candidates.several(step) else left)
        loader = Loader(self._candidates.shelf(step, attempt), self._all, None)
        wanted = self._wanted._replace(step=step)
        with self._watch("take"):
            return loader.load(call, wanted, attempt)

    def _recovered(self, step: int, loaded: Loaded) -> Recovered:
        report = RecoveryReport(
            self._candidates.source_of(step),
            loaded.report.bytes,
            self._candidates.supplied(step, loaded.report.bytes),
            {**self._watch.seconds, **loaded.report.seconds},
            self._candidates.accounts(step),
            loaded.report.missing,
            loaded.report.extra,
        )
        return Recovered(loaded.state, step, report)
