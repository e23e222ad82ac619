"""Facts of the machine that each rank is on: versions, limits, names, clocks."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch

from torchrelay import machine
from torchrelay.check.report import Finding
from torchrelay.version import __version__

AREA = "machines"
PACKAGES = ("numpy", "msgspec", "xxhash", "obstore")
SHM_BYTES = 1 << 30
DESCRIPTORS = 4096
MEMLOCK_BYTES = 64 << 20
CLOCK_SECONDS = 5.0
_ENDLESS = 1 << 60  # a limit above it is none


def facts(local: int) -> dict[str, Any]:
    """The facts of this rank, as JSON has them."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = ""
    cuda = torch.cuda.is_available()
    return {
        "host": socket.gethostname(),
        "machine": machine.machine() or socket.gethostname(),
        "address": address,
        "pid": os.getpid(),
        "user": os.getuid(),
        "versions": {
            "torchrelay": __version__,
            "Python": platform.python_version(),
            "torch": torch.__version__,
            **{name: found for name in PACKAGES if (found := _version(name))},
        },
        "cuda": torch.version.cuda if cuda else None,
        "gpus": torch.cuda.device_count() if cuda else 0,
        "local": local,
        "shm": _space("/dev/shm"),
        "memlock": _limit("RLIMIT_MEMLOCK"),
        "descriptors": _limit("RLIMIT_NOFILE"),
        "memory": _memory(),
        "cgroup": _cgroup(),
    }


def judge(
    found: Sequence[dict[str, Any] | None], clocks: Sequence[float | None] = ()
) -> list[Finding]:
    """Rows about the machines of all ranks; None stands for a rank that did not answer. `clocks`
    has the time of each rank at the same moment."""
    rows = []
    missing = [rank for rank, facts in enumerate(found) if facts is None]
    if missing:
        rows.append(
            Finding(
                AREA,
                "ranks",
                "problem",
                f"no answer from {_ranks(missing)}",
                "look at the logs of these ranks; can their hosts reach the store of rank 0?",
            )
        )
    known = {rank: facts for rank, facts in enumerate(found) if facts is not None}
    rows.append(_versions(known))
    rows.append(_names(known))
    rows.append(_clocks(known, {rank: at for rank, at in enumerate(clocks) if at is not None}))
    hosts = {facts["machine"]: facts for facts in known.values()}
    for facts in hosts.values():
        rows += [_shm(facts), _descriptors(facts), _memlock(facts), _memory_row(facts)]
    return rows


def _versions(known: dict[int, dict[str, Any]]) -> Finding:
    names = sorted({name for facts in known.values() for name in facts["versions"]})
    differ = []
    for name in names:
        by: dict[str, list[int]] = {}
        for rank, facts in known.items():
            by.setdefault(facts["versions"].get(name, "none"), []).append(rank)
        if len(by) > 1:
            each = "; ".join(f"{found} on {_ranks(ranks)}" for found, ranks in by.items())
            differ.append(f"{name}: {each}")
    if differ:
        remedy = "install the same versions everywhere (pip install -c constraints.txt)"
        verdict: Any = "problem" if any(one.startswith("torchrelay:") for one in differ) else "slow"
        return Finding(AREA, "versions", verdict, ", ".join(differ), remedy)
    first = next(iter(known.values()))
    shown = ", ".join(f"{name} {found}" for name, found in first["versions"].items())
    gpus = f", CUDA {first['cuda']}, {first['gpus']} GPUs" if first["cuda"] else ", no GPU"
    return Finding(AREA, "versions", "ok", f"{_many(len(known), 'rank')}: {shown}{gpus}")


