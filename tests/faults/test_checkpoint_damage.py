"""Bytes at rest that are not the ones that were written are found, named, and never loaded.

A damaged step is refused when it is asked for, and passed over with a warning when it is not. Files
that somebody forged get a typed error before anything is allocated for them, and nothing in them
runs.
"""

from __future__ import annotations

import base64
import io
import os
import pickle
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner

import torchrelay as tr
from tests.support.forge import (
    body_of,
    change,
    flip,
    forged,
    forged_bytes,
    kept,
    little_memory,
    packed,
)
from tests.support.rounds import rounds
from tests.support.saved import equal, state, which
from torchrelay.dcp import items as blobs
from torchrelay.planning.stored import images_in, stored_tensors
from torchrelay.record.encoding import decode_at_rest

SEED = 20261115


class Place(NamedTuple):
    """Steps 1 and 2 of the states of these seeds."""

    root: Path
    checkpointer: tr.Checkpointer

    def step(self, number: int) -> Path:
        return self.root / f"step-{number}"

    def files(self) -> list[Path]:
        return sorted(path for path in self.step(2).iterdir() if path.suffix == ".safetensors")


@pytest.fixture(scope="module")
def kept_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("damage") / "steps"
    with tr.Checkpointer(root, timeout=60) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
        yield Place(root, checkpointer)


@pytest.fixture
def place(kept_place: Place) -> Iterator[Place]:
    with kept(kept_place.step(2)):
        yield kept_place


def falls_back(place: Place) -> None:
    """`load` gives step 1 and says why."""
    said = "step 2 .* is damaged or gone, and is skipped"
    with pytest.warns(RuntimeWarning, match=said) as warned:
        loaded = place.checkpointer.load()
    # Others may be of what another test left to the collector.
    assert sum(bool(re.match(said, str(one.message))) for one in warned) == 1
    assert loaded.step == 1 and which(loaded.state, [1]) == 1
    assert [attempt.step for attempt in loaded.report.attempts] == [2]


def refused(place: Place, step: int = 2, *, fits: bool = True) -> tr.errors.DamagedError:
    """The step is refused by `load`, whole and into live weights, and by `verify`.

    `fits`: whether what it says to hold would fit the live weights.
    """
    with pytest.raises(tr.errors.DamagedError) as verified:
        place.checkpointer.verify(step)
    with pytest.raises(tr.errors.DamagedError) as loaded:
        place.checkpointer.load(step=step)
    live = state(77)
    with pytest.raises((tr.errors.DamagedError, tr.errors.MismatchError)) as landed:
        place.checkpointer.load(live, step=step)
    assert which(live, [77]) == 77, "live weights were touched"
    for fault in (verified.value, loaded.value, landed.value):
        if isinstance(fault, tr.errors.DamagedError):
            assert fault.step == step and fault.file == verified.value.file
    assert fits is isinstance(landed.value, tr.errors.DamagedError), landed.value
    return loaded.value


# One byte ----------------------------------------------------------------------------------------


def test_a_flipped_byte_anywhere_in_the_commit_record(place: Place) -> None:
    path = place.step(2) / "manifest.json"
    whole = path.read_bytes()
    rng = random.Random(SEED)
    print(f"seed {SEED}, {len(whole)} bytes")
    for offset in range(len(whole)):
        flip(path, offset, 1 << rng.randrange(8))
        with pytest.raises(tr.errors.DamagedError, match=r"manifest\.json") as fault:
            place.checkpointer.load(step=2)
        assert fault.value.file == str(path)
        with pytest.raises(tr.errors.DamagedError, match=r"manifest\.json"):
            place.checkpointer.verify()
        assert place.checkpointer.latest() == 1
        if offset % 16 == 0:
            falls_back(place)
        path.write_bytes(whole)


