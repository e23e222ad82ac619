"""No record, forged or honest, makes torchrelay write beyond the memory of a tensor.

Each case runs in a process of its own where such a write is fatal (`tests.support.guarded_memory`).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash

import torchrelay as tr
from tests.endpoint.liars import Between
from tests.support import flat, guarded_memory
from tests.support.forge import body_of, change, forged
from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return guarded_memory.environment(guarded_memory.build(tmp_path_factory.mktemp("guard")))


def guarded(
    environment: dict[str, str], *command: str, seconds: float = 100
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process that ends at a write out of bounds."""
    return subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def passes(environment: dict[str, str], case: Callable[..., None], *arguments: object) -> None:
    """A function of this module ends well in a guarded process."""
    code = "import sys; from tests.faults import test_out_of_bounds as cases; "
    code += "getattr(cases, sys.argv[1])(*sys.argv[2:])"
    done = guarded(environment, "-c", code, case.__name__, *map(str, arguments))
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"


def test_a_write_beyond_a_tensor_is_found(environment: dict[str, str]) -> None:
    """The check itself: one byte beyond the end."""
    code = "import ctypes, torch; from tests.support import guarded_memory; t = torch.empty(8); "
    code += "ctypes.memset(t.data_ptr(), 0, t.nbytes + 1); del t"
    assert guarded(environment, "-c", code).returncode < 0
    assert guarded(environment, "-c", code.replace(" + 1", "")).returncode == 0


# Forged: the tensor of a record is not as large as the leaf that it fills.


def state() -> dict[str, Any]:
    return {"c": torch.ones(2).cfloat(), "w": torch.randn(300, 3), "v": torch.arange(500.0)}


def resized(name: str, shape: list[int]) -> Callable[[Any], None]:
    """Say that a stored tensor, the only one of its kind, has another shape."""

    def forge(body: Any) -> None:
        number = body["kind_of"][list(state()).index(name)]
        body["image_kinds"][number][1] = shape

    return forge


SHAPES = {"c": [[3], [1], [40]], "v": [[501], [3000]], "w": [[300, 4], [100]]}


def load_resized(root: str) -> None:
    place = Path(root)
    with tr.Checkpointer(place) as checkpointer:
        checkpointer.save(1, state())
        whole = (place / "step-1" / "manifest.json").read_bytes()
        for name, shapes in SHAPES.items():
            for shape in shapes:
                (place / "step-1" / "manifest.json").write_bytes(whole)
                change(place / "step-1", resized(name, shape))
                _refused(lambda: checkpointer.load(step=1))
                _refused(lambda: checkpointer.load(state(), step=1))
                _refused(lambda n=name: checkpointer.load(step=1, include=n))


def pull_resized() -> None:
    """An endpoint that forges its record, and everything that has the record's digest."""
    with tr.serve(state(), step=1, timeout=60) as endpoint:
        tr.pull(endpoint.url, timeout=60)  # from here on the step is shown
        for name, shapes in SHAPES.items():
            for shape in shapes:
                with forging(endpoint.url, resized(name, shape)) as url:
                    for options in ({}, {"into": state()}, {"same_host": False}):
                        _refused(lambda u=url, o=options: flat.pull(u, timeout=60, **o))


@contextlib.contextmanager
def forging(url: str, forge: Callable[[Any], None]) -> Iterator[str]:
    record = urllib.request.urlopen(f"{url}/record?step=1", timeout=30).read()
    body = body_of(record)
    honest = content_digest(body)
    forge(body)
    false = content_digest(body)

    def alter(line: str, answer: bytes) -> bytes:
        return forged(body) if "/record" in line else answer

    with Between(url, alter, renamed=(honest, false)) as between:
        yield between.url


def content_digest(body: Any) -> bytes:
    """By this name an endpoint knows a step."""
    bare = {name: value for name, value in body.items() if name != "origin"}
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(bare)).encode()


def test_an_endpoint_whose_record_contradicts_itself(environment: dict[str, str]) -> None:
    passes(environment, pull_resized)


def _refused(load: Callable[[], object]) -> None:
    try:
        load()
    except (
        tr.errors.DamagedError,
        tr.errors.EndpointError,
        tr.errors.MismatchError,
        tr.errors.StepNotFoundError,
    ) as fault:
        assert "something else" not in str(fault), "the digest was not forged"
        return
    raise AssertionError("a record that contradicts itself was loaded")


def test_a_stored_tensor_of_another_size_than_its_leaf(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    passes(environment, load_resized, tmp_path)


# Honest: a part of what shares memory is loaded.


def load_parts_of_views(root: str) -> None:
    base = torch.arange(100_000.0)
    whole = {"some": base[:10], "all": base, "later": base[70:90], "odd": base[1::2]}
    with tr.Checkpointer(root) as checkpointer:
        checkpointer.save(1, whole)
        for name, value in whole.items():
            got = checkpointer.load(step=1, include=name).state
            assert list(got) == [name] and torch.equal(got[name], value)


def test_a_view_without_the_others_of_its_memory(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    passes(environment, load_parts_of_views, tmp_path)


# Live: parts of shared memory, by every kind of receive.


def shared_memory() -> dict[str, Any]:
    base = torch.arange(5_000.0)
    return {"some": base[:10], "all": base, "later": base[70:90], "odd": base[1::2]}


def receive_views(rank: int, group: Any) -> None:
    """All of them, and each alone, in new tensors and in place."""
    views = shared_memory()
    wanted = [None, *({name: torch.zeros_like(value)} for name, value in views.items())]
    with tr.Relay(group, timeout=30) as relay:
        for step, (into, source) in enumerate((i, s) for i in wanted for s in (0, [0])):
            if rank == 0:
                relay.send(views, to=[1], step=step)
                continue
            got = relay.recv(source, into=into, step=step, strict=False)
            for name in views if into is None else into:
                assert torch.equal(got.state[name], views[name])


def receive_in_ranks() -> None:
    run_ranks(receive_views, 2, timeout=80)


@pytest.mark.slow
def test_views_that_are_received_alone(environment: dict[str, str]) -> None:
    passes(environment, receive_in_ranks)


# Everything that forges, all of it.


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("folder", ["record", "faults", "endpoint", "dropin"])
def test_forged_input_of_every_kind(folder: str, environment: dict[str, str]) -> None:
    """The fuzz tests and the tests with hostile peers, with all their rounds."""
    words = "forged or fuzz or hostile or attack or mutat or flipped"
    command = ["-m", "pytest", "-p", "tests.support.guarded_memory", "-m", "", f"tests/{folder}"]
    command += ["-k", f"({words}) and not test_out_of_bounds", "--timeout", "1800"]
    done = guarded({**environment, "TEST_ROUNDS": "all"}, *command, seconds=3500)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
