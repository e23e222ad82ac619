"""A gloo group of the ranks of another one, made by these ranks alone."""

from __future__ import annotations

import uuid
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A new gloo group with the ranks, the order and the timeout of `group`.

    Every rank of `group` calls this, and no other has to. torch's `new_group` wants all ranks of
    the world; with `use_local_synchronization` it names the group after how many groups a rank is
    in, and hangs where these numbers differ. Here the first rank names it.
    """
    ranks = dist.get_process_group_ranks(group)
    name: list[Any] = [f"torchrelay-{uuid.uuid4().hex}"]
    dist.broadcast_object_list(name, src=ranks[0], group=group)
    found: tuple[dist.ProcessGroup, Any] = c10d._new_process_group_helper(
        len(ranks),
        dist.get_rank(group),
        ranks,
        c10d.Backend("gloo"),
        c10d._get_default_store(),
        name[0],
        timeout=_timeout(group),
    )
    # `new_group` records this for a group, and torch's collectives look it up.
    c10d._world.pg_group_ranks[found[0]] = {rank: n for n, rank in enumerate(ranks)}
    return found[0]


def _timeout(group: dist.ProcessGroup | None) -> Any:
    """The timeout the caller gave the group; torch's default where it does not tell."""
    whole: Any = dist.group.WORLD if group is None else group
    try:
        return whole._get_backend(whole._device_types[0]).options._timeout
    except (AttributeError, RuntimeError):
        return c10d.default_pg_timeout