def _names(known: dict[int, dict[str, Any]]) -> Finding:
    machines = {facts["machine"]: facts for facts in known.values()}
    names: dict[str, int] = {}
    for facts in machines.values():
        names[facts["host"]] = names.get(facts["host"], 0) + 1
    same = [name for name, count in names.items() if count > 1]
    if same:
        return Finding(
            AREA,
            "host names",
            "problem",
            f"{len(machines)} machines; several are called {', '.join(same)}",
            "give each host a name of its own (hostnamectl, or the container's hostname), and "
            "name keepers JOB@HOST until then",
        )
    if len(machines) > 1:
        for facts in machines.values():
            if not facts["address"] or ip_address(facts["address"]).is_loopback:
                where = facts["address"] or "no address"
                return Finding(
                    AREA,
                    "host names",
                    "ok" if os.environ.get("GLOO_SOCKET_IFNAME") else "problem",
                    f"{facts['host']} resolves to {where} on itself",
                    "set GLOO_SOCKET_IFNAME to the interface that other hosts reach, or mend "
                    "/etc/hosts",
                )
    return Finding(AREA, "host names", "ok", ", ".join(sorted(names)))


def _clocks(known: dict[int, dict[str, Any]], clocks: dict[int, float]) -> Finding:
    spread = max(clocks.values(), default=0.0) - min(clocks.values(), default=0.0)
    if spread > CLOCK_SECONDS:
        earliest = min(clocks, key=lambda rank: clocks[rank])
        host = known[earliest]["host"]
        return Finding(
            AREA,
            "clocks",
            "problem",
            f"{spread:.0f} s apart; the earliest is that of {host} (rank {earliest})",
            "synchronise the clocks (chrony, ntpd): `max_age_seconds` of recover compares them",
        )
    return Finding(AREA, "clocks", "ok", f"within {max(spread, 0.1):.1f} s")


def _shm(facts: dict[str, Any]) -> Finding:
    subject = f"/dev/shm of {facts['host']}"
    if facts["shm"] is None:
        return Finding(AREA, subject, "ok", "there is none; torchrelay does not use it")
    if facts["shm"] < SHM_BYTES:
        return Finding(
            AREA,
            subject,
            "slow",
            f"{_bytes(facts['shm'])}",
            "torchrelay does not use it, but nccl and the workers of data loaders need more: "
            "docker run --shm-size=16g, or a memory-backed emptyDir at /dev/shm",
        )
    return Finding(AREA, subject, "ok", _bytes(facts["shm"]))


def _descriptors(facts: dict[str, Any]) -> Finding:
    subject, count = f"open files of {facts['host']}", facts["descriptors"]
    if count is not None and count < DESCRIPTORS:
        return Finding(
            AREA, subject, "slow", f"at most {count}", "ulimit -n 65536 before the job starts"
        )
    return Finding(AREA, subject, "ok", "any number" if count is None else f"at most {count}")


def _memlock(facts: dict[str, Any]) -> Finding:
    subject, limit = f"locked memory of {facts['host']}", facts["memlock"]
    if limit is not None and limit < MEMLOCK_BYTES and facts["gpus"]:
        remedy = "ulimit -l unlimited: RDMA (nccl) registers memory, and falls back to TCP"
        return Finding(AREA, subject, "slow", f"at most {_bytes(limit)}", remedy)
    return Finding(
        AREA, subject, "ok", "unlimited" if limit is None else f"at most {_bytes(limit)}"
    )


def _memory_row(facts: dict[str, Any]) -> Finding:
    subject, limit = f"memory of {facts['host']}", facts["cgroup"]
    total = f"{_bytes(facts['memory'])} in all" if facts["memory"] else "of unknown size"
    if limit is not None and facts["memory"] and limit < facts["memory"]:
        return Finding(AREA, subject, "ok", f"{_bytes(limit)} for this container, {total}")
    return Finding(AREA, subject, "ok", total)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _space(path: str) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _limit(name: str) -> int | None:
    import resource  # Windows has none

    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY or soft > _ENDLESS else soft


def _memory() -> int | None:
    with suppress(OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _cgroup() -> int | None:
    """The bytes that the control group of this process may have; None without a limit."""
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limit = int(Path(name).read_text())
            return limit if limit < _ENDLESS else None
    return None


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _bytes(count: int) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
