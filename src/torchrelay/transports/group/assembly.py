"""Ranks that act together through their group's store: everybody reports, one decides, all hear it.

The store serves every backend, and a rank that hangs or dies does not break it for the others. So
each rank learns what went wrong where, within the caller's deadline, whoever it was.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import torch.distributed as dist

from torchrelay import errors
from torchrelay.deadlines import Deadline
from torchrelay.errors import CheckpointError, RelayError
from torchrelay.transports.group.c10d import check_group, members_of
from torchrelay.transports.group.store_values import await_keys, drop, peek, put, read, take

COORDINATOR = 0
_SPREAD = 1.0  # seconds before the deadline at which the coordinator gives up, so that all hear why
_FAREWELL_PAUSE = 0.0005
FAREWELL = 2.0  # seconds that the coordinator stays for ranks that have not taken their answer

# What a rank's failure may be raised as elsewhere; others arrive as their base.
_KINDS: dict[str, type[RelayError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, RelayError)
}

Decide = Callable[[list[bytes]], Sequence[bytes]]


class _Word(msgspec.Struct, array_like=True):
    """What a rank says: its payload, or why it has none."""

    data: bytes = b""
    kind: str = ""
    message: str = ""
    rank: int | None = None
    step: int | None = None
    phase: str | None = None
    path: str | None = None
    file: str | None = None
    offset: int | None = None


_word = msgspec.msgpack.Decoder(_Word)


class Assembly:
    """The ranks of a group, or one process alone (`None` or `False`).

    Every rank makes the same assemblies in the same order, and the same calls of each. Several
    calls may be under way at once. The coordinator counts them: a rank that missed one, or made one
    alone, takes part in the next.
    """

    def __init__(self, group: Any, purpose: str, *, lasting: bool = False) -> None:
        """`lasting`: the only one of the group with this purpose."""
        group = None if group is False else group
        if group is not None:
            check_group(group)
        self.rank: int = 0 if group is None else group.rank()
        self.world: int = 1 if group is None else group.size()
        self.members = None if group is None else members_of(group)
        self._store: Any = Board(group.get_group_store()) if self.world > 1 else None
        self._channel = f"torchrelay/{purpose}"
        if self._store is not None and not lasting:
            # Counted in the store itself: it lives as long as the group, unlike a process.
            count = self._store.add(f"{self._channel}/members/{self.rank}", 1)
            self._channel += f"/{count}"
        self._calls = 0
        self.unheard: list[str] = []  # answers that this rank has stopped waiting for
        self._lock = threading.Lock()

    @classmethod
    def of(cls, group: Any, purpose: str) -> Assembly:
        """Of the ranks that a caller names: by default all, where torch.distributed is initialized;
        `False` is this process alone."""
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        return cls(group, purpose)

    @classmethod
    def lasting(cls, group: Any, purpose: str) -> Assembly:
        """The one of a group for calls that make nothing that lasts. A rank that never came to one
        of them is with the others in the next, which it would not be if each had its assembly."""
        if group is None or group is False:
            return cls(None, purpose)
        check_group(group)
        with _lasting_lock:
            known = _lasting.setdefault(group, {})
            if purpose not in known:
                known[purpose] = cls(group, purpose, lasting=True)
            return known[purpose]

    @property
    def coordinates(self) -> bool:
        return self.rank == COORDINATOR

    def sweep(self) -> None:
        """Remove answers that came after this rank had stopped waiting for them."""
        with self._lock:  # one thread at a time: a value is read to be removed
            self.unheard = [name for name in self.unheard if not drop(self._store, name)]

    def call(self, what: str = "") -> Call:
        """A call of all ranks; `what` names one that is made once, such as the save of a step."""
        try:
            with self._lock:
                self._calls = self._calls + 1 if self._store is None else self._number(what)
                return Call(self, self._store, f"{self._channel}/{self._calls}")
        except _StoreLost as lost:
            raise CheckpointError(lost.message, phase="begin") from lost

    def _number(self, what: str) -> int:
        mine = self._calls + 1
        if self.coordinates:
            self._note(mine, what)
            return mine
        opened, doing, over = self._noted()
        if mine > opened:
            return opened + 1
        if over:  # without this rank: it comes late for that call, or missed it
            return opened if what and doing == what else opened + 1
        if mine < opened and doing != what:
            self._calls = opened - 1
            raise CheckpointError(
                f"this rank is late with {what or 'a call'}: the others gave it up and are at "
                f"{doing or 'another'}",
                rank=self.rank,
                phase="begin",
            )
        return opened

    def give_up(self) -> None:
        """The coordinator's: the call that was begun last is over, and not every rank was there."""
        _, what, _ = self._noted()
        self._note(self._calls, what, over=True)

    def take_back(self, said: str) -> None:
        """A call that the coordinator has not begun does not count, and the word for it must not be
        taken for one for the next."""
        opened, _, _ = self._noted()
        if opened < self._calls:
            drop(self._store, said)
            self._calls = opened

    def _note(self, number: int, what: str, over: bool = False) -> None:
        self._store.set(f"{self._channel}/opened", msgspec.msgpack.encode((number, what, over)))

    def _noted(self) -> tuple[int, str, bool]:
        """The call that the coordinator began last; whether it is over without some rank."""
        key = f"{self._channel}/opened"
        if not self._store.check([key]):
            return 0, "", False
        return msgspec.msgpack.decode(self._store.get(key), type=tuple[int, str, bool])

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Within: this rank gets ready to take part. If it fails, no other waits for it: every call
        of theirs raises what went wrong here."""
        try:
            yield
        except BaseException as fault:
            if self._store is not None:
                word = msgspec.msgpack.encode(_failure("open", self.rank, fault))
                with suppress(_StoreLost):
                    put(self._store, self.refusal, word)
            raise

    @property
    def refusal(self) -> str:
        """The key with the reason why some rank never takes part."""
        return f"{self._channel}/refused"

    def board(self, name: str) -> Board:
        """Keys of the store that all ranks share; there is a store where there are several."""
        prefix = f"{self._channel}/{name}"
        return Board(dist.PrefixStore(prefix, self._store.store))  # type: ignore[attr-defined]


_lasting: weakref.WeakKeyDictionary[Any, dict[str, Assembly]] = weakref.WeakKeyDictionary()
_lasting_lock = threading.Lock()


class _StoreLost(CheckpointError):
    pass


class Board:
    """The group's store. Where it is gone, an error says so."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        act = getattr(self.store, name)

        def call(*args: Any) -> Any:
            try:
                return act(*args)
            except dist.DistError as fault:
                raise _StoreLost(
                    "the group's store is gone, and with it the process that holds it (rank 0, "
                    f"as a rule): {str(fault).splitlines()[0]}"
                ) from fault

        return call


