"""One side of an exchange between two versions of this library: `python peer.py HOME CALL WORDS`.

It imports torchrelay from HOME, makes one call, and prints its result as a line of JSON. It uses
nothing but public names that every version since the first has.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchrelay as tr

SECONDS = 60.0


def state(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(64, 32)
    torch.nn.init.constant_(model.weight, value)
    torch.nn.init.constant_(model.bias, -value)
    values = {"step": int(value), "name": "older", "none": None, "pair": (1, 2.5)}
    return {"model": model, "random": torch.full((1000,), value), "values": values}


def is_whole(found: dict[str, Any]) -> bool:
    wanted = state(7.0)
    same = all(
        torch.equal(one, wanted["model"].state_dict()[name])
        for name, one in found["model"].state_dict().items()
    )
    return (
        same
        and torch.equal(found["random"], wanted["random"])
        and found["values"] == wanted["values"]
    )


def save(folder: str) -> bool:
    with tr.Checkpointer(folder, no_dist=True, timeout=SECONDS) as ckpt:
        ckpt.save(7, state(7.0))
    return True


def restore(folder: str) -> bool:
    into = state(0.0)
    with tr.Checkpointer(folder, no_dist=True, timeout=SECONDS) as ckpt:
        return ckpt.restore(into) == 7 and is_whole(into)


def serve() -> bool:
    with tr.serve(state(7.0), step=7, no_dist=True, timeout=SECONDS) as endpoint:
        print(json.dumps({"url": endpoint.url}), flush=True)
        sys.stdin.readline()
    return True


def pull(url: str) -> bool:
    into = state(0.0)
    got = tr.pull(url, into=into, no_dist=True, timeout=SECONDS)
    return got.step == 7 and is_whole(into)


def stage(job: str) -> bool:
    with tr.Keeper(job, no_dist=True, timeout=SECONDS) as keeper:
        keeper.stage(7, state(7.0)).result(SECONDS)
    return True


def recover(job: str) -> bool:
    into = state(0.0)
    with tr.Keeper(job, no_dist=True, timeout=SECONDS) as keeper:
        got = tr.recover([keeper], into=into, no_dist=True, timeout=SECONDS)
        keeper.end()
    return got is not None and got.step == 7 and is_whole(into)


def move(rank: str, meeting: str) -> bool:
    """Rank 0 sends to rank 1."""
    limit = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", f"file://{meeting}", limit, world_size=2, rank=int(rank))
    into = state(0.0)
    with tr.Relay(timeout=SECONDS) as relay:
        if rank == "0":
            relay.send(state(7.0), to=1, step=7)
            return True
        got = relay.recv(0, into=into)
    return got.step == 7 and is_whole(into)


def main() -> None:
    home, call, *words = sys.argv[1:]
    assert Path(tr.__file__).is_relative_to(home), f"{tr.__file__} is not below {home}"
    try:
        answer: dict[str, Any] = {"exact": globals()[call](*words)}
    except tr.errors.RelayError as fault:
        answer = {"error": f"{type(fault).__name__}: {fault}"}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
