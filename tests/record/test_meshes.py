"""Meshes of many ranks are recorded by strides, and say the same as their ranks one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

import torchrelay as tr
from torchrelay.record import manifest as m
from torchrelay.record.meshes import check_mesh, check_meshes, coordinate_of, mesh_of, ranks_of

SEED = 11


def test_any_mesh_is_as_its_ranks_say() -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    short = 0
    for _ in range(500):
        sizes = [rng.choice((1, 2, 3, 4)) for _ in range(rng.randint(1, 4))]
        ranks = np.arange(np.prod(sizes)).reshape(sizes) + rng.choice((0, 5))
        ranks = ranks.transpose(rng.sample(range(len(sizes)), len(sizes)))
        ranks = ranks[tuple(slice(rng.choice((None, 1))) for _ in sizes)]
        if rng.random() < 0.1:
            ranks = rng.sample(ranks.flatten().tolist(), ranks.size) @ np.eye(ranks.size)
            ranks = ranks.astype(int)
        mesh = mesh_of("cpu", ranks.shape, tuple(ranks.flatten().tolist()), None)
        check_mesh(mesh)
        short += bool(mesh.strides)
        assert ranks_of(mesh) == tuple(ranks.flatten().tolist())
        for rank in range(-2, int(ranks.max()) + 3):
            place = [tuple(at) for at in np.argwhere(ranks == rank).tolist()]
            assert coordinate_of(mesh, rank) == (place[0] if place else None)
    assert short > 50


def test_a_thousand_ranks_take_no_more_room_than_sixteen() -> None:
    few = mesh_of("cpu", (4, 4), tuple(range(16)), None)
    many = mesh_of("cpu", (32, 32), tuple(range(1024)), None)
    assert few.ranks == many.ranks == (0,) and many.strides == (32, 1)


@pytest.mark.parametrize(
    ("shape", "ranks", "strides"),
    [
        ((4, 4), (0,), (4,)),
        ((4, 4), (0, 1), (4, 1)),
        ((4, 4), (), (4, 1)),
        ((4, 4), (0,), (3, 1)),
        ((4, 4), (0,), (0, 1)),
        ((4, 4), (0,), (-4, 1)),
        ((4, 0), (0,), (4, 1)),
        ((4, 4), (0,), (1 << 40, 1)),
        ((1 << 40,), (0,), (1,)),
        ((4, 4), ((1 << 31) - 5,), (4, 1)),
    ],
)
def test_strides_that_give_no_ranks_are_refused(
    shape: tuple[int, ...], ranks: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    with pytest.raises(tr.errors.ManifestError):
        check_mesh(m.Mesh("cpu", shape, ranks, None, strides))


def test_ranks_that_nobody_has_are_not_made() -> None:
    large = m.Mesh("cpu", (1 << 30,), (0,), None, (1,))
    check_mesh(large)
    part = m.TensorLeaf("int8", (1,), None, 0)
    leaf = m.DTensorLeaf(part, large, (m.Placement("replicate"),), (1,), (1,), None)
    with pytest.raises(tr.errors.ManifestError, match="ranks, the cap"):
        check_meshes([leaf])
    for parts, context in (((leaf,), ()), ((), (leaf,))):
        inside = m.SubclassLeaf("x", (), parts, 0, context, (1,), (1,))
        with pytest.raises(tr.errors.ManifestError, match="ranks, the cap"):
            check_meshes([inside])