def test_a_flipped_byte_anywhere_in_a_data_file(place: Place) -> None:
    record = place.checkpointer.record(2)
    for index, file in enumerate(record.volumes):
        path = place.step(2) / file.name
        step = file.nbytes // rounds(file.nbytes, 3)
        for offset in range(0, file.nbytes, step):
            flip(path, offset, 1 << offset % 8)
            fault = refused(place)
            first = fault.offset
            assert fault.file == str(path) and first is not None
            assert first <= offset < first + file.chunk_bytes
            assert f"bytes {first} to {first + file.nbytes}" in str(fault)
            assert fault.path is not None
            hit = images_in(record, index, 0, file.nbytes)
            assert set(fault.path.split(", ")) == {stored_tensors(record)[n].name for n in hit}
            if offset % 32 == 0:
                falls_back(place)
            flip(path, offset, 1 << offset % 8)
    assert which(place.checkpointer.load().state, [2]) == 2


def test_the_leaf_that_is_named_is_the_one_that_was_hit(tmp_path: Path) -> None:
    """A file of many chunks: header, first byte, last byte, and some in every tensor."""
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    weights = {f"layer{n}": torch.randn(3000 + n) for n in range(20)}
    with tr.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": weights})
        record = checkpointer.record(1)
        (file,) = record.volumes
        path = tmp_path / "step-1" / file.name
        assert file.nbytes > 20 * file.chunk_bytes
        for tensor in stored_tensors(record):
            start = tensor.shards[0].start
            stop = start + weights[tensor.name.split(".")[1]].nbytes
            for offset in (start, rng.randrange(start, stop), stop - 1):
                flip(path, offset)
                with pytest.raises(tr.errors.DamagedError) as fault:
                    checkpointer.load(step=1)
                assert fault.value.path is not None and fault.value.offset is not None
                assert tensor.name in fault.value.path.split(", ")
                assert 0 <= offset - fault.value.offset < file.chunk_bytes
                assert len(fault.value.path.split(", ")) <= 3
                flip(path, offset)
        for offset in (0, 8, file.nbytes - 1):
            flip(path, offset)
            with pytest.raises(tr.errors.DamagedError, match=file.name):
                checkpointer.verify()
            flip(path, offset)
        assert checkpointer.verify() == 1


def test_everything_is_damaged(place: Place) -> None:
    """Nothing to fall back to: each step is told, and live weights are as they were."""
    live = state(77)
    with kept(place.step(1)):
        for step in (1, 2):
            flip(place.step(step) / "model.safetensors", 200)
        with pytest.warns(RuntimeWarning), pytest.raises(tr.errors.StepNotFoundError) as fault:
            place.checkpointer.load(live)
        assert "step 2: " in str(fault.value) and "step 1: " in str(fault.value)
        assert "model.safetensors" in str(fault.value)
        assert which(live, [77]) == 77
        with (
            pytest.warns(RuntimeWarning),
            pytest.raises(tr.errors.TornStateError, match="load again"),
        ):
            place.checkpointer.load(live, atomic=False)
        with pytest.warns(RuntimeWarning), pytest.raises(tr.errors.StepNotFoundError):
            place.checkpointer.load()


def test_not_atomic_is_repaired_by_the_step_before(place: Place) -> None:
    live = state(77)
    flip(
        place.step(2) / "optim.safetensors",
        -1 % (place.step(2) / "optim.safetensors").stat().st_size,
    )
    with pytest.warns(RuntimeWarning, match="step 2"):
        loaded = place.checkpointer.load(live, atomic=False)
    assert loaded.step == 1 and which(live, [1]) == 1


def test_a_part_that_is_whole_can_be_loaded(place: Place) -> None:
    """`only` reads no other file, so damage there does not matter."""
    flip(place.step(2) / "optim.safetensors", 120)
    loaded = place.checkpointer.load(step=2, include="model.*")
    assert equal(loaded.state["model"], state(2)["model"])


# Files -------------------------------------------------------------------------------------------


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def extended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


WAYS = [cut_short, emptied, extended, Path.unlink, directory, dangling]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", ["model.safetensors", "optim.safetensors", "0.safetensors"])
def test_a_data_file_that_is_not_as_it_was(place: Place, name: str, way: Any) -> None:
    path = place.step(2) / name
    way(path)
    fault = refused(place)
    assert fault.file == str(path) and fault.path
    falls_back(place)