class Call:
    """One operation of all ranks, in as many rounds as it takes."""

    def __init__(self, assembly: Assembly, store: Any, prefix: str) -> None:
        self._all = assembly
        self._store = store
        self._prefix = prefix
        self._rounds = 0
        self.answered = True  # whether this rank heard what became of the last round

    def at(self, where: str) -> None:
        """Tell the others what this rank is doing, for the case that it does not get done."""
        if self._store is not None:
            with suppress(_StoreLost):  # the next round says so
                self._store.set(self._place, where.encode() or b"?")

    def _be_nowhere(self) -> None:
        """Between rounds nobody asks what this rank is doing: the key would stay for good."""
        if self._store is not None:
            with suppress(_StoreLost):
                self._store.delete_key(self._place)

    @property
    def _place(self) -> str:
        return f"{self._prefix}/at/{self._all.rank}"

    def round(
        self,
        phase: str,
        mine: Callable[[], bytes] | BaseException,
        decide: Decide,
        deadline: Deadline,
    ) -> bytes:
        """Do `mine` on each rank, `decide` on the coordinator with what all returned, and return
        the part of its answer that is for this rank.

        Whatever fails anywhere is raised on every rank, with the rank where it failed first.
        """
        try:
            try:
                return self._round(phase, mine, decide, deadline)
            finally:
                self._be_nowhere()
        except _StoreLost as lost:
            raise CheckpointError(lost.message, phase=phase) from lost

    def _round(
        self,
        phase: str,
        mine: Callable[[], bytes] | BaseException,
        decide: Decide,
        deadline: Deadline,
    ) -> bytes:
        self._rounds += 1
        key = f"{self._prefix}/{self._rounds}"
        if self._store is None:
            if isinstance(mine, BaseException):
                raise mine
            return decide([mine()])[0]
        self.answered = False
        word, fault = _try(phase, self._all.rank, mine)
        if isinstance(fault, RelayError) and fault.rank is None:
            fault.rank = self._all.rank
        said = f"{key}/said/{self._all.rank}"
        put(self._store, said, msgspec.msgpack.encode(word))
        if self._all.coordinates:
            self._answer(phase, key, decide, deadline)
        heard = self._hear(said, f"{key}/heard/{self._all.rank}", deadline)
        if heard is None:
            if fault is not None:
                raise fault
            raise CheckpointError(
                f"the coordinator did not answer in {deadline.seconds:g} s",
                rank=COORDINATOR,
                phase=phase,
            )
        self.answered = True
        if heard.kind:
            with suppress(_StoreLost):  # the answer counts
                drop(self._store, said)  # the coordinator may have given up before it was there
        if heard.kind and fault is not None and heard.rank == self._all.rank:
            if isinstance(fault, RelayError):
                fault.rank, fault.phase = heard.rank, heard.phase
            raise fault  # this rank's own, with its traceback
        return _heard(heard)

    def _hear(self, said: str, name: str, deadline: Deadline) -> _Word | None:
        """The coordinator's answer, if it comes in time. One that comes later is removed later."""
        self._all.sweep()
        word: _Word | None = None
        try:
            if self._await([name], deadline.left() + _SPREAD):
                word = _word.decode(take(self._store, name))
        finally:
            if word is None:
                self._all.unheard.append(name)
        if word is None:
            self._all.take_back(said)
        return word

    @contextmanager
    def telling(self, phase: str, deadline: Deadline) -> Iterator[None]:
        """Within: this rank works between two rounds. If it fails, the others hear why in the next
        one, instead of waiting there for a rank that never comes."""
        try:
            yield
        except BaseException as fault:
            with suppress(RelayError, type(fault)):  # what it was is raised
                self.round(phase, fault, lambda said: said, deadline)
            raise

    def _answer(self, phase: str, key: str, decide: Decide, deadline: Deadline) -> None:
        ranks = range(self._all.world)
        names = [f"{key}/said/{rank}" for rank in ranks]
        if self._await(names, max(0.0, deadline.left() - min(_SPREAD, deadline.seconds / 4))):
            words = [_word.decode(take(self._store, name)) for name in names]
            answers = _decided(phase, self._all.rank, words, decide)
        else:
            late = [rank for rank, name in zip(ranks, names, strict=True) if not self._has(name)]
            answers = [self._late(phase, late, deadline)] * self._all.world
            if self._rounds == 1:
                self._all.give_up()
            for name in names:
                drop(self._store, name)
        for rank, answer in zip(ranks, answers, strict=True):
            put(self._store, f"{key}/heard/{rank}", msgspec.msgpack.encode(answer))

    def farewell(self) -> None:
        """The coordinator's, after the last round: wait until the ranks have taken their answers,
        though not for long. The store that has them may end with this process."""
        if self._store is None or not self._all.coordinates:
            return
        end = time.monotonic() + FAREWELL
        with suppress(_StoreLost):
            for rank in range(self._all.world):
                while self._has(f"{self._prefix}/{self._rounds}/heard/{rank}"):
                    if time.monotonic() > end:
                        return
                    time.sleep(_FAREWELL_PAUSE)

    def _late(self, phase: str, late: list[int], deadline: Deadline) -> _Word:
        places = []
        for rank in late[:8]:
            name = f"{self._prefix}/at/{rank}"
            places.append(f"rank {rank}: {peek(self._store, name, 'not yet begun')}")
        return _Word(
            kind="CheckpointError",
            message=f"no word in {deadline.seconds:g} s from {'; '.join(places)}",
            rank=late[0],
            phase=phase,
        )

    def _has(self, name: str) -> bool:
        found: bool = self._store.check([name])
        return found

    def _await(self, names: list[str], seconds: float) -> bool:
        """Whether all of the keys are there in time. Raises where some rank never takes part."""

        def look() -> None:
            if self._has(self._all.refusal):
                _heard(_word.decode(read(self._store, self._all.refusal)))

        return await_keys(self._store, names, seconds, look)


