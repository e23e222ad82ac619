"""What every store promises, whatever it is made of. A new store is a new line in `PLACES`."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from torchrelay.stores.draft import Sink
from torchrelay.stores.step_files import DataReader
from torchrelay.stores.store import Store


def open_store(kind: str, where: str, grace: float = 0) -> Store:
    """`grace`: where no one sees whether a writer is alive, the age at which its draft is taken for
    left behind."""
    if kind == "local":
        from torchrelay.stores.local.store import LocalStore

        return LocalStore(where)
    pytest.importorskip("obstore")
    from torchrelay.stores.objects.store import ObjectStore

    return ObjectStore(where, grace=grace, timeout=60)


PLACES: dict[str, Callable[[pytest.FixtureRequest], str]] = {
    "local": lambda request: str(request.getfixturevalue("tmp_path") / "checkpoints"),
    "s3": lambda request: str(request.getfixturevalue("s3").url("check/points")),
    "memory": lambda request: "memory://",
}


class Place(NamedTuple):
    kind: str
    where: str
    store: Store


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    where = PLACES[request.param](request)
    return Place(request.param, where, open_store(request.param, where))


@pytest.fixture
def store(place: Place) -> Store:
    return place.store


def write(sink: Sink, content: bytes, piece: int = 1000) -> None:
    for start in range(0, len(content), piece):
        part = content[start : start + piece]
        sink.write(start, memoryview(bytearray(part)) if start else part)
    sink.finish()


def save(
    store: Store, step: int, files: dict[str, bytes], token: str = "host-1-a", **options: bool
) -> None:
    draft = store.draft(step, token, **options)
    draft.begin()
    for name, content in files.items():
        write(draft.open(name, len(content)), content)
    draft.commit(manifest(token))


def manifest(token: str) -> bytes:
    return b'{"of":"%b"}' % token.encode()


def read(store: Store, step: int, name: str) -> bytes:
    reader = store.open(step).reader(name)
    target = bytearray(reader.nbytes)
    reader.read_into(0, memoryview(target))
    return bytes(target)


def contents(store: Store, step: int) -> dict[str, bytes]:
    """All of a step, after a check that it is a whole one."""
    sizes = store.open(step).sizes()
    files = {name: read(store, step, name) for name in sizes}
    assert sizes == {name: len(content) for name, content in files.items()}
    return files


def test_an_empty_store_has_nothing(store: Store) -> None:
    assert store.steps() == []
    assert store.clean() == []
    for act in (
        lambda: store.open(7).manifest(),
        lambda: store.open(7).sizes(),
        lambda: store.open(7).reader("a.safetensors"),
        lambda: store.delete(7),
    ):
        with pytest.raises(FileNotFoundError, match="step-7"):
            act()


def test_free_bytes_is_a_number_or_unknown(store: Store) -> None:
    free = store.free_bytes()
    assert free is None or free > 0


def test_round_trip(store: Store) -> None:
    files = {
        "model.safetensors": random.Random(0).randbytes(12_345),
        "0.rank-00001-of-00002.safetensors": b"x" * 1000,
        "empty.safetensors": b"",
    }
    save(store, 3, files)
    assert store.steps() == [3]
    assert store.open(3).manifest() == manifest("host-1-a")
    assert contents(store, 3) == files


@pytest.mark.parametrize("manifest", [b"{}", b'{"a":' + bytes(range(256)) * 40 + b"}"])
def test_a_manifest_is_kept_byte_for_byte(store: Store, manifest: bytes) -> None:
    draft = store.draft(0, "host-1-a")
    draft.begin()
    draft.commit(manifest)
    assert store.open(0).manifest() == manifest
    assert store.open(0).sizes() == {}


def test_steps_are_in_numerical_order(store: Store) -> None:
    for step in (10, 2, 9, 100):
        save(store, step, {"a.safetensors": b"a"}, token=f"host-{step}-a")
    assert store.steps() == [2, 9, 10, 100]


def test_a_draft_is_no_step_until_it_is_committed(store: Store) -> None:
    draft = store.draft(5, "host-1-a")
    draft.begin()
    write(draft.open("a.safetensors", 4), b"abcd")
    assert store.steps() == []
    for act in (lambda: store.open(5).manifest(), lambda: store.open(5).reader("a.safetensors")):
        with pytest.raises(FileNotFoundError):
            act()
    draft.commit(manifest("m"))
    assert store.steps() == [5]
    assert contents(store, 5) == {"a.safetensors": b"abcd"}


def test_every_process_adds_its_files_to_one_draft(store: Store) -> None:
    first, second = (store.draft(1, "host-1-a") for _ in range(2))
    first.begin()
    write(second.open("b.safetensors", 2), b"bb")
    write(first.open("a.safetensors", 1), b"a")
    first.commit(manifest("m"))
    assert contents(store, 1) == {"a.safetensors": b"a", "b.safetensors": b"bb"}


def test_unordered_sinks_take_any_order(store: Store) -> None:
    content = random.Random(1).randbytes(10_000)
    draft = store.draft(1, "host-1-a")
    draft.begin()
    sink = draft.open("a.safetensors", len(content))
    if sink.ordered:
        pytest.skip("no such case: its writes come in order")
    for start in (5000, 0, 7500, 2500):
        sink.write(start, content[start : start + 2500])
    sink.finish()
    draft.commit(manifest("m"))
    assert read(store, 1, "a.safetensors") == content


def test_ranges_fill_views(store: Store) -> None:
    content = random.Random(2).randbytes(5000)
    save(store, 1, {"a.safetensors": content})
    reader = store.open(1).reader("a.safetensors")
    assert reader.nbytes == 5000
    target = bytearray(b"-" * 300)
    view = memoryview(target)
    reader.read_into(1234, view[:200])
    assert target == content[1234:1434] + b"-" * 100
    reader.read_into(5000, view[:0])
    reader.read_into(4999, view[:1])
    assert target[:1] == content[-1:]


@pytest.mark.parametrize(("position", "nbytes"), [(4999, 2), (5000, 1), (9000, 1), (0, 5001)])
def test_reading_past_the_end_is_an_error(store: Store, position: int, nbytes: int) -> None:
    save(store, 1, {"a.safetensors": b"x" * 5000})
    reader = store.open(1).reader("a.safetensors")
    with pytest.raises(EOFError, match=r"a\.safetensors"):
        reader.read_into(position, memoryview(bytearray(nbytes)))


def test_threads_share_a_reader(store: Store) -> None:
    content = random.Random(3).randbytes(200_000)
    save(store, 1, {"a.safetensors": content})
    reader = store.open(1).reader("a.safetensors")

    def check(seed: int) -> bool:
        start = random.Random(seed).randrange(len(content) - 5000)
        target = bytearray(5000)
        reader.read_into(start, memoryview(target))
        return target == content[start : start + 5000]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(40)))


def test_a_missing_file_of_a_step_is_named(store: Store) -> None:
    save(store, 1, {"a.safetensors": b"a"})
    with pytest.raises(FileNotFoundError, match=r"step-1.*b\.safetensors"):
        store.open(1).reader("b.safetensors")


def test_a_committed_step_is_not_begun_again(store: Store) -> None:
    save(store, 1, {"a.safetensors": b"old"})
    with pytest.raises(FileExistsError, match="step-1"):
        store.draft(1, "host-2-b").begin()
    assert contents(store, 1) == {"a.safetensors": b"old"}


def test_the_second_of_two_writers_does_not_commit(store: Store) -> None:
    drafts = {content: store.draft(1, f"host-1-{content.hex()}") for content in (b"1", b"2")}
    for content, draft in drafts.items():
        draft.begin()
        write(draft.open("a.safetensors", 1), content)
    drafts[b"2"].commit(manifest("m2"))
    with pytest.raises(FileExistsError, match="step-1"):
        drafts[b"1"].commit(manifest("m1"))
    drafts[b"1"].discard()
    assert store.open(1).manifest() == manifest("m2")
    assert contents(store, 1) == {"a.safetensors": b"2"}


def test_overwrite_replaces_the_whole_step(store: Store) -> None:
    save(store, 1, {"a.safetensors": b"old", "gone.safetensors": b"old"})
    save(store, 1, {"a.safetensors": b"newer"}, token="host-2-b", overwrite=True)
    assert store.steps() == [1]
    assert store.open(1).manifest() == manifest("host-2-b")
    assert contents(store, 1) == {"a.safetensors": b"newer"}
    assert store.clean() == []


def test_overwrite_needs_no_older_step(store: Store) -> None:
    save(store, 1, {"a.safetensors": b"a"}, overwrite=True)
    assert contents(store, 1) == {"a.safetensors": b"a"}


def test_a_discarded_overwrite_leaves_the_step(store: Store) -> None:
    save(store, 1, {"a.safetensors": b"old"})
    draft = store.draft(1, "host-2-b", overwrite=True)
    draft.begin()
    write(draft.open("a.safetensors", 3), b"new")
    assert contents(store, 1) == {"a.safetensors": b"old"}
    draft.discard()
    assert store.open(1).manifest() == manifest("host-1-a")
    assert contents(store, 1) == {"a.safetensors": b"old"}


def test_a_discarded_draft_leaves_nothing(store: Store) -> None:
    draft = store.draft(1, "host-1-a")
    draft.begin()
    write(draft.open("a.safetensors", 1), b"a")
    half = draft.open("b.safetensors", 2)
    half.write(0, b"b")
    half.abort()
    half.abort()
    draft.discard()
    draft.discard()
    assert (store.steps(), store.clean()) == ([], [])
    save(store, 1, {"a.safetensors": b"again"})
    assert contents(store, 1) == {"a.safetensors": b"again"}


def test_discard_is_safe_at_any_time(store: Store) -> None:
    store.draft(1, "host-1-a").discard()
    draft = store.draft(1, "host-1-b")
    draft.begin()
    write(draft.open("a.safetensors", 1), b"a")
    draft.commit(manifest("m"))
    draft.discard()
    assert contents(store, 1) == {"a.safetensors": b"a"}


def test_a_file_that_ends_early_does_not_finish(store: Store) -> None:
    draft = store.draft(1, "host-1-a")
    draft.begin()
    sink = draft.open("a.safetensors", 10)
    sink.write(0, b"12345")
    with pytest.raises(OSError, match=r"a\.safetensors"):
        sink.finish()
    sink.abort()
    draft.discard()
    assert store.steps() == []


def test_delete(store: Store) -> None:
    save(store, 1, {"a.safetensors": b"1"})
    save(store, 2, {"a.safetensors": b"2"}, token="host-1-b")
    store.delete(1)
    assert store.steps() == [2]
    with pytest.raises(FileNotFoundError):
        store.open(1).reader("a.safetensors")
    assert contents(store, 2) == {"a.safetensors": b"2"}
    assert store.clean() == []
    save(store, 1, {"b.safetensors": b"again"}, token="host-1-c")
    assert contents(store, 1) == {"b.safetensors": b"again"}


def test_clean_spares_steps_and_live_drafts(place: Place) -> None:
    store = open_store(place.kind, place.where, grace=60)
    save(store, 1, {"a.safetensors": b"1"})
    draft = store.draft(2, "host-1-b")
    draft.begin()
    write(draft.open("a.safetensors", 1), b"2")
    assert store.clean() == []
    draft.commit(manifest("m"))
    assert store.steps() == [1, 2]
    assert contents(store, 2) == {"a.safetensors": b"2"}


DYING_WRITER = """
import os, sys
from tests.stores.test_conformance import open_store
from torchrelay.stores.tokens import new_token
draft = open_store(*sys.argv[1:]).draft(2, new_token())
draft.begin()
sink = draft.open("a.safetensors", 4)
sink.write(0, b"abcd")
sink.finish()
print("written", flush=True)
os._exit(9)
"""


def test_clean_removes_what_a_dead_writer_left(place: Place) -> None:
    if place.kind == "memory":
        pytest.skip("no such case: no other process reaches it")
    save(place.store, 1, {"a.safetensors": b"1"})
    child = subprocess.run(
        [sys.executable, "-c", DYING_WRITER, place.kind, place.where],
        cwd=Path(__file__).resolve().parents[2],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (child.returncode, child.stdout) == (9, "written\n"), child.stderr
    assert place.store.steps() == [1]
    (removed,) = place.store.clean()
    assert "step-2" in removed
    assert place.store.clean() == []
    assert place.store.steps() == [1]
    assert contents(place.store, 1) == {"a.safetensors": b"1"}


def nothing_differs(reader: DataReader) -> bool:
    return True


def test_a_draft_that_was_left_is_continued(place: Place) -> None:
    """`left` is another process's, as on the next start of a job."""
    store = place.store
    left = store.draft(5, "copy-0-abc")
    left.begin()
    write(left.open("a.safetensors", 3), b"abc")
    left.leave()
    other = place.store if place.kind == "memory" else open_store(place.kind, place.where)
    draft = other.draft(5, "copy-0-abc")
    draft.begin()
    assert not draft.has("b.safetensors", 2, nothing_differs)
    assert not draft.has("a.safetensors", 4, nothing_differs)
    if place.kind == "local":  # what has another size is gone
        write(draft.open("a.safetensors", 3), b"abc")
    assert place.kind == "local" or draft.has("a.safetensors", 3, nothing_differs)
    write(draft.open("b.safetensors", 2), b"xy")
    assert draft.sizes() == {"a.safetensors": 3, "b.safetensors": 2}
    draft.commit(manifest("copy-0-abc"))
    assert contents(store, 5) == {"a.safetensors": b"abc", "b.safetensors": b"xy"}


def test_a_draft_that_was_left_stays_for_a_day(place: Place) -> None:
    if place.kind == "memory":
        pytest.skip("no such case: a store in memory is the only one that has it")
    store = open_store(place.kind, place.where, grace=86400)
    left = store.draft(5, "copy-0-abc")
    left.begin()
    write(left.open("a.safetensors", 3), b"abc")
    left.leave()
    assert store.clean() == [] and store.steps() == []
    if place.kind == "local":
        (path,) = Path(place.where).iterdir()
        os.utime(path, (0, 0))
    assert len(open_store(place.kind, place.where, grace=0).clean()) == 1
    assert store.draft(5, "copy-0-abc").sizes() == {} if place.kind == "s3" else True
