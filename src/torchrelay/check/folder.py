"""Probes of a folder that steps are saved to: it is the same for all ranks, renames are atomic,
writes are durable, and listings are current."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrelay import system
from torchrelay.check.ranks import Ranks
from torchrelay.check.report import Finding, Verdict
from torchrelay.files import exists

AREA = "folder"
NBYTES = 128 << 20
VISIBLE_SECONDS = 10.0
CURRENT_SECONDS = 1.0  # a listing that is this late makes ranks disagree on the newest step
PHASE_SECONDS = 25.0
LEAST_SPEED = 0.1e9
_BLOCK = 8 << 20


def probe(ranks: Ranks, folder: Path) -> list[Finding]:
    """Try a folder with all ranks; the rows are rank 0's."""
    fault = ""
    name = ""
    if ranks.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            name = f".torchrelay-check-{os.urandom(6).hex()}"
            (folder / name).mkdir()
        except OSError as refused:
            fault = _why(refused)
    first = ranks.gather("folder/begin", [name, fault], PHASE_SECONDS)[0]
    if first is None or first[1]:
        why = first[1] if first else "rank 0 did not answer"
        remedy = "name a folder that all ranks may write to"
        return [Finding(AREA, str(folder), "problem", f"cannot be written: {why}", remedy)]
    place = folder / first[0]
    try:
        return _probe(ranks, place, folder)
    finally:
        ranks.gather("folder/end", True, PHASE_SECONDS)
        if ranks.rank == 0:
            shutil.rmtree(place, ignore_errors=True)


def _probe(ranks: Ranks, place: Path, folder: Path) -> list[Finding]:
    seen = ranks.gather("folder/seen", _wait_until(place.is_dir, VISIBLE_SECONDS), PHASE_SECONDS)
    # Each rank lists the directory first, so that a cache of it is stale once rank 0 writes.
    with suppress(OSError):
        _names(place)
    ranks.gather("folder/listed", True, PHASE_SECONDS)
    facts: dict[str, Any] = {}
    if ranks.rank == 0:
        facts = operations(place)
    begun = ranks.gather("folder/operations", facts, PHASE_SECONDS)[0] or {}
    delay = _wait_until(lambda: "renamed" in _names(place), VISIBLE_SECONDS)
    whole = delay is not None and _reads_whole(place / "renamed" / "content")
    lists = ranks.gather("folder/lists", [delay, whole], PHASE_SECONDS)
    return judge(str(folder), seen, begun, lists)


def operations(place: Path) -> dict[str, Any]:
    """The facts that one process finds: each operation's fault, or its figure."""
    return {
        "rename": _fault(lambda: _rename(place)),
        "fsync": _fault(lambda: _sync(place)),
        "lock": _fault(lambda: _lock(place)),
        "link": _fault(lambda: _link(place)),
        **_speeds(place),
    }


def judge(
    folder: str,
    seen: Sequence[float | None],
    facts: Mapping[str, Any],
    lists: Sequence[Sequence[Any] | None],
) -> list[Finding]:
    """Rows about a folder: `seen` and `lists` are what each rank found, `facts` those of rank 0."""
    rows = []
    without = [rank for rank, delay in enumerate(seen) if delay is None]
    if without:
        which = ", ".join(map(str, without))
        rows.append(
            Finding(
                AREA,
                "the same for all ranks",
                "problem",
                f"rank {which} does not find what rank 0 made in {folder}",
                "mount the same file system under the same path on every host",
            )
        )
    else:
        rows.append(Finding(AREA, "the same for all ranks", "ok", folder))
    rows.append(
        _operation(
            facts.get("rename"),
            "rename",
            "problem",
            "atomic, and it replaces an empty directory",
            "a step is committed by one rename: name a folder of a POSIX file system",
        )
    )
    rows.append(
        _operation(
            facts.get("fsync"),
            "fsync",
            "problem",
            "files and directories",
            "without it a committed step may not outlast a power cut",
        )
    )
    rows.append(
        _operation(
            facts.get("lock"),
            "locks",
            "slow",
            "flock works",
            "mount with locks (NFS: without `nolock`; Lustre: `-o flock`): without them, drafts of "
            "dead jobs are only removed after a time",
        )
    )
    rows.append(
        _operation(
            facts.get("link"),
            "hard links",
            "slow",
            "supported",
            "torchrelay makes none; tools that keep files of several steps as links (cp -l, rsync "
            "--link-dest) copy them here",
        )
    )
    rows += _listings(lists, bool(without))
    for name in ("write", "read"):
        rows.append(_speed_row(name, facts.get(name)))
    return rows


