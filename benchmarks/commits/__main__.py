"""Run the workloads on two commits, lap by lap in turn, and compare the medians."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.harness import machine
from tests.support.netns import GIGABIT, PORT, Switch, Unavailable

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")
RESULT = ROOT / "benchmarks" / "results" / "commits.json"
BAR = 0.95  # of the speed before
ENOUGH = 5.0  # seconds of a workload: short laps differ by more than the bar, and are made often
MOST = 4  # times as many laps as were asked for


class Job(NamedTuple):
    """What one lap does, on how many ranks."""

    title: str
    ranks: int
    command: list[Any]
    links: bool = False  # each rank on a host of its own, behind 1 Gbit/s
    best: bool = False  # the best lap counts: seconds of the processor, or bytes


def jobs(small: bool) -> list[Job]:
    many, mib, width = (200, 16, 64) if small else (20_000, 512, 1024)
    found = []
    kinds = {"20,000 x 4 KB": ("small", many), "512 MiB in 16": ("large", mib)}
    kinds["transformer, 96 tensors"] = ("transformer", width)
    for title, (kind, scale) in kinds.items():
        for mode in ("direct", "atomic", "new"):
            found.append(Job(f"{title}, {mode}", 2, ["live", kind, scale, mode, 1, None]))
        found.append(Job(f"{title}, by tcp", 2, ["live", kind, scale, "direct", 1, "tcp"]))
    for mode in ("direct", "atomic", "new"):
        title = f"512 MiB to three, {mode}"
        found.append(Job(title, 4, ["live", "large", mib, mode, 3, None]))
    for title, (kind, scale) in kinds.items():
        for mode in ("save", "load", "load, not atomic", "stall"):
            found.append(Job(f"{title}, {mode}", 2, ["durable", kind, scale, mode]))
    found.append(Job("20,000 x 4 KB, plan alone", 2, ["plan", "small", many]))
    trees = {"flat": "20,000 in a dict", "wide": "200 dicts of 100", "deep": "2,000 dicts of 10"}
    for what in ("describe", "decode", "in place", "new", "bytes"):
        for kind, title in (trees | {"dtensors": "5,000 DTensors"}).items():
            command = ["record", what, kind, many]
            found.append(Job(f"record, {what}, {title}", 2, command, best=True))
    for what in ("describe", "encode", "decode", "bytes"):
        for kind, title in trees.items():
            command = ["rest", what, kind, many]
            found.append(Job(f"at rest, {what}, {title}", 2, command, best=True))
    command = ["rest", "describe", "dtensors", many]
    found.append(Job("at rest, describe, 5,000 DTensors", 2, command, best=True))
    for to in (1, 3):
        for mode in ("direct", "atomic", "new"):
            title = f"{mib // 4} MiB over 1 Gbit/s to {to}, {mode}"
            command = ["live", "large", mib // 4, mode, to, "tcp"]
            found.append(Job(title, 4, command, links=True))
    return found


class Crew:
    """The ranks of one commit, which wait while those of the other run; on the hosts of a switch
    if there is one."""

    def __init__(self, source: Path, size: int, folder: Path, switch: Switch | None) -> None:
        self._folder = folder
        folder.mkdir()
        environment = {**os.environ, "PYTHONPATH": str(source / "src")}
        if switch is not None:
            environment["GLOO_SOCKET_IFNAME"] = PORT
        self._ranks = [
            subprocess.Popen(
                [
                    *([] if switch is None else ["nsenter", f"--net={switch.door(rank)}"]),
                    *(sys.executable, str(WORKER)),
                    *(str(rank), str(size), str(folder / "store"), folder),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                cwd=folder,
            )
            for rank in range(size)
        ]
        for rank in self._ranks:
            self._answer(rank)

    def lap(self, command: list[Any]) -> float:
        """Seconds, as rank 0 tells them."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(command) + "\n")
            rank.stdin.flush()
        first, *_ = [float(self._answer(rank)) for rank in self._ranks]
        return first

    @staticmethod
    def _answer(rank: subprocess.Popen[str]) -> Any:
        assert rank.stdout is not None
        line = rank.stdout.readline()
        if not line:
            raise RuntimeError("a rank has ended; its error is above")
        return json.loads(line)

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def checked_out(stack: ExitStack, revision: str, folder: Path) -> tuple[str, Path]:
    """A commit's name and files; "." is the tree as it is."""
    if revision == ".":
        return "the tree as it is", ROOT
    git = ["git", "-C", str(ROOT)]
    name = subprocess.check_output([*git, "rev-parse", "--short", revision], text=True).strip()
    target = folder / name
    subprocess.check_call([*git, "worktree", "add", "-q", "--detach", str(target), revision])
    remove = [*git, "worktree", "remove", "--force", str(target)]
    stack.callback(subprocess.call, remove)
    return name, target


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commits", description=__doc__)
    parser.add_argument("before", help="a commit")
    parser.add_argument("after", nargs="?", default=".", help='another one; by default "."')
    parser.add_argument("--laps", type=int, default=7, help="that count, of each, at least")
    parser.add_argument("--only", default="", help="workloads with this in their title")
    parser.add_argument("--small", action="store_true", help="tiny sizes: a test, not a figure")
    parser.add_argument("--out", type=Path, default=None, help=f"by default {RESULT.name}")
    parser.add_argument("--memory", default="/dev/shm", help="where steps are saved")
    options = parser.parse_args()
    out = options.out or (None if options.small or options.only else RESULT)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    # A run that is ended from outside leaves no ranks and no checkout behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    chosen = [job for job in jobs(options.small) if options.only in job.title]
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.memory)))
        sides = [checked_out(stack, rev, folder) for rev in (options.before, options.after)]
        names = [name for name, _ in sides]
        facts = {"machine": machine(), "before": names[0], "after": names[1], "bar": BAR}
        enough = 0.0 if options.small else ENOUGH
        for links, size in sorted({(job.links, job.ranks) for job in chosen}):
            with ExitStack() as crewed:
                try:
                    switch = crewed.enter_context(Switch(size, GIGABIT)) if links else None
                except Unavailable as fault:
                    print(f"links are left out: {fault}", flush=True)
                    continue
                crews = []
                for number, (_, tree) in enumerate(sides):
                    crews.append(Crew(tree, size, scratch / f"{number}", switch))
                    crewed.callback(crews[-1].close)
                for job in [job for job in chosen if (job.links, job.ranks) == (links, size)]:
                    rows.append(measured(job, crews, options.laps, enough))
                    print(line(rows[-1]), flush=True)
                    if out is not None:  # what is measured so far outlives an early end
                        found = {**facts, "laps": options.laps, "rows": rows}
                        out.write_text(json.dumps(found, indent=2) + "\n")
    slow = [row["workload"] for row in rows if row["speed"] < BAR]
    print(
        f"{names[1]} against {names[0]}: {len(rows) - len(slow)} of {len(rows)} at {BAR}x or more"
    )
    return 0


def measured(job: Job, crews: list[Crew], laps: int, enough: float) -> dict[str, Any]:
    """Both commits in turn; the first lap of each is not counted. More laps than were asked for,
    until there are `enough` seconds of them."""
    seconds: list[list[float]] = [[], []]
    for lap in range(MOST * laps + 1):
        if lap > laps and sum(map(sum, seconds)) >= enough:
            break
        order = (0, 1) if lap % 2 else (1, 0)
        for side in order:
            spent = crews[side].lap(job.command)
            if lap:
                seconds[side].append(spent)
    before, after = map(min if job.best else median, seconds)
    return {
        "workload": job.title,
        "before": before,
        "after": after,
        "speed": before / after,
        "seconds": seconds,
    }


def line(row: dict[str, Any]) -> str:
    mark = "" if row["speed"] >= BAR else "  slower"
    if ", bytes," in row["workload"]:
        figures = f"{row['before']:8,.0f} B {row['after']:8,.0f} B"
    else:
        figures = f"{row['before']:8.4f} s {row['after']:8.4f} s"
    return f"{row['workload']:45s} {figures} {row['speed']:6.2f}x{mark}"


if __name__ == "__main__":
    sys.exit(main())