def _try(
    phase: str, rank: int, act: Callable[[], bytes] | BaseException
) -> tuple[_Word, BaseException | None]:
    if isinstance(act, BaseException):
        return _failure(phase, rank, act), act
    try:
        return _Word(act()), None
    except BaseException as fault:  # the others hear of an interrupt too
        return _failure(phase, rank, fault), fault


def _decided(phase: str, rank: int, words: list[_Word], decide: Decide) -> list[_Word]:
    failed = next((word for word in words if word.kind), None)
    if failed is not None:
        return [failed] * len(words)
    try:
        return [_Word(data) for data in decide([word.data for word in words])]
    except Exception as fault:
        return [_failure(phase, rank, fault)] * len(words)


def _failure(phase: str, rank: int, fault: BaseException) -> _Word:
    if not isinstance(fault, RelayError):
        message = f"{type(fault).__name__}: {fault}"
        return _Word(kind="CheckpointError", message=message, rank=rank, phase=phase)
    return _Word(
        kind=type(fault).__name__,
        message=fault.message,
        rank=rank if fault.rank is None else fault.rank,
        step=fault.step,
        phase=fault.phase or phase,
        path=fault.path,
        file=getattr(fault, "file", None),
        offset=getattr(fault, "offset", None),
    )


def _heard(word: _Word) -> bytes:
    if not word.kind:
        return word.data
    kind = _KINDS.get(word.kind, CheckpointError)
    context: dict[str, Any] = {
        "rank": word.rank,
        "step": word.step,
        "phase": word.phase,
        "path": word.path,
    }
    if issubclass(kind, CheckpointError):
        context["file"] = word.file
    if issubclass(kind, errors.DamagedError):
        context["offset"] = word.offset
    raise kind(word.message, **context)
