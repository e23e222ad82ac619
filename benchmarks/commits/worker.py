"""One rank of one commit. It imports whichever torchrelay is on its path.

Commands come as lines of JSON on standard input, and each is answered by one on standard output.
Nothing here needs an API that an older commit lacks.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SMALL, MIB = 1024, 1 << 20


def filled(shapes: list[tuple[str, tuple[int, ...]]], seed: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, seed) for name, shape in shapes}


def shapes_of(kind: str, scale: int) -> list[tuple[str, tuple[int, ...]]]:
    """`small`: tensors of 4 KB. `large`: 16 tensors. `transformer`: layers, with optimizer states
    of the same shapes."""
    if kind == "small":
        return [(f"t{n}", (SMALL,)) for n in range(scale)]
    if kind == "large":
        return [(f"w{n}", (scale * MIB // 4 // 16,)) for n in range(16)]
    width = scale
    layer = [
        ("q", (width, width)),
        ("o", (width, width)),
        ("n", (width,)),
        ("m", (3 * width, width)),
    ]
    return [(f"{n}.{name}.{k}", s) for n in range(8) for name, s in layer for k in "wab"]


class Worker:
    def __init__(self, rank: int, size: int, store: str, folder: str) -> None:
        import torchrelay as tr

        torch.set_num_threads(1)
        self.rank, self.size, self.tr = rank, size, tr
        limit = timedelta(seconds=300)
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=limit
        )
        self.relay = tr.Relay(timeout=120)
        # Commits that have no route "tcp" cross a wire by route "group".
        self.by_wire = "tcp" if find_spec("torchrelay.transports.routes.tcp") else "group"
        self.folder = Path(folder)
        self.states: dict[str, Any] = {}
        self.manifests: dict[str, Any] = {}

    def state(self, kind: str, scale: int) -> Any:
        """The same tensors in every lap, as a training job has them."""
        key = f"{kind} {scale}"
        if key not in self.states:
            self.states.clear()
            self.states[key] = filled(shapes_of(kind, scale), 1.0 if self.rank == 0 else 0.0)
        return self.states[key]

    def live(self, kind: str, scale: int, mode: str, to: int, route: str | None) -> float:
        """Seconds from the common start to the end of the last rank, as rank 0 sees it."""
        state = self.state(kind, scale)
        ranks = list(range(1, 1 + to))
        route = self.by_wire if route == "tcp" else route
        dist.barrier()
        begun = time.monotonic()
        got: Any = None
        if self.rank == 0:
            self.relay.send(state, ranks, route=route)
        elif self.rank in ranks:
            into = None if mode == "new" else state
            got = self.relay.recv(0, into=into, atomic=mode != "direct", route=route)
        dist.barrier()
        spent = time.monotonic() - begun
        if got is not None:
            for tensor in got.state.values():
                assert tensor.view(-1)[0] == 1 and tensor.view(-1)[-1] == 1
            if mode != "new":
                for tensor in state.values():
                    tensor.zero_()
        return spent

    def durable(self, kind: str, scale: int, mode: str) -> float:
        """A save, a load or the stall of an asynchronous save, by rank 0 alone."""
        if self.rank:
            return 0.0
        state = self.state(kind, scale)
        root = self.folder / "steps"
        spent = 0.0
        with self.tr.Checkpointer(str(root), no_dist=True, timeout=120) as there:
            if mode == "stall":
                there.save_async(1, state).result(120)  # the first has the arena made
                begun = time.monotonic()
                pending = there.save_async(2, state)
                spent = time.monotonic() - begun
                pending.result(120)
            else:
                begun = time.monotonic()
                there.save(1, state)
                spent = time.monotonic() - begun
        if mode.startswith("load"):
            into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            with self.tr.Checkpointer(str(root), no_dist=True, timeout=120) as there:
                begun = time.monotonic()
                there.load(into, atomic=mode == "load")
                spent = time.monotonic() - begun
            assert all(bool(tensor.view(-1)[-1] == 1) for tensor in into.values())
        shutil.rmtree(root)
        return spent

    def plan(self, kind: str, scale: int) -> float:
        """A description of a state, and the plan of a receive into it, with nothing to repeat."""
        if self.rank:
            return 0.0
        land, capture = _planning()
        state = self.state(kind, scale)
        begun = time.monotonic()
        land(_described(capture(state)), into=state)
        return time.monotonic() - begun

    def record(self, what: str, kind: str, scale: int) -> float:
        """What a record costs rank 0, in seconds of the processor; or its bytes."""
        if kind not in self.states:
            self.states.clear()
            self.states[kind] = TREES[kind](scale)
        if self.rank:
            return 0.0
        land, capture = _planning()
        state = self.states[kind]
        begun = time.process_time()
        data = capture(state, 7).encoded()
        if what == "describe":
            return time.process_time() - begun
        if what == "bytes":
            return float(len(data))
        begun = time.process_time()
        found = _decoder()(data)
        if what == "decode":
            return time.process_time() - begun
        prepare = _prepare()
        into = None if what == "new" else _zeros_like(state)
        begun = time.process_time()
        landing = land(found, into=None if into is None else prepare(into))
        if callable(
            getattr(landing, "places", None)
        ):  # earlier commits make memory when it is asked for
            landing.places().host  # noqa: B018
            landing.arrived()
        landing.commit()
        return time.process_time() - begun

    def rest(self, what: str, kind: str, scale: int) -> float:
        """Processor seconds that the record of a step at rest costs rank 0; or its bytes."""
        if kind not in self.states:
            self.states.clear()
            self.states[kind] = TREES[kind](scale)
        if self.rank:
            return 0.0
        state = self.states[kind]
        describe, encode, decode = _at_rest()
        if what == "describe":
            begun = time.process_time()
            describe(state)
            return time.process_time() - begun
        data = self.manifest(kind, state)
        if what == "bytes":
            return float(len(data))
        begun = time.process_time()
        found = decode(data)
        spent = time.process_time() - begun
        if what == "encode":
            begun = time.process_time()
            encode(found)
            spent = time.process_time() - begun
        return spent

    def manifest(self, kind: str, state: Any) -> bytes:
        """The record of a step of rank 0 alone, saved once."""
        if self.manifests.get("kind") != kind:
            root = self.folder / "rested"
            with self.tr.Checkpointer(str(root), no_dist=True, timeout=120) as there:
                there.save(1, state)
            data = (root / "step-1" / "manifest.json").read_bytes()
            self.manifests = {"kind": kind, "data": data}
            shutil.rmtree(root)
        found: bytes = self.manifests["data"]
        return found


def _at_rest() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """What describes a state at rest, and encodes and decodes its record, wherever the commit has
    them."""
    for home in ("describing", "plan"):
        if find_spec(f"torchrelay.{home}") and find_spec(f"torchrelay.{home}.at_rest"):
            codec = import_module("torchrelay.record.encoding")
            describe = import_module(f"torchrelay.{home}.at_rest").describe
            return describe, codec.encode_at_rest, codec.decode_at_rest
    codec = import_module("torchrelay.record.checkpoint.commit")
    return import_module("torchrelay.plan.outline").outline, codec.encode, codec.decode


def _planning() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What lands and what describes a state, wherever the commit has them."""
    for landing, snapshot in (
        ("landing.land", "describing.snapshot"),
        ("landing.land", "plan.snapshot"),
        ("landing.seam", "plan.snapshot"),
        ("state.landing", "state.snapshot"),
    ):
        try:
            homes = import_module(f"torchrelay.{landing}"), import_module(f"torchrelay.{snapshot}")
        except ImportError:
            continue
        return homes[0].land, homes[1].capture
    raise ImportError("this commit has no planning that is known here")