@pytest.mark.parametrize("way", [cut_short, emptied, extended, directory], ids=lambda w: w.__name__)
def test_a_commit_record_that_is_not_as_it_was(place: Place, way: Any) -> None:
    path = place.step(2) / "manifest.json"
    way(path)
    assert refused(place).file == str(path)
    falls_back(place)


def test_no_commit_record_is_no_step(place: Place) -> None:
    (place.step(2) / "manifest.json").unlink()
    assert place.checkpointer.steps() == [1]
    assert place.checkpointer.load().step == 1
    with pytest.raises(tr.errors.StepNotFoundError, match="existing steps: 1"):
        place.checkpointer.load(step=2)


def test_files_of_one_step_are_not_those_of_another(place: Place) -> None:
    """Same names, same sizes: every file of step 1 in the place of that of step 2."""
    for file in (*place.files(), place.step(2) / "manifest.json"):
        spare = file.read_bytes()
        shutil.copy(place.step(1) / file.name, file)
        fault = refused(place)
        assert fault.file == str(file)
        if file.name == "manifest.json":
            assert "of step 1" in str(fault)
        falls_back(place)
        file.write_bytes(spare)
    one, other = place.files()[:2]
    spare = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(spare)
    refused(place)


def test_a_huge_commit_record_is_not_read(place: Place) -> None:
    os.truncate(place.step(2) / "manifest.json", 1 << 40)
    with little_memory(1 << 30):
        refused(place)
    falls_back(place)


def test_odd_names_beside_the_steps(place: Place) -> None:
    """Nothing but a plain `step-N` with a commit record is a step."""
    made = []
    names = ["step-", "step-x", "step-02", "step-2.tmp", "step--1", "step-1e3", "step-" + "9" * 30]
    for name in names:
        made.append(place.root / name)
        shutil.copytree(place.step(2), made[-1])
    made.append(place.root / "step-5")
    made[-1].write_bytes(b"a file")
    try:
        assert place.checkpointer.steps() == [1, 2]
        assert place.checkpointer.load().step == 2
        place.checkpointer._store.clean()
    finally:
        for path in made:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("step", [-1, 1 << 63, 1 << 70, 1.0, "1", None, True])
def test_steps_that_are_none(place: Place, step: Any) -> None:
    with pytest.raises(tr.errors.UsageError):
        place.checkpointer.save(step, state(1))
    if step is not None:
        with pytest.raises((tr.errors.UsageError, tr.errors.StepNotFoundError)):
            place.checkpointer.load(step=step)


# Forged records ----------------------------------------------------------------------------------

Body = Any
W = 0  # the image of model.w, a tensor of 8 by 5 floats, and its kind


def absurd(body: Body) -> None:
    """A tensor of a petabyte in a file that says it has that, in one chunk."""
    body["volumes"][0][1:3] = [1 << 50, 1 << 50]
    body["image_kinds"][W][:2] = ["uint8", [1 << 49]]
    for kind in body["kinds"]:
        if kind[:2] == ["float32", [8, 5]]:
            kind[:2] = ["uint8", [1 << 49]]


def some_gigabytes(body: Body) -> None:
    """Small enough for a kernel that promises memory it does not have."""
    absurd(body)
    text = msgspec.json.encode(body).replace(b"%d" % (1 << 49), b"%d" % (1 << 33))
    body.update(msgspec.json.decode(text))


def strides_of(*strides: int) -> Callable[[Body], None]:
    return put(list(strides), "image_kinds", W, 2)


def boxes_of(*boxes: Any) -> Callable[[Body], None]:
    """Other boxes of model.w: offsets, sizes, and how far each is moved in its file."""

    def forge(body: Body) -> None:
        kind = body["image_kinds"][W]
        assert kind == ["float32", [8, 5], None, 1, None, None]
        kind[3:] = [len(boxes), *([n for box in boxes for n in box[at]] for at in (0, 1))]
        first, *starts = body["starts"]
        volume, *volumes = body["volume_of"]
        body["starts"] = [first + move for *_, move in boxes] + starts
        body["volume_of"] = [volume] * len(boxes) + volumes

    return forge


def file_named(name: str) -> Callable[[Body], None]:
    return put(name, "volumes", 0, 0)


