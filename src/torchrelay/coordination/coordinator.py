"""Ranks that act together: each reports, the coordinator (rank 0) decides, all get its answer.

In the first round of a call each rank leaves its message under the one key that it has for that,
and says which call it makes. Calls are matched by name: a rank that missed a call, or made one
alone, takes part in the next one. Later rounds have keys of their own, so several calls may be in
progress.

The group's store serves every backend, and a rank that hangs or dies does not break it for others.
So each rank learns within its deadline what went wrong where.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import xxhash

from torchrelay.coordination.call import Call, GroupCall
from torchrelay.coordination.channel import CallChannel
from torchrelay.coordination.group_store import GroupStore, StoreLost
from torchrelay.coordination.groups import check_group, default_group, members_of, store_of
from torchrelay.coordination.messages import COORDINATOR, CallName, RankMessage
from torchrelay.metrics import Measurement

_channels: weakref.WeakKeyDictionary[Any, dict[str, dict[str, CallChannel]]]
_channels = weakref.WeakKeyDictionary()  # of this process, by group, purpose and name
_lock = threading.Lock()


class Coordinator:
    """The ranks of a group, or one process alone (`group` is None).

    Coordinators of one purpose and one name are matched with each other. Without a name they are
    matched in the order in which each rank makes them. `name` also tells them apart in messages.
    """

    def __init__(self, group: Any, purpose: str, name: str = "") -> None:
        if group is not None:
            check_group(group)
        self.rank: int = 0 if group is None else group.rank()
        self.world: int = 1 if group is None else group.size()
        self.members = None if group is None else members_of(group)
        self._alone = group is None
        self.channel: CallChannel | None = None  # where several ranks meet
        if self.world > 1:
            store = GroupStore(store_of(group), f"torchrelay/{purpose}/", self.world)
            # Counted in the store, which lives as long as the group, unlike a process.
            self._number = store.add(f"made/{self.rank}/{name}", 1)
            subject = f" of the {purpose} {name}" if name else ""
            self.channel = _channel(group, store, purpose, name or str(self._number), subject)

    @classmethod
    def of(cls, group: Any, purpose: str, name: str = "", *, no_dist: bool = False) -> Coordinator:
        """Of the ranks that a caller names: by default all, where torch.distributed is initialized;
        with `no_dist` this process alone."""
        return cls(default_group(group, no_dist=no_dist), purpose, name)

    @property
    def coordinates(self) -> bool:
        return self.rank == COORDINATOR

    def call(self, verb: str, step: int | None = None) -> Call:
        """A call of all ranks; `step` for calls that each rank makes in ascending order."""
        name = CallName(verb, step)
        if self.channel is None:
            return Call(name)
        return GroupCall(name, self.rank, self.world, self.channel, self._number)

    def measured(
        self, operation: str, step: int | None = None, *, background: bool = False
    ) -> Measurement:
        """A call of this rank, for spans and metrics. A process alone has no rank there: a job may
        have many of them."""
        if self._alone:
            return Measurement(operation, step, background=background)
        role = "coordinator" if self.coordinates else "member"
        return Measurement(operation, step, rank=self.rank, role=role, background=background)

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Within: this rank gets ready to take part. If it fails, every call of the other ranks
        raises the reason, and no rank waits for this one."""
        try:
            yield
        except BaseException as fault:
            if self.channel is not None:
                reason = msgspec.msgpack.encode(RankMessage.failure(fault, "open", self.rank))
                with suppress(StoreLost):
                    self.channel.store.put(self.channel.refusal(self._number), reason)
            raise


def _channel(group: Any, store: GroupStore, purpose: str, name: str, subject: str) -> CallChannel:
    """One for each name in this process: its calls take turns there."""
    key = xxhash.xxh64_hexdigest(name.encode("utf-8", "surrogatepass"))
    with _lock:
        known = _channels.setdefault(group, {}).setdefault(purpose, {})
        return known.setdefault(key, CallChannel(store, key, known, subject))
