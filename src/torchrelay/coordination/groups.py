"""Process groups: how the workers of torchrun form one, and which one a caller means."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchrelay.deadlines import Timeout, seconds_of
from torchrelay.errors import UsageError


def init_process_group(backend: str | None = None, *, timeout: Timeout | None = None) -> None:
    """`torch.distributed.init_process_group` for workers that torchrun may start again.

    Each start gets a rendezvous of its own. With torch's own function, workers of the second start
    may find the addresses of the first in the store of torchrun, and fail to connect. Outside of
    torchrun it is torch's own function.
    """
    options: dict[str, Any] = {}
    if timeout is not None:
        options["timeout"] = timedelta(seconds=seconds_of(timeout))
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if restarts is not None:
        rank, world, port = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        c10d: Any = dist
        store = c10d.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
        # The number of workers may change without a restart being counted.
        start = c10d.PrefixStore(f"torchrelay/start-{restarts}-{world}", store)
        options.update(store=start, rank=rank, world_size=world)
    dist.init_process_group(backend, **options)


def default_group(group: Any, *, no_dist: bool = False) -> Any:
    """The group that a caller names: by default the one of all ranks, if torch.distributed is
    initialized; None for a process alone, without one or with `no_dist`."""
    if no_dist and group is not None:
        raise UsageError("no_dist=True is for this process alone: leave group= out")
    if not no_dist and group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group


def check_group(group: Any) -> None:
    """`UsageError` unless it is a process group that this rank is in."""
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError("this rank is not in the group that it was given: give one that it is in")
    if not callable(getattr(group, "rank", None)) or not callable(getattr(group, "size", None)):
        hint = ": its get_group() is one" if hasattr(group, "get_group") else ""
        raise UsageError(f"group is a process group, not {type(group).__name__}{hint}")


def current_group(group: Any) -> Any:
    """The process group behind a wrapper, or the group itself.

    torchft configures its wrappers again after each quorum: another group is behind them then, with
    other ranks. They do not know their rank. `UsageError` before the first quorum, and for a group
    that does not tell the rank at all.
    """
    found = group
    while True:
        try:
            behind = getattr(found, "parent", None)
        except AssertionError as fault:
            raise UsageError(
                f"{type(found).__name__} is not configured yet: its manager does that when a "
                "quorum begins"
            ) from fault
        if not callable(getattr(behind, "rank", None)):
            break
        found = behind
    if isinstance(found, dist.ProcessGroup) and dist.ProcessGroup.size(found) != found.size():
        raise UsageError(
            f"{type(found).__name__} does not tell the rank of this process: use one that does, "
            "such as torchft's ProcessGroupGloo or ProcessGroupNCCL"
        )
    return found


def store_of(group: Any, store: Any = None) -> Any:
    """The store in which the ranks of a group find each other: the one that a caller names, or the
    group's own. Every group of torch has one; `UsageError` for a group that has none."""
    if store is not None:
        return store
    with suppress(AttributeError, RuntimeError):
        store = group.get_group_store()
    if store is None:
        raise UsageError(
            f"{type(group).__name__} has no store, in which its ranks find each other: use a group "
            "of torch.distributed, or name a store that all its ranks share: "
            "Relay(group, store=...)"
        )
    return store


def members_of(group: Any) -> frozenset[int] | None:
    """The ranks of a group as the default group counts them; None for a group that torch does not
    know, as libraries make them."""
    with suppress(KeyError, ValueError, RuntimeError):
        return frozenset(dist.get_process_group_ranks(group))
    return None
