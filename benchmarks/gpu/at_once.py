"""Three transfers at once between two processes on one GPU, over changing allocations.

    python -m benchmarks.gpu.at_once [--rounds 100] [--out F]

Each of three threads sends states of its own, freed and allocated again in every round, and the
receiver compares every bit. Exits with 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import SECONDS, Ranks, machine
from torchrelay import Relay

LANES = 3
SIZES = (3_000_001, 700_003, 5_000_000, 64, 1_200_007)


def state_of(lane: int, number: int) -> dict[str, torch.Tensor]:
    make = torch.Generator(device="cuda").manual_seed(1000 * lane + number)
    return {
        f"w{n}": torch.rand(size + 17 * number, generator=make, device="cuda")
        for n, size in enumerate(SIZES)
    }


def at_once(group: Any, rounds: int) -> list[str]:
    """What went wrong in each lane."""
    relay = Relay(group, timeout=SECONDS)
    wrong: list[str] = []
    routes: set[str] = set()

    def lane(which: int) -> None:
        try:
            for number in range(rounds):
                step = 1000 * which + number
                if group.rank() == 0:
                    relay.send(state_of(which, number), to=1, step=step)
                    continue
                into = {k: torch.zeros_like(v) for k, v in state_of(which, number).items()}
                got = relay.recv(0, into=into if number % 2 else None, step=step)
                routes.add(got.report.route)
                expected = state_of(which, number)
                bad = [k for k, v in expected.items() if not torch.equal(v, got.state[k])]
                if bad:
                    wrong.append(f"lane {which}, round {number}: {bad}")
        except Exception as fault:
            wrong.append(f"lane {which}: {fault!r}")

    threads = [threading.Thread(target=lane, args=(which,)) for which in range(LANES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [*wrong, *sorted(routes)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.at_once", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    begun = time.monotonic()
    with Ranks(2) as ranks:
        sender, receiver = ranks.run(at_once, options.rounds)
    right = sender == [] and receiver == ["cuda_ipc"]
    seconds = round(time.monotonic() - begun, 1)
    print(f"{options.rounds} rounds of {LANES} at once: right={right}, {seconds} s")
    for line in (*sender, *receiver):
        print(f"  {line}")
    if options.out:
        found = {"machine": machine(), "rounds": options.rounds, "lanes": LANES, "right": right}
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