def _listings(lists: Sequence[Sequence[Any] | None], reported: bool) -> list[Finding]:
    delays = {rank: one[0] for rank, one in enumerate(lists) if one is not None}
    torn = [rank for rank, one in enumerate(lists) if one and one[0] is not None and not one[1]]
    rows = []
    if torn:
        which = ", ".join(map(str, torn))
        rows.append(
            Finding(
                AREA,
                "renames as others see them",
                "problem",
                f"rank {which} saw the new name before its content",
                "mount the file system with close-to-open consistency (NFS: `actimeo=0` or 1)",
            )
        )
    stale = {
        rank: delay for rank, delay in delays.items() if delay is None or delay > CURRENT_SECONDS
    }
    if stale and not reported:
        worst = [delay for delay in stale.values() if delay is not None]
        shown = f"{max(worst):.1f} s late" if len(worst) == len(stale) else "not seen in time"
        which = ", ".join(map(str, stale))
        rows.append(
            Finding(
                AREA,
                "listings",
                "problem",
                f"{shown} on rank {which}",
                "mount with a shorter attribute cache (NFS: `actimeo=1`): ranks that list at once "
                "may disagree on the newest step",
            )
        )
    elif not reported:
        worst_delay = max((delay for delay in delays.values() if delay is not None), default=0.0)
        rows.append(
            Finding(AREA, "listings", "ok", f"current within {max(worst_delay, 0.01):.2g} s")
        )
    return rows


def _operation(fault: str | None, name: str, verdict: Verdict, good: str, remedy: str) -> Finding:
    if fault is None:
        return Finding(AREA, name, "problem", "rank 0 did not answer", "look at the log of rank 0")
    if fault:
        return Finding(AREA, name, verdict, fault, remedy)
    return Finding(AREA, name, "ok", good)


def _speed_row(name: str, speed: float | str | None) -> Finding:
    if not isinstance(speed, float):
        return Finding(AREA, f"{name} speed", "problem", str(speed), "is the file system full?")
    shown = f"{speed / 1e9:.3g} GB/s by one process"
    if speed < LEAST_SPEED:
        return Finding(
            AREA, f"{name} speed", "slow", shown, "name a folder of a faster file system"
        )
    return Finding(AREA, f"{name} speed", "ok", shown)


def _fault(act: Any) -> str:
    try:
        act()
    except OSError as fault:
        return _why(fault)
    return ""


def _why(fault: OSError) -> str:
    return fault.strerror or str(fault)


def _rename(place: Path) -> None:
    """As a commit does it: a directory with its files gets the final name."""
    draft = place / "draft"
    draft.mkdir()
    (draft / "content").write_bytes(b"whole" * 1000)
    number = draft.stat().st_ino
    draft.rename(place / "renamed")
    if exists(draft) or (place / "renamed").stat().st_ino != number:
        raise OSError(errno.EIO, "a renamed directory is not the one that it was")
    empty, other = place / "empty", place / "other"
    empty.mkdir()
    other.mkdir()
    other.rename(empty)


def _sync(place: Path) -> None:
    with open(place / "synced", "wb") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(place: Path) -> None:
    """A lock that a second descriptor does not get."""
    fcntl: Any = system.fcntl
    first, second = os.open(place, os.O_RDONLY), os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        raise OSError(errno.ENOLCK, "two holders got the same lock")
    finally:
        os.close(first)
        os.close(second)


def _link(place: Path) -> None:
    (place / "once").write_bytes(b"x")
    os.link(place / "once", place / "twice")


def _speeds(place: Path) -> dict[str, float | str]:
    path, block = place / "large", os.urandom(_BLOCK)
    try:
        begin = time.perf_counter()
        with open(path, "wb", buffering=0) as file:
            for _ in range(NBYTES // _BLOCK):
                file.write(block)
            os.fsync(file.fileno())
            write = NBYTES / (time.perf_counter() - begin)
            with suppress(OSError, AttributeError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        memory = bytearray(_BLOCK)
        begin = time.perf_counter()
        with open(path, "rb", buffering=0) as source:
            while source.readinto(memory):
                pass
        return {"write": write, "read": NBYTES / (time.perf_counter() - begin)}
    except OSError as fault:
        return {"write": _why(fault), "read": _why(fault)}


def _names(place: Path) -> list[str]:
    return [entry.name for entry in place.iterdir()]


def _reads_whole(path: Path) -> bool:
    try:
        return path.read_bytes() == b"whole" * 1000
    except OSError:
        return False


def _wait_until(there: Any, seconds: float) -> float | None:
    """Seconds until something is so; None if it is not in time."""
    begin = time.monotonic()
    while True:
        with suppress(OSError):
            if there():
                return time.monotonic() - begin
        if time.monotonic() - begin > seconds:
            return None
        time.sleep(0.02)