def _prepare() -> Callable[[Any], Any]:
    """What inspects a destination before a state is offered."""
    for home, name in (
        ("planning.destination", "Destination"),
        ("landing.destination", "prepare"),
        ("landing.pairing", "PreparedDestination"),
    ):
        with suppress(ImportError, AttributeError):
            found: Callable[[Any], Any] = getattr(import_module(f"torchrelay.{home}"), name)
            return found
    raise ImportError("this commit has no destination that is known here")


def _described(snapshot: Any) -> Any:
    """What a snapshot offers, by the name that the commit has for it."""
    return snapshot.record if hasattr(snapshot, "record") else snapshot.manifest


def _decoder() -> Callable[[bytes], Any]:
    for home in ("encoding", "codec"):
        with suppress(ImportError):
            found: Callable[[bytes], Any] = import_module(f"torchrelay.record.{home}").decode
            return found
    raise ImportError("this commit has no decoder that is known here")


def _nested(outer: int, inner: int) -> dict[str, Any]:
    layers = {f"l{n}": {f"w{k}": torch.zeros(SMALL) for k in range(inner)} for n in range(outer)}
    return {"model": layers, "lr": 0.1}


def _dtensors(count: int) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        f"w{n}": DTensor.from_local(torch.zeros(8, 16), mesh, [Shard(0)], run_check=False)
        for n in range(count)
    }


def _zeros_like(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _zeros_like(value) for key, value in state.items()}
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else state


TREES: dict[str, Callable[[int], dict[str, Any]]] = {
    "flat": lambda scale: {f"t{n}": torch.zeros(SMALL) for n in range(scale)},
    "wide": lambda scale: _nested(scale // 100, 100),
    "deep": lambda scale: _nested(scale // 10, 10),
    "dtensors": lambda scale: _dtensors(scale // 4),
}


def main() -> None:
    rank, size, store, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    worker = Worker(rank, size, store, folder)
    acts: dict[str, Callable[..., float]] = {
        "live": worker.live,
        "durable": worker.durable,
        "plan": worker.plan,
        "record": worker.record,
        "rest": worker.rest,
    }
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(acts[name](*arguments)), flush=True)


if __name__ == "__main__":
    main()
