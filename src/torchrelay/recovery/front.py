"""`recover`: the newest state that verifies, from the nearest source that has it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from torchrelay.coordination.call import Call, returned
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.deadlines import Deadline, Stopwatch, Timeout, seconds_of
from torchrelay.endpoint.reshare.swarm import SeedingSource, can_be_seeded
from torchrelay.errors import (
    FormatError,
    MismatchError,
    RecoveryError,
    RelayError,
    ReplicaError,
    StateError,
    TornStateError,
    UsageError,
)
from torchrelay.loading.loader import Loader, LoadRequest
from torchrelay.memory import threads
from torchrelay.mirror.source import sources_of
from torchrelay.options import RecoverOptions, checked_options, checked_verify
from torchrelay.recovery.candidates import Candidates, ChosenStep
from torchrelay.results import Loaded, Outcome, Report
from torchrelay.sources.access import Access
from torchrelay.sources.places import Place, as_source
from torchrelay.steps import check_step

FIRST_START = "no source has a step: this is a first start"
SHARE = 0.6  # of the time that is left, which an attempt may take where there are others


class _RankReport(msgspec.Struct, array_like=True):
    """The steps that a rank can get, marked ones by themselves, and what became of its sources.
    `misfit`: why a state did not
    fit."""

    steps: list[int]
    marked: list[int]
    accounts: str
    empty: bool
    misfit: str = ""
    misfit_step: int = 0


_decision = msgspec.msgpack.Decoder(tuple[int | None, bool])
_rank_report = msgspec.msgpack.Decoder(_RankReport)


def recover(
    sources: Sequence[Place],
    into: object = None,
    *,
    min_step: int | None = None,
    key: str | None = None,
    include: str | Iterable[str] = (),
    timeout: Timeout = 300.0,
    access: Access | None = None,
    group: Any = None,
    no_dist: bool = False,
    options: RecoverOptions | None = None,
) -> Loaded | None:
    """All ranks call it together: bring a state back from the freshest source that verifies.

    Returns None on every rank if this is a first start.
    All sources list their steps at the same time. The newest step is taken from the nearest source
    that has it: memory of this machine, then a network, a file system, a bucket; of several, the
    first argument. Chunks that a source cannot supply, or supplies damaged, come from others that
    have the same bytes. If that fails, the next source or the next step is tried. `str(report)` has
    the outcome of each. The highest step wins: give only sources that you trust (docs/security.md).

    - `sources`: URLs of endpoints, directories, buckets, `Checkpointer`s, `Keeper`s, ranks that
      share their state (`Relay.peer`), or objects with the methods of a `Source`.
    - `into`: a state of tensors and objects that takes the values; `None` makes new tensors.
    - `min_step`: refuse steps below it.
    - `key`, `include`: the state below a key, and patterns of dotted paths, as for `load`.
    - `timeout` bounds the call.
    - `access`: the token of all endpoints, and the certificates that theirs are signed by.
    - `group`: ranks that recover together. All land the newest step that each of them can get, from
      any mix of sources, or none of them does. By default all ranks, where torch.distributed is
      initialized. `no_dist`: this process alone.
    - `options`: the rare ones, as `tr.options.RecoverOptions`.

    It is a first start if every source answered and none has a step, on any rank; with `min_step`
    that is an error, too. A step that is marked, for its replicas differed, is taken only if there
    is no other. Raises `RecoveryError` if sources have steps that cannot be used, or
    cannot be reached, and for a place without steps in which something looks like one (a step's own
    directory, a checkpoint of another tool): the message has the path that was probably meant. A
    source whose state does not fit `into` is skipped with a warning; `MismatchError` if no other
    fits. Each message has the reason for each source.
    """
    chosen: RecoverOptions = checked_options(options, RecoverOptions)
    landing = {
        "key": key,
        "include": include,
        "strict": chosen.strict,
        "verify": bool(checked_verify(chosen.verify)),
        "atomic": chosen.atomic,
        "device": chosen.device,
        "progress": chosen.progress,
    }
    if min_step is not None:
        min_step = check_step(min_step)
    age = chosen.max_age_seconds
    if age is not None:
        age = seconds_of(age, "max_age_seconds")
    if isinstance(sources, (str, os.PathLike)) or not isinstance(sources, Iterable):
        raise UsageError(f"sources is a list of them, not {sources!r}: sources=[{sources!r}]")
    every, same_host = chosen.verify == "all", chosen.same_host
    named = [as_source(place, access, same_host=same_host, verify=every) for place in sources]
    found = [one for source in named for one in sources_of(source)]
    if not found:
        raise UsageError("no source to recover from: give at least one in sources=[...]")
    ranks = Coordinator.of(group, "recover", "function", no_dist=no_dist)
    used = [SeedingSource(one) if chosen.reshare and can_be_seeded(one) else one for one in found]
    recovery = _Recovery(Candidates(used, min_step, age), ranks, into, landing, Deadline(timeout))
    try:
        with ranks.measured("recover") as measured:
            loaded = recovery.run()
            measured.end(Report(None, 0) if loaded is None else loaded.report)
        return loaded
    finally:
        for source in used:
            source.end(recovery.reason, recovery.nbytes)
            if isinstance(source, SeedingSource):
                _close(source)


def _close(source: SeedingSource) -> None:
    """Serve no more. The memory is freed on another thread: that takes as long as it is large, and
    the state is recovered already."""
    threads.run_anyway(source.close, "seed")


class _Recovery:
    """One call of `recover`."""

    def __init__(
        self,
        candidates: Candidates,
        ranks: Coordinator,
        into: object,
        landing: dict[str, Any],
        deadline: Deadline,
    ) -> None:
        self._candidates, self._all = candidates, ranks
        self._into, self._landing, self._deadline = into, landing, deadline
        LoadRequest(into, **landing)  # bad arguments are refused before anything is asked
        self._watch = Stopwatch()
        self._torn: RelayError | None = None
        self._unknown: tuple[int, FormatError] | None = None  # the newest that could not be read
        self._misfit: MismatchError | None = None
        self.reason, self.nbytes = "it was interrupted", 0

    def run(self) -> Loaded | None:
        call = self._all.call("recover")
        # A state that a rank shares with the others can be found once it has come here.
        call.round("gather", lambda: b"", returned, self._deadline)
        with self._watch("ask"):
            self._candidates.ask(self._deadline)
        while True:
            step = self._agree(call)
            if step is None:
                self.reason = FIRST_START
                return None
            try:
                loaded = self._try(call, step)
            except RelayError as fault:
                self._failed(step, fault)
                continue
            self.reason, self.nbytes = "", loaded.report.bytes
            return self._recovered(step, loaded)

    def _failed(self, step: int, fault: RelayError) -> None:
        """A step could not be landed: raise, or leave it to the next attempt."""
        if isinstance(fault, StateError) and not isinstance(fault, MismatchError):
            self.reason = fault.message
            raise fault
        if isinstance(fault, TornStateError):
            self._torn = fault
        if isinstance(fault, FormatError):
            self._unknown = self._unknown or (step, fault)
        everywhere = isinstance(fault, (TornStateError, ReplicaError))
        if fault.rank not in (None, self._all.rank) and not everywhere:
            return  # another rank's source is at fault, and that rank passes it over
        if isinstance(fault, MismatchError):
            source = self._candidates.source_of(step)
            fault.message = f"step {step} of {source} does not fit: {fault.message}"
            fault.step = step
            self._misfit = self._misfit or fault
        if isinstance(fault, (MismatchError, ReplicaError)):
            warnings.warn(f"{fault.message}; it is skipped", RuntimeWarning, stacklevel=5)
        self._candidates.pass_over(step, fault)

    def _agree(self, call: Call) -> int | None:
        """The newest step that every rank can get; None for a first start. `FormatError` where that
        is older than one which a later version wrote."""
        accounts = "\n".join(f"  {one}" for one in self._candidates.attempts())
        steps = [] if self._deadline.passed else self._candidates.steps()
        marked = [] if self._deadline.passed else self._candidates.marked()
        mine = _RankReport(steps, marked, accounts, self._candidates.empty)
        if self._misfit is not None:
            mine.misfit, mine.misfit_step = self._misfit.message, self._misfit.step or 0
        report = msgspec.msgpack.encode(mine)
        try:
            answer = call.round("recover", lambda: report, _decide, self._deadline)
            step, is_marked = _decision.decode(answer)
            if self._unknown is not None and step is not None and step < self._unknown[0]:
                raise self._unknown[1]
        except RelayError as fault:
            if self._unknown is not None and isinstance(fault, RecoveryError):
                fault = self._unknown[1]
            self.reason = fault.message
            if self._torn is not None:
                raise TornStateError(
                    f"the destination is part old, part new, and {fault.message}", phase="recover"
                ) from self._torn
            if isinstance(fault, MismatchError) and self._misfit is not None:
                raise self._misfit from None  # this rank's own, with its traceback
            raise fault
        if step is not None and is_marked:
            self._candidates.accept(step)
            text = f"no step has equal replicas: step {step} is taken, the newest"
            warnings.warn(text, RuntimeWarning, stacklevel=5)
        return step

    def _try(self, call: Call, step: int) -> Loaded:
        left = max(self._deadline.left(), 0.01)
        attempt = Deadline(left * SHARE if self._candidates.several(step) else left)
        loader = Loader(ChosenStep(self._candidates, step), self._all)
        with self._watch("take"):
            return loader.load(call, LoadRequest(self._into, step, **self._landing), attempt)

    def _recovered(self, step: int, loaded: Loaded) -> Loaded:
        found, spent = loaded.report, self._watch.seconds
        earlier = spent["take"] - sum(found.seconds.values())
        supplied = self._candidates.supplied(step, found.bytes)
        report = replace(
            found,
            seconds={"ask": spent["ask"], "attempts": max(0.0, earlier), **found.seconds},
            peers={name: Outcome(bytes=nbytes) for name, nbytes in supplied.items()},
            attempts=self._candidates.attempts(step),
        )
        return replace(loaded, report=report)


def _decide(messages: list[bytes]) -> list[bytes]:
    """The coordinator's: the newest step that all ranks can get, None if no rank has a source with
    a step, or why none can be used."""
    ranks = [_rank_report.decode(data) for data in messages]
    common = set(ranks[0].steps).intersection(*(rank.steps for rank in ranks))
    every = [{*rank.steps, *rank.marked} for rank in ranks]
    marked = every[0].intersection(*every[1:])
    if common or marked:
        return [msgspec.msgpack.encode((max(common or marked), not common))] * len(messages)
    if all(rank.empty for rank in ranks):
        return [msgspec.msgpack.encode((None, False))] * len(messages)
    misfit = next((rank for rank in ranks if rank.misfit), None)
    if misfit is not None:
        raise MismatchError(misfit.misfit, step=misfit.misfit_step, phase="recover")
    accounts = "".join(
        f"\n{f' rank {number}:' + chr(10) if len(ranks) > 1 else ''}{rank.accounts}"
        for number, rank in enumerate(ranks)
    )
    text = "no step can be used: make a source available, or give the job another one"
    raise RecoveryError(text + accounts, phase="recover")
