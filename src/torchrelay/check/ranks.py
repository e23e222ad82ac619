"""The ranks of a check, and the store in which they exchange facts.

Facts travel through the store alone, so that a check also works between ranks that cannot reach
each other. Each exchange has a deadline: a rank that does not answer is reported, not waited for.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from torchrelay.coordination.group_store import GroupStore
from torchrelay.errors import UsageError

START_SECONDS = 60.0  # for all ranks to reach the store
GRACE_SECONDS = 5.0  # by which rank 0 may be late with the answers of all
_FIRST_PORT, _PORTS = 20_000, 20_000


class Launch(NamedTuple):
    """How a launcher started this rank, and where the store is."""

    rank: int
    world: int
    local: int  # number of this rank on its host
    host: str
    port: int
    hosted: bool  # the launcher hosts the store
    start: str  # which start of the job this is


def launch_of(environ: Mapping[str, str]) -> Launch | None:
    """The launch that the environment describes: by torchrun, or by srun; None for a process
    alone."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        try:
            return Launch(
                int(environ["RANK"]),
                int(environ["WORLD_SIZE"]),
                int(environ.get("LOCAL_RANK", "0")),
                environ["MASTER_ADDR"],
                int(environ["MASTER_PORT"]),
                environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
            )
        except (KeyError, ValueError) as fault:
            raise UsageError(
                f"RANK and WORLD_SIZE are set, but {fault} is not: start the check with torchrun, "
                "or set MASTER_ADDR and MASTER_PORT too"
            ) from None
    if int(environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environ:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        job = int(environ.get("SLURM_JOB_ID", "0"))
        return Launch(
            int(environ["SLURM_PROCID"]),
            int(environ["SLURM_NTASKS"]),
            int(environ.get("SLURM_LOCALID", "0")),
            environ.get("MASTER_ADDR") or first_node(nodes),
            int(environ.get("MASTER_PORT") or _FIRST_PORT + job % _PORTS),
            False,
            environ.get("SLURM_STEP_ID", "0"),
        )
    return None


def first_node(nodes: str) -> str:
    """The first host of a list as Slurm writes it: `gpu[07-09,12],login1` begins with `gpu07`."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    if found is None:
        raise UsageError("srun names no hosts: set MASTER_ADDR to the host of task 0")
    return found[1] + (found[2] or "")


class Ranks:
    """All ranks of a check. Every rank makes the same calls in the same order."""

    def __init__(self, store: Any, rank: int, world: int, local: int = 0) -> None:
        self.rank, self.world, self.local = rank, world, local
        self._raw = store
        self._store = GroupStore(store, "torchrelay/check/")

    @classmethod
    def launched(cls, launch: Launch) -> Ranks:
        """The ranks that a launcher started. Raises what torch raises if the store does not come
        up."""
        c10d: Any = dist
        store = c10d.TCPStore(
            launch.host,
            launch.port,
            launch.world,
            is_master=launch.rank == 0 and not launch.hosted,
            timeout=timedelta(seconds=START_SECONDS),
        )
        prefixed = c10d.PrefixStore(f"start-{launch.start}", store)
        return cls(prefixed, launch.rank, launch.world, launch.local)

    def gather(self, name: str, mine: object, seconds: float) -> list[Any]:
        """The facts of each rank under this name; None for a rank that did not answer in time.

        All ranks get the same list: rank 0 decides who was late.
        """
        self._store.put(f"{name}/{self.rank}", json.dumps(mine).encode())
        everyone = [f"{name}/{rank}" for rank in range(self.world)]
        if self.rank:
            if not self._store.wait_for([f"{name}/all"], seconds + GRACE_SECONDS):
                raise TimeoutError(f"rank 0 did not answer in phase {name!r} of the check")
            return list(json.loads(self._store.read(f"{name}/all") or b"[]"))
        self._store.wait_for(everyone, seconds)
        answers = [self._store.read(key) for key in everyone]
        found = [None if answer is None else json.loads(answer) for answer in answers]
        self._store.put(f"{name}/all", json.dumps(found).encode())
        return found

    def leave(self, seconds: float) -> None:
        """The last call of every rank: rank 0, whose process may host the store, leaves last."""
        self._store.put(f"left/{self.rank}", b"")
        if self.rank == 0:
            self._store.wait_for([f"left/{rank}" for rank in range(self.world)], seconds)

    def pair(self, name: str, first: int, second: int) -> PairGroup:
        """A group of this rank and another one; `first` becomes rank 0."""
        return PairGroup(
            dist.PrefixStore(f"torchrelay/check/{name}/{first}-{second}", self._raw),  # type: ignore[attr-defined]
            int(self.rank == second),
        )


class PairGroup:
    """Two ranks as a process group, as far as `Relay` needs one: their store. So no backend has to
    connect them first."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self._rank = store, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2

    def get_group_store(self) -> Any:
        return self.store


def store_here(world: int) -> tuple[Any, int]:
    """A store on a free port of this machine, and the port."""
    c10d: Any = dist
    limit = timedelta(seconds=START_SECONDS)
    store = c10d.TCPStore(
        "127.0.0.1", 0, world, is_master=True, timeout=limit, wait_for_workers=False
    )
    return store, int(store.port)


def local_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """The environment of another rank on this machine."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 has it already
    }
