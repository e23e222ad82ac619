"""What rests is kept in files of its own, and what does not is not."""

from __future__ import annotations

import random

import pytest
import xxhash

from torchrelay.shares import resting
from torchrelay.shares.layout import Entry, FileLayout, arrange
from torchrelay.shares.resting import Resting, unchanged

MIB = 1 << 20


def entry(name: str, nbytes: int, top: str | None = None) -> Entry:
    return Entry(name, "uint8", (nbytes,), (0,), (nbytes,), top)


def digests(content: bytes, chunk: int) -> bytes:
    cuts = range(0, len(content), chunk)
    return b"".join(xxhash.xxh3_128_digest(content[at : at + chunk]) for at in cuts)


def file_of(sizes: list[int], chunk: int) -> FileLayout:
    placed, end = [], 13  # a header
    for place, size in enumerate(sizes):
        if size:
            placed.append((end, place))
            end += size
    return FileLayout("a", b"", tuple(placed), end, chunk)


@pytest.mark.parametrize("seed", range(60))
def test_chunks_tell_which_entries_seem_not_to_have_changed(seed: int) -> None:
    rng = random.Random(seed)
    chunk = rng.choice([1, 4, 64])
    sizes = [rng.choice([0, 1, 3, 63, 64, 65, 200]) for _ in range(20)]
    file = file_of(sizes, chunk)
    before = rng.randbytes(file.nbytes)
    now = bytearray(before)
    for at in [13 + rng.randrange(len(now) - 13) for _ in range(rng.choice([0, 1, 5]))]:
        now[at] ^= 1
    differs = {at // chunk for at in range(len(now)) if before[at] != now[at]}
    touched = {n: set(range(at // chunk, -(-(at + sizes[n]) // chunk))) for at, n in file.placed}
    own = {n: {c for c in some if sum(c in one for one in touched.values()) == 1}
           for n, some in touched.items()}  # fmt: skip
    own = {n: {c for c in some if c * chunk >= 13} for n, some in own.items()}
    changed = {n for n in touched if differs & (own[n] or touched[n])}
    explained = set().union(*(touched[n] for n in changed))
    changed |= {n for n in touched if touched[n] & (differs - explained)}
    still = unchanged(file, sizes, digests(before, chunk), digests(bytes(now), chunk))
    assert set(still) == set(touched) - changed
    truly = {n for at, n in file.placed if before[at : at + sizes[n]] != now[at : at + sizes[n]]}
    assert bool(truly) == bool(changed)  # a change is noticed somewhere


def test_a_large_tensor_rests_beside_a_small_one_that_changes() -> None:
    file = file_of([1000, 3, 1000, 3, 1000], 64)
    before = bytes(file.nbytes)
    now = bytearray(before)
    for at, n in file.placed:
        if n % 2:
            now[at : at + 3] = b"abc"
    found = unchanged(file, [1000, 3, 1000, 3, 1000], digests(before, 64), digests(bytes(now), 64))
    assert found == [0, 2, 4]


def test_a_change_at_the_edge_of_a_large_tensor_is_noticed() -> None:
    file = file_of([1000, 1000], 64)
    at = file.placed[1][0]
    before, now = bytes(file.nbytes), bytearray(file.nbytes)
    now[at] = 1
    assert at % 64
    assert unchanged(file, [1000, 1000], digests(before, 64), digests(bytes(now), 64)) == []


def test_digests_of_another_file_say_nothing() -> None:
    assert unchanged(file_of([8], 4), [8], bytes(16), bytes(32)) == []


def files(found: Resting, entries: list[Entry]) -> list[list[str]]:
    return [[entries[n].name for n in file] for file in found.files(entries)]


def rest(found: Resting, entries: list[Entry], *names: str) -> None:
    """A save after which these are seen not to have changed."""
    layout = arrange(entries, alone=found.files(entries))
    places = [n for n, one in enumerate(entries) if one.name in names]
    apart = {n for file in found.files(entries) for n in file}
    for file in layout.files:
        if file.placed and file.placed[0][1] not in apart:
            there = {n for _, n in file.placed}
            found.rested(file, entries, [n for n in places if n in there])


def test_the_example_of_the_module() -> None:
    entries = [entry(name, 2 * MIB, "m") for name in "abcd"]
    found = Resting(None)
    rest(found, entries)
    assert files(found, entries) == []
    rest(found, entries, "a", "b")
    assert files(found, entries) == [["a", "b"]]
    found.changed([entries[1]])
    assert files(found, entries) == [["a"]]
    rest(found, entries, "b")  # it has to rest for longer now
    assert files(found, entries) == [["a"]]
    rest(found, entries, "b")
    assert sorted(name for file in files(found, entries) for name in file) == ["a", "b"]


def test_what_changes_now_and_then_waits_for_longer_each_time() -> None:
    entries = [entry(name, 2 * MIB, "m") for name in "ab"]
    found, waits = Resting(None), []
    for _ in range(5):
        wait = 0
        while not files(found, entries):
            rest(found, entries, "a")
            wait += 1
        waits.append(wait)
        found.changed([entries[0]])
    assert waits == [1, 2, 4, 8, 16]


def test_small_files_are_joined_and_few() -> None:
    entries = [entry(f"t{n}", 2 * MIB, "m") for n in range(200)]
    found = Resting(128 * MIB)
    for n in range(200):
        rest(found, entries, f"t{n}")
    made = files(found, entries)
    assert sorted(name for file in made for name in file) == sorted(one.name for one in entries)
    assert len(made) <= 8, [len(file) for file in made]
    assert all(len(file) * 2 <= 128 for file in made)


def test_little_is_left_where_it_is() -> None:
    entries = [entry("a", MIB - 1, "m"), entry("b", MIB, "m")]
    found = Resting(None)
    found.begin_with(entries[:1], entries)
    assert files(found, entries) == []


def test_groups_keep_their_files() -> None:
    entries = [entry("m.a", MIB, "m"), entry("o.a", MIB, "o"), entry("m.b", MIB, "m")]
    found = Resting(None)
    found.begin_with(entries[:2], entries)
    assert files(found, entries) == [["m.a"], ["o.a"]]
    names = [file.name for file in arrange(entries, alone=found.files(entries)).files]
    assert names == [
        "m-00001-of-00002.safetensors",
        "m-00002-of-00002.safetensors",
        "m.safetensors.index.json",
        "o.safetensors",
    ]


def test_tensors_without_elements_need_no_file() -> None:
    entries = [entry("m.a", MIB, "m"), entry("m.none", 0, "m")]
    found = Resting(None)
    found.begin_with(entries[:1], entries)
    assert files(found, entries) == [["m.a", "m.none"]]
    assert [one.name for one in arrange(entries, alone=found.files(entries)).files] == [
        "m.safetensors"
    ]


def test_a_save_without_news_changes_no_layout() -> None:
    """The layout of 20,000 tensors takes longer than all else that a save decides."""
    entries = [entry(name, 2 * MIB, "m") for name in "abc"]
    found = Resting(None)
    found.begin_with(entries[:1], entries)
    before = found.revision
    found.forget([])
    found.changed([])
    rest(found, entries)
    assert found.revision == before


def test_what_is_gone_from_the_state_is_left_out() -> None:
    entries = [entry(name, 2 * MIB, "m") for name in "abc"]
    found = Resting(None)
    found.begin_with(entries[:2], entries)
    assert files(found, entries[1:]) == [["b"]]
    assert files(found, [entry("a", 3 * MIB, "m"), *entries[1:]]) == [["b"]]


def test_least_bytes_are_those_of_the_docs() -> None:
    assert resting.LEAST_BYTES == MIB
