"""verl's own base class, registry and `CheckpointEngineManager`.

One test runs the manager with Ray actors (`verl_job.py`). In the others the workers are objects of
this process, driven as the manager drives them. No rollout server runs. To run this file,
`pip install ray`, `pip install --no-deps verl` and what it imports are enough.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forks import run_program
from torchrelay.errors import MismatchError, TransferTimeoutError, UsageError

base = pytest.importorskip(
    "verl.checkpoint_engine.base", reason="verl is not installed", exc_type=ImportError
)
pytest.importorskip("ray", reason="ray is not installed")

from verl.utils.import_utils import import_external_libs  # noqa: E402

SHAPES = {"model.embed_tokens.weight": (32, 8), "model.norm.weight": (8,), "lm_head.weight": (4, 8)}
BUCKET = 1 << 20


def made(count: int, *, actors: bool, seconds: float = 60) -> list[Any]:
    """Engines as verl's workers make them."""
    import_external_libs("torchrelay.integrations.verl")  # custom_backend_module
    options = {"host": "127.0.0.1", "device": "cpu", "timeout": seconds}
    found = []
    for rank in range(count):
        role = {"is_master": rank == 0} if actors else {}
        found.append(
            base.CheckpointEngineRegistry.new("torchrelay", bucket_size=BUCKET, **role, **options)
        )
    return found


def connect(actors: list[Any], rollouts: list[Any]) -> None:
    """`CheckpointEngineManager.build_process_group`, without Ray."""
    metadata = [engine.prepare() for engine in [*actors, *rollouts]]
    backend = base.CheckpointEngineRegistry.get("torchrelay")
    ours, theirs = backend.build_topology(len(actors), len(rollouts), metadata)
    for engines, keywords in ((actors, ours), (rollouts, theirs)):
        assert all(len(values) == len(engines) for values in keywords.values())
        for rank, engine in enumerate(engines):
            engine.init_process_group(**{name: values[rank] for name, values in keywords.items()})


def weights(value: float) -> Iterator[tuple[str, torch.Tensor]]:
    """As an actor yields them: each in the same memory."""
    memory = torch.empty(256)
    for name, shape in SHAPES.items():
        tensor = memory[: torch.Size(shape).numel()].view(shape)
        yield name, tensor.fill_(value).requires_grad_(False)


async def received(engine: Any, step: int) -> dict[str, torch.Tensor]:
    return {name: tensor async for name, tensor in engine.receive_weights(global_steps=step)}


def is_version(found: dict[str, torch.Tensor], value: float) -> bool:
    return {name: tuple(x.shape) for name, x in found.items()} == SHAPES and all(
        bool((tensor == value).all()) for tensor in found.values()
    )


def test_every_rollout_worker_gets_every_version() -> None:
    actors, rollouts = made(2, actors=True), made(3, actors=False)
    assert all(isinstance(engine, base.CheckpointEngine) for engine in [*actors, *rollouts])

    async def update(step: int) -> list[Any]:
        connect(actors, rollouts)
        pulls = [received(engine, step) for engine in rollouts]
        sends = [engine.send_weights(weights(step), global_steps=step) for engine in actors]
        found = await asyncio.gather(*pulls, *sends)
        for engine in [*actors, *rollouts]:
            engine.finalize()
        return found[: len(rollouts)]

    for step in (5, 5, 3):  # verl may send a step again, or go back
        found = asyncio.run(update(step))
        assert len(found) == 3 and all(is_version(one, step) for one in found)


@pytest.mark.timeout(240)
def test_the_manager_of_verl_moves_versions_between_ray_actors(tmp_path: Path) -> None:
    script = Path(__file__).with_name("verl_job.py")
    done = run_program(str(script), folder=tmp_path, seconds=200)
    assert done.code == 0, done.output
    line = next(one for one in done.output.splitlines() if one.startswith("FOUND "))
    wanted = [
        [
            step,
            "named_tensors",
            [[f"layers.{n}.weight", [16, 16], [10.0 * step + n]] for n in range(4)],
        ]
        for step in (1, 2)
    ]
    assert json.loads(line.removeprefix("FOUND ")) == [wanted, wanted]


def test_an_asynchronous_generator_is_taken_too() -> None:
    actors, rollouts = made(1, actors=True), made(1, actors=False)

    async def later() -> AsyncIterator[tuple[str, torch.Tensor]]:
        for pair in weights(2):
            await asyncio.sleep(0)
            yield pair

    async def update() -> Any:
        connect(actors, rollouts)
        await actors[0].send_weights(later(), global_steps=2)
        return await received(rollouts[0], 2)

    assert is_version(asyncio.run(update()), 2)


def test_an_actor_that_fails_midway_gives_no_tensor_to_anyone() -> None:
    actors, rollouts = made(1, actors=True), made(1, actors=False, seconds=2)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(weights(1))
        raise RuntimeError("out of memory")

    async def update() -> list[Any]:
        connect(actors, rollouts)
        send = actors[0].send_weights(broken(), global_steps=1)
        return await asyncio.gather(received(rollouts[0], 1), send, return_exceptions=True)

    begun = time.monotonic()
    got, sent = asyncio.run(update())
    assert isinstance(got, TransferTimeoutError) and isinstance(sent, RuntimeError)
    assert time.monotonic() - begun < 20

    async def again() -> Any:
        connect(actors, rollouts)
        await actors[0].send_weights(weights(2), global_steps=2)
        return await received(rollouts[0], 2)

    assert is_version(asyncio.run(again()), 2)


def test_calls_that_make_no_sense_are_refused() -> None:
    actors, rollouts = made(1, actors=True), made(1, actors=False)

    def twice() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1)
        yield "a", torch.ones(1)

    with pytest.raises(UsageError, match="prepare"):
        asyncio.run(actors[0].send_weights(weights(1)))
    with pytest.raises(UsageError, match="prepare"):
        asyncio.run(received(rollouts[0], 1))
    with pytest.raises(UsageError, match="one actor"):
        type(actors[0]).build_topology(1, 1, [{}, {}])
    connect(actors, rollouts)
    with pytest.raises(MismatchError, match="twice"):
        asyncio.run(actors[0].send_weights(twice()))