def put(value: Any, *path: Any) -> Callable[[Body], None]:
    def forge(body: Body) -> None:
        for part in path[:-1]:
            body = body[part]
        body[path[-1]] = value

    return forge


def changed(*path: Any, to: Callable[[list[int]], Any]) -> Callable[[Body], None]:
    """Other numbers in a column."""

    def forge(body: Body) -> None:
        for part in path[:-1]:
            body = body[part]
        body[path[-1]] = to(body[path[-1]])

    return forge


def deep(body: Body, depth: int = 200_000) -> bytes:
    """Lists in lists, where the tree stands."""
    body["outlines"][0]["tree"] = "HERE"
    tree = b'["s","list",[' * depth + b"0" + b"]]" * depth
    return forged_bytes(msgspec.json.encode(body).replace(b'"HERE"', tree))


def staircases(body: Body, steps: int = 1500, images: int = 40) -> None:
    """Boxes whose edges cut each image into millions of cells."""
    boxes = []
    for row in range(steps):
        boxes += [[[row, 0], [1, row + 1]], [[row, row + 1], [1, steps - row]]]
    for number in range(images):
        shape = [steps, steps + 1 + number]
        columns = ([n for box in boxes for n in box[at]] for at in (0, 1))
        body["kind_of"].append(len(body["image_kinds"]))
        body["image_kinds"].append(["uint8", shape, None, len(boxes), *columns])
        body["starts"] += [0] * len(boxes)
        body["volume_of"] += [0] * len(boxes)
    body["images"] += images
    body["volumes"][0][1:] = [1 << 12, 1 << 12, None, "A" * 21 + "Q=="]


def many_boxes(body: Body, count: int = 300_000) -> None:
    kind = body["image_kinds"][W]
    kind[3:] = [count + 1, [0, 0] * (count + 1), [8, 5] + [0, 0] * count]
    body["starts"][:1] *= count + 1
    body["volume_of"][:1] *= count + 1


def much(path: tuple[Any, ...], item: Any, count: int = 300_000) -> Callable[[Body], None]:
    def forge(body: Body) -> None:
        for part in path:
            body = body.setdefault(part, []) if isinstance(body, dict) else body[part]
        body.extend([item] * count)

    return forge


