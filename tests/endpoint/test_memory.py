"""States that are larger than the memory of who pulls, and records that announce such states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.endpoint.liars import Between
from tests.support import flat
from tests.support.forge import body_of, forged
from torchrelay.endpoint.reshare import seed
from torchrelay.memory import free
from torchrelay.memory.arena import Arena
from torchrelay.record.encoding import content_digest, decode_at_rest
from torchrelay.sources.connection import Host

MIB = 1 << 20
TIMEOUT = 30
STATE = {"w": torch.arange(MIB).float()}  # of 4 MiB


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 MiB are free, and all blocks of a MiB are checked."""
    monkeypatch.setattr(free, "CHECKED_BYTES", MIB)
    monkeypatch.setattr(free, "free_bytes", lambda: 3 * MIB)


@contextmanager
def published(state: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server of a state, which had memory enough to copy it."""
    with monkeypatch.context() as patch:
        patch.setattr(free, "free_bytes", lambda: None)
        made = tr.serve(state, step=1, no_dist=True, timeout=TIMEOUT)
    with made:
        yield made.url


@pytest.mark.parametrize("options", [{"reshare": True}, {}, {"into": "w"}])
def test_a_state_that_does_not_fit_is_refused_with_figures(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    into = {"w": torch.zeros(MIB)}
    with published(STATE, monkeypatch) as url:
        given = {key: into if key == "into" else value for key, value in options.items()}
        with pytest.raises(tr.errors.MismatchError, match=r"4[12]\d{5} .*3145728 are free"):
            flat.pull(url, no_dist=True, timeout=TIMEOUT, same_host=False, **given)
        assert not into["w"].any()


def test_a_subscription_that_does_not_fit_is_refused_with_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    into = {"w": torch.zeros(MIB)}
    with published(STATE, monkeypatch) as url:
        made = tr.subscribe(url, into=into, no_dist=True, same_host=False, timeout=TIMEOUT)
        with made, pytest.raises(tr.errors.MismatchError, match="3145728 are free"):
            made.update()
        assert not into["w"].any()


def test_a_checkpoint_that_does_not_fit_is_refused_with_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tr.Checkpointer(tmp_path, no_dist=True, timeout=TIMEOUT) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(free, "free_bytes", lambda: None)
            checkpointer.save(1, STATE)
        with pytest.raises(tr.errors.MismatchError, match="3145728 are free"):
            checkpointer.load()


def test_a_copy_that_does_not_fit_is_refused_with_figures(tmp_path: Path) -> None:
    with pytest.raises(tr.errors.EndpointError, match="3145728 are free"):
        tr.serve(STATE, step=1, no_dist=True, timeout=TIMEOUT)
    with tr.Checkpointer(tmp_path, no_dist=True, timeout=TIMEOUT) as checkpointer:
        with pytest.raises(tr.errors.CheckpointError, match=r"3145728 are free.*memory_budget="):
            checkpointer.save_async(1, STATE)
        checkpointer.save(1, STATE)


@pytest.mark.parametrize("nbytes", [1 << 44, 1 << 40, 64 * MIB])
@pytest.mark.parametrize("options", [{"reshare": True}, {}, {"into": "w"}])
def test_a_record_that_announces_much_takes_no_memory(
    nbytes: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume of one chunk, which is as large as the record likes."""
    with published({"w": torch.zeros(5)}, monkeypatch) as url:
        asking = Host(url)
        true = asking.get("/record", seconds=TIMEOUT).body
        asking.close()
        false = announced(true, nbytes)
        before, after = (content_digest(decode_at_rest(one)).encode() for one in (true, false))

        def alter(line: str, body: bytes) -> bytes:
            return false if "/record" in line else body.replace(before, after)

        with Between(url, alter, renamed=(before, after)) as between:
            into = {"w": torch.zeros(nbytes // 4 if nbytes < 1 << 30 else 5)}
            given = {key: into if key == "into" else value for key, value in options.items()}
            with pytest.raises(tr.errors.MismatchError, match=r"are free|shape"):
                flat.pull(between.url, no_dist=True, timeout=TIMEOUT, same_host=False, **given)


def announced(record: bytes, nbytes: int) -> bytes:
    """A record whose volume has as many bytes, in one chunk, and whose tensor fills it."""
    body = body_of(record)
    body["kinds"][0][1] = body["image_kinds"][0][1] = [nbytes // 4]
    volume = body["volumes"][0]
    volume[1] = volume[2] = nbytes + body["starts"][0]
    return forged(body)


def test_a_seed_takes_memory_as_bytes_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed, "STEP_BYTES", MIB)
    arena = Arena(32 * MIB, populate=False)
    taken: list[tuple[int, int]] = []
    monkeypatch.setattr(arena, "reserve", lambda start, nbytes: taken.append((start, nbytes)))
    memory = memoryview(bytearray(20 * MIB))
    space = seed.ArrivingBytes(arena, 4 * MIB, memory)
    assert not taken
    space.reach(0)
    assert taken == [(4 * MIB, MIB)]
    space.reach(10)
    space.reach(MIB)
    assert taken[1:] == [(5 * MIB, MIB)]
    space.reach(20 * MIB)
    assert sum(nbytes for _, nbytes in taken) == 20 * MIB
    space.reach(20 * MIB)
    assert sum(nbytes for _, nbytes in taken) == 20 * MIB
    arena.close()