def odd_chunks(body: Body) -> None:
    """Each chunk has its digest, and none has whole elements."""
    nbytes = body["volumes"][0][1]
    digests = base64.b64encode(bytes(16 * -(-nbytes // 9))).decode()
    body["volumes"][0][2:] = [9, None, digests]


def own_of_many_ranks(body: Body) -> None:
    """Each of many ranks says that it has nothing of its own, of very many leaves."""
    outline = body["outlines"][0]
    count, first = 2_000, outline["leaves"]
    outline["tree"][2].append("more")
    outline["tree"][3].append(["l", "list", list(range(first, first + count))])
    outline["leaves"] += count
    outline["others"] += [["v", "plain", 1]] * count
    outline["others_at"] += range(first, first + count)
    body["ranks"] = [0] * count
    body["differences"] = [[rank, [], []] for rank in range(count)]


def own(*differences: Any) -> Callable[[Body], None]:
    return put(list(differences), "differences")


FORGED: dict[str, Callable[[Body], Any]] = {
    "a petabyte": absurd,
    "some gigabytes": some_gigabytes,
    "strides that reach far": strides_of(1 << 40, 1),
    "strides that overlap": strides_of(0, 0),
    "strides with holes": strides_of(10, 2),
    "a stride too many": strides_of(5, 1, 1),
    "negative strides": strides_of(-5, 1),
    "overlapping boxes": boxes_of([[0, 0], [5, 5], 0], [[3, 0], [3, 5], 0]),
    "the same box twice": boxes_of([[0, 0], [4, 5], 0], [[0, 0], [4, 5], 0]),
    "half of the boxes": boxes_of([[0, 0], [4, 5], 0]),
    "no boxes": boxes_of(),
    "a box out of its tensor": boxes_of([[1, 0], [8, 5], 0]),
    "a box at a negative offset": boxes_of([[-1, 0], [8, 5], 0]),
    "a box of negative size": boxes_of([[0, 0], [-8, -5], 0]),
    "a box before its file": boxes_of([[0, 0], [8, 5], -(1 << 20)]),
    "a box past its file": boxes_of([[0, 0], [8, 5], 1 << 20]),
    "elements at odd bytes": boxes_of([[0, 0], [8, 5], -1]),
    "chunks that cut elements": odd_chunks,
    "a box of other dimensions": boxes_of([[0], [40], 0]),
    "a file that is not there": put(9, "volume_of", 0),
    "file number -1": put(-1, "volume_of", 0),
    "a name above": file_named("../../../etc/passwd"),
    "an absolute name": file_named("/etc/passwd"),
    "a name below": file_named("a/b"),
    "two dots": file_named(".."),
    "no name": file_named(""),
    "a name with a zero": file_named("a\0b"),
    "a long name": file_named("a" * 300),
    "the commit record as data": file_named("manifest.json"),
    "two files of one name": lambda body: body["volumes"].append(body["volumes"][0]),
    "no chunks": put(0, "volumes", 0, 2),
    "chunks of one byte": put(1, "volumes", 0, 2),
    "uneven chunks": put([8, 16], "volumes", 0, 3),
    "a negative size": put(-5, "volumes", 0, 1),
    "a short digest": put("AAAA", "volumes", 0, 4),
    "no digest": put("", "volumes", 0, 4),
    "no ranks": put([], "ranks"),
    "a rank without outline": put([3], "ranks"),
    "no outlines": put([], "outlines"),
    "leaves of no rank": own([7, [], []]),
    "own leaves of no place": own([0, [[99, ["v", "plain", 1]]], []]),
    "own leaves of no image": own([0, [[0, ["t", "float32", [8, 5], None, 9]]], []]),
    "own leaves past their image": own([0, [[0, ["t", "float32", [9, 5], None, 0]]], []]),
    "own images of no row": own([0, [], [[99, 0]]]),
    "own images that are not there": own([0, [], [[0, 99]]]),
    "own images of another shape": own([0, [], [[0, 1]]]),
    "no such dtype": put("float7", "image_kinds", W, 0),
    "a shape with zero": put([0, 5], "image_kinds", W, 1),
    "a shape past 64 bits": put([1 << 62, 1 << 62], "image_kinds", W, 1),
    "a hundred dimensions": put([1] * 100, "image_kinds", W, 1),
    "an image that is not there": put([99, 1, 2, 3], "outlines", 0, "images"),
    "images of other shapes": put([1, 0, 2, 3], "outlines", 0, "images"),
    "a leaf past its tensor": put([1 << 20], "kinds", 0, 1),
    "an offset in a tensor": put([4, 0, 0, 0], "outlines", 0, "offsets"),
    "more images than there are": put(1 << 40, "images"),
    "fewer images than there are": put(1, "images"),
    "an object past its file": put([["b", "raw", 0, 0, 1 << 40]], "objects"),
    "an object of another kind": put([["b", "pickle", 0, 0, 1]], "objects"),
    "one name twice": put([[0, "x"], [1, "x"]], "names"),
    "a name of no image": put([[99, "x"]], "names"),
    "no version": lambda body: body.pop("version"),
    "no origin": lambda body: body.pop("origin"),
    "no step": lambda body: body.pop("step"),
    "a step of another kind": put("two", "step"),
    "a step past 64 bits": put(1 << 70, "step"),
    "another step": put(3, "step"),
    "a deep tree": deep,
    "many files": much(("volumes",), ["x", 1, 1, None, ""]),
    "many ranks": much(("ranks",), 0),
    "many boxes": many_boxes,
    "many names": much(("names",), [0, "nothing"]),
    "many objects": much(("objects",), ["b", "raw", 0, 0, 1 << 40]),
    "many cells": staircases,
    "many ranks of many leaves": own_of_many_ranks,
    "a list": lambda body: forged([1]),
    "a string": lambda body: forged("x"),
}


IN_COLUMNS: dict[str, Callable[[Body], Any]] = {
    "a long column": changed("starts", to=lambda old: packed(old)[:-4]),
    "a column of odd bytes": put("AAAA", "starts"),
    "a column that is not base64": put("A", "starts"),
    "a column of text": put(["8"], "starts"),
    "a box before its file": changed("starts", to=lambda old: packed([-8, *old[1:]])),
    "a box past its file": changed("starts", to=lambda old: packed([1 << 40, *old[1:]])),
    "a start that wraps": changed("starts", to=lambda old: [(1 << 63) - 8, *old[1:]]),
    "elements at odd bytes": changed("starts", to=lambda old: [at + 1 for at in old]),
    "a box too many": changed("starts", to=lambda old: [*old, 0]),
    "a box too few": changed("volume_of", to=lambda old: old[1:]),
    "a kind that is not there": changed("kind_of", to=lambda old: [99, *old[1:]]),
    "a kind before the first": changed("kind_of", to=lambda old: packed([-1, *old[1:]])),
    "an image too many": changed("kind_of", to=lambda old: [*old, 0]),
    "sizes whose sum wraps": boxes_of([[(1 << 63) - 4, 0], [8, 5], 0]),
    "more boxes than there are": put(1 << 40, "image_kinds", W, 3),
    "boxes past 63 bits": put(1 << 70, "image_kinds", W, 3),
    "fewer boxes than none": put(-1, "image_kinds", W, 3),
    "a box without its sizes": put([0, 0], "image_kinds", W, 4),
    "a scalar in many boxes": much(("image_kinds",), ["float32", [], None, 1 << 40, None, None], 1),
    "a kind of nothing": much(("image_kinds",), ["float32", [0], None, 1, None, None], 1),
    "a kind without boxes": much(("image_kinds",), ["float32", [4], None, 0, None, None], 1),
    "a kind of no dtype": much(("image_kinds",), ["float7", [1], None, 1, None, None], 1),
    "a kind past 63 bits": much(
        ("image_kinds",), ["int8", [1 << 61, 1 << 61], None, 1, None, None], 1
    ),
    "own leaves twice": own([0, [[0, ["z", []]], [0, ["z", []]]], []]),
    "own images twice": own([0, [], [[0, 0], [0, 0]]]),
    "one rank twice": own([0, [], []], [0, [], []]),
    "storages of images": put([0, 1, 2, 3], "storage_of"),
    "many kinds that overlap": much(
        ("image_kinds",), ["int8", [2], None, 2, [0, 1], [2, 1]], 100_000
    ),
    "many kinds out of shape": much(
        ("image_kinds",), ["int8", [3, 3], None, 1, [0, 0], [3, 4]], 100_000
    ),
}
MISFITS = ("a petabyte", "some gigabytes")
HARMLESS = ("many ranks", "many boxes", "many ranks of many leaves")  # odd, and true


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_record_is_refused(place: Place, name: str) -> None:
    path = place.step(2) / "manifest.json"
    body = body_of(path.read_bytes())
    assert forged(body) == path.read_bytes()
    assert stored_tensors(decode_at_rest(path.read_bytes()))[W].name == "model.w"
    result = FORGED[name](body)
    path.write_bytes(result if isinstance(result, bytes) else forged(body))
    begun = time.monotonic()
    with little_memory(2 << 30):
        if name in HARMLESS:
            with suppress(tr.errors.DamagedError):
                found: Any = place.checkpointer.load(step=2).state
                found.pop("more", None)
                assert which(found, [2]) == 2
        else:
            refused(place, fits=name not in MISFITS)
            falls_back(place)
    assert time.monotonic() - begun < 10


@pytest.mark.slow
def test_records_with_forged_columns_are_refused(place: Place) -> None:
    path = place.step(2) / "manifest.json"
    whole = path.read_bytes()
    for name, forge in IN_COLUMNS.items():
        body = body_of(whole)
        forge(body)
        begun = time.monotonic()
        with little_memory(2 << 30), pytest.raises(tr.errors.ManifestError):
            decode_at_rest(forged(body))
            pytest.fail(name)
        assert time.monotonic() - begun < 10, name
    path.write_bytes(forged(body))
    refused(place)
    falls_back(place)


# Forged at random --------------------------------------------------------------------------------

NUMBERS = [0, 1, -1, 2, 7, 8, 16, 255, 4096, 1 << 20, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1]
NUMBERS += [-(1 << 63), 1 << 64, 1 << 70, 0.5, True, None]
TEXTS = ["", "model.w", "float32", "float64", "int8", "complex64", "dict", "list", "tuple", "raw"]
TEXTS += ["state", "t", "v", "d", "s", "a", "q", "z", "plain", "device", "../x", "a/b", "0", "AAAA"]
MUTANTS = 2500


def rich_state() -> dict[str, Any]:
    """Leaves of many kinds, small."""
    base = torch.arange(24.0)
    return {
        "model": {"w": torch.randn(4, 3), "t": torch.randn(3, 4).t(), "c": torch.ones(2).cfloat()},
        "views": [base[2:8], base.view(4, 6)[1], base[::2]],
        "optim": {0: {"step": torch.tensor(1.0)}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "array": np.arange(6, dtype=">f4").reshape(2, 3),
        "sparse": torch.eye(3).to_sparse(),
        "values": [None, True, 1 << 70, 0.5, 1j, "text", b"bytes", torch.float16],
    }


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, (list, dict)):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from places(value[key], (*path, key))


def mutate(rng: random.Random, body: Any) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        paths = [path for path in places(body) if path]
        *above, last = rng.choice(paths)
        parent = body
        for part in above:
            parent = parent[part]
        old = parent[last]
        kind = rng.randrange(6)
        if kind == 0 and isinstance(parent, list):
            parent.insert(last, rng.choice([*NUMBERS, *TEXTS, [], {}]))
        elif kind == 1:
            del parent[last]
        elif kind == 2 and isinstance(old, list) and old:
            rng.shuffle(old)
        elif kind == 3:
            source = body
            for part in rng.choice(paths):
                if not isinstance(source, (list, dict)) or part not in (
                    source if isinstance(source, dict) else range(len(source))
                ):
                    break
                source = source[part]
            parent[last] = msgspec.json.decode(msgspec.json.encode(source))
        elif isinstance(old, int):
            near = [old + 1, old - 1, old * 2, -old]
            parent[last] = rng.choice(near if rng.random() < 0.6 else NUMBERS)
        elif isinstance(old, str):
            parent[last] = rng.choice(TEXTS)
        else:
            parent[last] = rng.choice([*NUMBERS, *TEXTS, [], [[]], {}])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_records_forged_at_random(tmp_path: Path) -> None:
    """A record is refused as a manifest; or it is a possible one, and then the data decides."""
    print(f"seed {SEED}")
    counts = {"refused": 0, "damaged": 0, "loaded": 0, "other": 0}
    with tr.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, rich_state())
        path = tmp_path / "step-1" / "manifest.json"
        whole = path.read_bytes()
        for index in range(rounds(MUTANTS)):
            rng = random.Random(SEED * MUTANTS + index)
            body = body_of(whole)
            mutate(rng, body)
            data = forged(body)
            try:
                decode_at_rest(data)
            except tr.errors.ManifestError:
                counts["refused"] += 1
                continue
            except Exception as fault:
                pytest.fail(f"seed {SEED}, mutant {index}: decode: {fault!r}")
            path.write_bytes(data)
            acts: dict[str, Callable[[], object]] = {
                "new": lambda: checkpointer.load(step=1),
                "in place": lambda: checkpointer.load(rich_state(), step=1),
                "as bytes come": lambda: checkpointer.load(rich_state(), step=1, atomic=False),
                "a view": lambda: checkpointer.load(step=1, include="views.0"),
                "verified": lambda: checkpointer.verify(1),
            }
            with little_memory(1 << 30):
                for name, act in acts.items():
                    try:
                        act()
                        counts["loaded"] += 1
                    except (tr.errors.DamagedError, tr.errors.TornStateError):
                        counts["damaged"] += 1
                    except (tr.errors.UnsupportedLeafError, tr.errors.MismatchError):
                        counts["other"] += 1  # odd, or not what the destination is
                    except Exception as fault:
                        pytest.fail(f"seed {SEED}, mutant {index}, {name}: {fault!r}")
        path.write_bytes(whole)
        checkpointer.load(step=1)
    print(counts)
    assert counts["refused"] > rounds(MUTANTS) // 3
    assert counts["damaged"] + counts["loaded"] > rounds(50)


# Nothing runs ------------------------------------------------------------------------------------


class Payload:
    """Unpickling it touches a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def payloads(canary: Path) -> dict[str, bytes]:
    archive = io.BytesIO()
    torch.save({"w": Payload(canary)}, archive)
    legacy = io.BytesIO()
    torch.save({"w": Payload(canary)}, legacy, _use_new_zipfile_serialization=False)
    plain = pickle.dumps(Payload(canary))
    return {"plain": plain, "archive": archive.getvalue(), "legacy": legacy.getvalue()}


def test_the_payloads_work(tmp_path: Path) -> None:
    for data in payloads(tmp_path / "canary").values():
        with suppress(Exception):
            torch.load(io.BytesIO(data), weights_only=False)
        with suppress(Exception):
            pickle.loads(data)
        assert (tmp_path / "canary").exists()
        (tmp_path / "canary").unlink()


@pytest.mark.parametrize("kind", ["plain", "archive", "legacy"])
def test_nothing_in_any_file_runs(place: Place, tmp_path: Path, kind: str) -> None:
    """A payload in the place of each file, beside them, and as a step of its own."""
    canary = tmp_path / "canary"
    data = payloads(canary)[kind]
    for file in (*place.files(), place.step(2) / "manifest.json"):
        spare = file.read_bytes()
        for bad in (data, (data * (len(spare) // len(data) + 1))[: len(spare)]):
            file.write_bytes(bad)
            refused(place)
            falls_back(place)
        file.write_bytes(spare)
    extra = [".metadata", "data.pkl", "model.pt", "pytorch_model.bin", "__0_0.distcp", "x.py"]
    for name in extra:
        (place.step(2) / name).write_bytes(data)
        (place.root / name).write_bytes(data)
    (place.root / "step-9").mkdir()
    (place.root / "step-9" / "manifest.json").write_bytes(data)
    try:
        with pytest.warns(RuntimeWarning, match="step 9"):
            assert place.checkpointer.load().step == 2
        assert place.checkpointer.verify(2) == 2
        with tr.Checkpointer(place.root) as other:
            assert other.latest() == 2
    finally:
        shutil.rmtree(place.root / "step-9")
        for name in extra:
            (place.root / name).unlink()
    assert not canary.exists()


@pytest.mark.parametrize("kind", ["plain", "archive", "legacy"])
def test_nothing_in_a_blob_runs(tmp_path: Path, kind: str) -> None:
    """Bytes of a planner's making: a forged record says that a payload is one."""
    canary = tmp_path / "canary"
    data = payloads(canary)[kind]
    root = tmp_path / "steps"
    with tr.Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"model": {"w": torch.frombuffer(bytearray(data), dtype=torch.uint8)}})
        (stored,) = stored_tensors(checkpointer.record(1))
        start = stored.shards[0].start
        for said in ("state", "raw"):
            blob = ["model.x", said, 0, start, len(data)]
            change(root / "step-1", put([blob], "objects"))
            with suppress(tr.errors.RelayError):
                checkpointer.load(step=1)
            with suppress(tr.errors.RelayError):
                checkpointer.load({"model": {"w": torch.zeros(len(data), dtype=torch.uint8)}})
            checkpointer.verify(1)
    for said in ("state", "raw"):
        with pytest.raises(tr.errors.RelayError):
            blobs.give(said, data, DefaultLoadPlanner(), "model.x").read()
    with suppress(tr.errors.UnsupportedLeafError):
        assert blobs.keep("model.x", io.BytesIO(data))[0] == "raw"
    assert not canary.exists()


def test_an_object_that_takes_pickle_is_not_saved(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path / "steps") as checkpointer:
        with pytest.raises(tr.errors.UnsupportedLeafError) as fault:
            checkpointer.save(1, {"x": Payload(tmp_path / "canary")})
        assert fault.value.path and "x" in fault.value.path
        assert checkpointer.steps() == []
    assert not any((tmp_path / "steps").iterdir()) if (tmp_path / "steps").exists() else True
    assert not (tmp_path / "canary").exists()
