"""`python -m benchmarks.figures` writes the figures of README.md and docs/ from the result files.

A page has a region for each table, between `<!-- figures: NAME -->` and `<!-- end of figures -->`.
No figure is typed by hand, and none is rounded in our favour: ratios and rates are cut off, times
of ours are rounded up. `--check` writes nothing and fails if a page differs from its result files.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CPU = "benchmarks/results"
GPU = "benchmarks/gpu/results"
CHART = "docs/chart.svg"
REGION = re.compile(r"(<!-- figures: ([\w-]+) -->\n)(?:.*?\n)??(<!-- end of figures -->)", re.S)
TEN = 10


@cache
def result(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


# How a number is shown


def _cut(value: float) -> str:
    places = 2 if value < TEN else 1 if value < TEN * TEN else 0
    scale = TEN**places
    return f"{math.floor(value * scale + 1e-9) / scale:.{places}f}"


def ratio(value: float) -> str:
    return f"{_cut(value)}x"


def rate(value: float) -> str:
    return _cut(value)


def seconds(value: float, *, up: bool = True) -> str:
    """Two significant digits or two places; ours are rounded up, those of others down."""
    places = 3 if value < 0.1 else 2
    scale = 10**places
    found = math.ceil(value * scale - 1e-9) if up else math.floor(value * scale + 1e-9)
    return f"{found / scale:.{places}f}"


def percent(value: float) -> str:
    return f"{math.ceil(1000 * value - 1e-9) / 10:.1f} %"


def spread(laps: Sequence[float], *, up: bool = True) -> str:
    """Median, minimum and maximum."""
    middle = statistics.median(laps)
    least, most = seconds(min(laps), up=up), seconds(max(laps), up=up)
    return f"{seconds(middle, up=up)} ({least} to {most})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


# Tables


def hardware() -> str:
    groups: dict[tuple[str, ...], list[str]] = {}
    for folder in (CPU, GPU):
        for path in sorted((ROOT / folder).glob("*.json")):
            machine = result(f"{folder}/{path.name}").get("machine", {})
            if "cpu" not in machine:
                continue
            gpu = f", one {machine['gpu']}" if "gpu" in machine else ""
            name = f"{machine['cores']} cores, {machine['cpu']}{gpu}"
            memory, torch = f"{machine['memory_gib']} GiB", machine["torch"]
            groups.setdefault((name, memory, torch, machine["commit"]), []).append(path.stem)
    rows = [[*facts, ", ".join(f"`{file}`" for file in files)] for facts, files in groups.items()]
    return table(["machine", "memory", "torch", "library at commit", "result files"], rows)


def versions() -> str:
    rows = [
        {**row, "torch": row["torch"].partition("+")[0]}  # how it was built makes no difference
        for row in result(f"{CPU}/versions.json")["rows"]
    ]
    rows.sort(key=lambda row: [int(n) for n in f"{row['torch']}.{row['python']}".split(".")])
    names = ("torch", "python", "numpy", "msgspec", "xxhash", "passed", "skipped", "failed", "date")
    return table(
        ["torch", "Python", *names[2:]], [[str(row[name]) for name in names] for row in rows]
    )


def _live(rows: list[dict[str, Any]], route: str) -> list[list[str]]:
    return [
        [
            row["title"],
            row["mode"],
            spread(row["theirs"]["seconds"], up=False),
            spread(row["torchrelay"]["seconds"]),
            ratio(row["speed"]),
        ]
        for row in rows
        if row["against"] == "torch PGTransport"
        and row["route"] == route
        and "connections=0" not in row["mode"]
        and len(row["theirs"]["seconds"]) > 1
    ]


LIVE_HEAD = ["state", "mode", "`PGTransport`, s", "torchrelay, s", "speed"]


def live_memory() -> str:
    return table(LIVE_HEAD, _live(result(f"{CPU}/live.json")["rows"], "memory"))


def live_tcp() -> str:
    return table(LIVE_HEAD, _live(result(f"{CPU}/live.json")["rows"], "tcp"))


def links() -> str:
    rows = [
        [
            f"{'`PGTransport`' if row['who'] == 'torch' else 'torchrelay'}, {row['mode']}",
            spread(row["one"]["seconds"], up=row["who"] != "torch"),
            spread(row["3"]["seconds"], up=row["who"] != "torch"),
            ratio(row["ratio"]) if row["who"] == "torch" else f"{_up(row['ratio'])}x",
        ]
        for row in result(f"{CPU}/links.json")["rows"]
    ]
    return table(["", "1 receiver, s", "3 receivers, s", "3 to 1"], rows)


def _up(value: float) -> str:
    return f"{math.ceil(value * 100 - 1e-9) / 100:.2f}"


def connections() -> str:
    rows = [
        [row["case"], rate(row["gb_s"])]
        for row in result(f"{GPU}/connections.json")["rows"]
        if "connections=0" not in row["case"]
    ]
    return table(["8 GB, digests on", "GB/s"], rows)


def resharding() -> str:
    names = {"live, memory": "route `memory`", "live, tcp": "route `tcp`, verified"}
    rows = [
        [
            names.get(row["case"], "`dcp.save` and `dcp.load` in /dev/shm"),
            spread(row["laps"], up=row["case"] in names),
            ratio(row["against_dcp"]),
        ]
        for row in result(f"{CPU}/resharding.json")["rows"]
    ]
    return table(["four ranks to two", "seconds", "speed"], rows)


def reuse() -> str:
    """Saves of what changed, beside saves of everything."""
    rows = []
    for row in result(f"{CPU}/reuse.json")["rows"]:
        place = "/dev/shm" if row["place"] == "/dev/shm" else "disk"
        reused, everything = (
            spread(row["seconds"][way][1:], up=way == "reuse") for way in ("reuse", "all")
        )
        written = f"{row['written_of_trained']:.2f}"
        rows.append([row["case"], place, reused, everything, ratio(row["times_as_fast"]), written])
    head = ["two ranks, 500 MB", "where", "s", "`reuse=False`, s", "speed"]
    return table([*head, "written, of what is trained"], rows)


def gpu_live() -> str:
    found = result(f"{GPU}/live.json")
    rows = [[row["case"], rate(row["first_gb_s"]), rate(row["gb_s"])] for row in found["rows"]]
    rows.append(["`PGTransport` over gloo, 4 GB", "", rate(found["torch_pgtransport_gb_s"])])
    return table(["between two processes on one GPU", "first, GB/s", "later, GB/s"], rows)


def endpoint() -> str:
    states = result(f"{CPU}/endpoint.json")["states"]
    cases = [row["case"] for row in states[0]["rows"]]
    by_case = [{row["case"]: row for row in state["rows"]} for state in states]
    rows = [
        [
            case,
            *(
                f"{spread(rows[case]['laps'], up=case[:4] == 'pull')}; "
                f"{ratio(rows[case]['against_torchft'])}"
                for rows in by_case
            ),
        ]
        for case in cases
    ]
    heads = [f"{s['bytes'] / 1e6:,.0f} MB in {s['tensors']:,} tensors, s" for s in states]
    return table(["", *heads], rows)


def swarm() -> str:
    seeds, healing = result(f"{CPU}/seeds.json"), result(f"{CPU}/healing.json")
    laps = seeds["laps"]
    rows = [
        [
            "8 processes `pull` with `reshare=True`",
            spread(laps["alone"]["seconds"]),
            spread(laps["all"]["seconds"]),
            f"{_up(seeds['ratio'])}x",
            _up(seeds["copies"]),
        ]
    ]
    for row in healing["rows"]:
        ours = row["way"] == "recover"
        rows.append(
            [
                "3 replicas `recover` with `reshare=True`" if ours else "3 by `PGTransport`",
                spread(row["one_seconds"], up=ours),
                spread(row["three_seconds"], up=ours),
                f"{_up(row['ratio'])}x" if ours else ratio(row["ratio"]),
                _up(row["copies_sent"]),
            ]
        )
    return table(["", "one alone, s", "all, s", "all to one", "copies sent by the source"], rows)


KEEPER_CASES = {
    "keeper": "from the keeper",
    "live peer": "from a live peer on the same host",
    "PGTransport": "`PGTransport`, two processes with a ready group",
    "dcp.load, hot": "`dcp.load`, page cache",
    "dcp.load, cold": "`dcp.load`, cold disk",
}


def keeper() -> str:
    by_case = {row["case"]: row for row in result(f"{CPU}/keeper.json")["recovery"]["rows"]}
    rows = [
        [
            name,
            spread(by_case[case]["laps"], up=case in ("keeper", "live peer")),
            spread(by_case[case]["laps_imported"], up=case in ("keeper", "live peer")),
        ]
        for case, name in KEEPER_CASES.items()
    ]
    return table(["1.07 GB into a restarted worker", "landed, s", "without imports, s"], rows)


def staging() -> str:
    rows = [
        [
            str(row["steps_in_memory"]),
            f"{row['staged']} of {row['steps']}",
            f"{_up(row['ratio'])}x",
            seconds(row["stage_seconds"]),
            ratio(row["keeper_bytes"] / row["bytes"]),
        ]
        for row in result(f"{CPU}/keeper.json")["staging"]["rows"]
    ]
    head = [
        "`steps=`",
        "steps staged",
        "loop, to alone",
        "in `stage`, s",
        "keeper's memory, states",
    ]
    return table(head, rows)


def checkpoints() -> str:
    rows = []
    for row in result(f"{CPU}/checkpoint.json")["rows"]:
        if row["unit"] != "GB/s":
            continue
        for entry in row["entries"]:
            ours = entry["name"].startswith("torchrelay")
            times = ratio(entry["ratio"]) if entry.get("ratio") else ""
            title = row["title"].replace("training beside", "while training")
            rows.append([title, entry["name"], spread(entry["laps"], up=ours), times])
    return table(["4.1 GB", "with", "seconds", "speed to the first"], rows)


def checkpoint_limits() -> str:
    found = result(f"{CPU}/checkpoint-limits.json")["rows"]
    rows = [
        [
            row["title"],
            entry["name"],
            spread(entry["laps"], up=entry["name"].startswith("torchrelay")),
            ratio(entry["ratio"]),
        ]
        for row in found
        for entry in row["entries"]
    ]
    return table(["1.6 GB, two threads", "with", "seconds", "of the limit"], rows)


def retention() -> str:
    rows = [
        [str(row["retained"]), *(seconds(row[key]) for key in ("median_s", "min_s", "max_s"))]
        for row in result(f"{CPU}/checkpoint-retention.json")["rows"]
    ]
    return table(["retained steps", "a small save, s", "minimum", "maximum"], rows)


def gpu_stalls() -> str:
    rows = [
        [row["name"], *(seconds(c["stall"], up=row["name"][:5] == "torch") for c in row["calls"])]
        for row in result(f"{GPU}/checkpoint.json")["rows"]
        if row["kind"] == "stall" and not row.get("error")
    ]
    return table(["stall of an asynchronous save of 8.6 GB, s", "first", "second", "third"], rows)


def gpu_checkpoints() -> str:
    rows = [
        [row["kind"], row["name"], rate(row["GB/s"])]
        for row in result(f"{GPU}/checkpoint.json")["rows"]
        if row["kind"] in ("save", "load")
    ]
    return table(["8.6 GB on an H200, /dev/shm", "with", "GB/s"], rows)


def loaders() -> str:
    found: dict[str, dict[str, str]] = {}
    places = ("/dev/shm", "hot page cache", "cold disk")
    for row in result(f"{GPU}/loaders.json")["rows"]:
        name = f"{row['name']} {row['version']}".strip()
        shown = f"{rate(row['gb_s'])} ({rate(row['first_gb_s'])})"
        found.setdefault(name, {})[row["where"]] = shown
    rows = [[name, *(cells.get(place, "") for place in places)] for name, cells in found.items()]
    return table(["8 GB to an H200, GB/s (first load)", *places], rows)


def limits() -> str:
    rows = [
        [
            row["name"] + (f", {row['threads']} threads" if "threads" in row else ""),
            rate(row["gb_s"]),
        ]
        for row in result(f"{GPU}/limits.json")["rows"]
        if "gb_s" in row and 1 << 22 <= row.get("piece", 1 << 23) <= 1 << 23
    ]
    return table(["the parts by themselves", "GB/s"], rows)


def kernels() -> str:
    rows = [[row["case"], rate(row["gb_s"])] for row in result(f"{GPU}/kernels.json")["rows"]]
    return table(["kernel, 8 GB", "GB/s"], rows)


def frameworks() -> str:
    rows = [
        [
            name,
            spread(row["its own"], up=False),
            spread(row["torchrelay"]),
            ratio(row["ratio"]),
        ]
        for name, row in result(f"{CPU}/frameworks.json")["frameworks"].items()
    ]
    return table(["stall of a save of 1.5 GB", "its own, s", "torchrelay, s", "shorter"], rows)


def weights_reshard() -> str:
    rows = [
        [
            f"`{row['contender'].split()[-1]}`" if _ours(row) else row["contender"],
            spread(row["seconds"], up=_ours(row)),
            ratio(row["ours_is_faster"]),
        ]
        for row in result(f"{CPU}/weights-reshard.json")["rows"]
    ]
    return table(["1.07 GB, four ranks to two", "seconds", "`subscribe` is faster"], rows)


def _ours(row: dict[str, Any]) -> bool:
    return str(row["contender"]).startswith("torchrelay")


def weights_links() -> str:
    rows = [
        [
            f"{row['trainers']} to {row['workers']}: {row['kind']}",
            spread(row["seconds"]),
            percent(row["entered_per_needed"]),
        ]
        for row in result(f"{CPU}/weights-links.json")["rows"]
    ]
    return table(["trainers to workers, an update", "seconds", "of the needed bytes came"], rows)


def weights_gpu() -> str:
    rows = [[row["case"], spread(row["seconds"])] for row in result(f"{GPU}/weights.json")["rows"]]
    return table(["8 GB, two processes on one H200", "seconds"], rows)


def weights_training() -> str:
    found = result(f"{CPU}/weights-training.json")
    rows = [
        [
            name,
            *(percent(value) for value in (statistics.median(seen), min(seen), max(seen))),
        ]
        for name, seen in (
            ("elements that change", [row["changed"] for row in found["rows"]]),
            ("bytes that are sent", [row["sent"] for row in found["rows"]]),
        )
    ]
    count = len(found["rows"])
    return table([f"of each of {count} steps", "median", "minimum", "maximum"], rows)


def scale() -> str:
    ranks = result(f"{CPU}/scale.json")["ranks"]
    lines = {
        "processor seconds of a rank, save": ("seconds of a rank", 1),
        "processor seconds of the coordinator": ("seconds of the coordinator", 1),
        "kB that a rank sends to commit": ("bytes to commit, said", 1e3),
        "commit record, MB": ("commit record, bytes", 1e6),
        "seconds to read the record": ("decode seconds", 1),
        "seconds to plan the reads": ("plan seconds", 1),
    }
    rows = [
        [name, *(seconds(found[key] / unit) for found in ranks.values())]
        for name, (key, unit) in lines.items()
    ]
    return table(["", *(f"{int(count):,} ranks" for count in ranks)], rows)


# README


def _stall() -> tuple[float, float]:
    """The later stalls of an asynchronous save on a GPU: ours, and the best of torch's."""
    by_name = {row["name"]: row for row in result(f"{GPU}/checkpoint.json")["rows"]}
    ours = [c["stall"] for c in by_name["torchrelay, defaults, no prepare"]["calls"][1:]]
    theirs = [c["stall"] for c in by_name["dcp.async_save, thread"]["calls"][1:]]
    return max(ours), min(theirs)


def headline() -> str:
    kept = {row["case"]: row for row in result(f"{CPU}/keeper.json")["recovery"]["rows"]}
    ours, theirs = _stall()
    slow = {(r["who"], r["mode"]): r["ratio"] for r in result(f"{CPU}/links.json")["rows"]}
    rows = [
        [
            "Restarted worker, 1.07 GB, until landed",
            f"{seconds(kept['keeper']['seconds'])} s from a keeper",
            f"`dcp.load`, page cache: {seconds(kept['dcp.load, hot']['seconds'], up=False)} s",
            "`benchmarks.keeper`, 2 cores",
        ],
        [
            "Training stall of an asynchronous save, 8.6 GB",
            f"{seconds(ours)} s",
            f"`dcp.async_save`: {seconds(theirs, up=False)} s",
            "`benchmarks.gpu.checkpoint`, one H200",
        ],
        [
            "Three receivers over 1 Gbit/s, to one",
            f"{_up(slow['torchrelay', 'in place'])}x the time",
            f"`PGTransport`: {ratio(slow['torch', 'in place'])}",
            "`benchmarks.links`, 4 namespaces, 2 cores",
        ],
    ]
    return table(["", "torchrelay", "compared with", "run `python -m`"], rows)


def tcp_in_place() -> str:
    by_mode = {
        (row["title"], row["mode"]): row["speed"]
        for row in result(f"{CPU}/live.json")["rows"]
        if row["route"] == "tcp" and row["against"] == "torch PGTransport"
    }
    return (
        "1. **TCP in place is slower than torch.** 1 GiB over loopback with the defaults reaches "
        f"{ratio(by_mode['1 GiB in 16 tensors', 'in place'])} of `PGTransport`'s speed, which "
        "verifies nothing (two cores)."
    )


# The chart


def bars() -> list[tuple[str, float]]:
    """Times as fast as torch's own: what the chart shows."""
    live = {
        (row["title"], row["mode"]): row["speed"]
        for row in result(f"{CPU}/live.json")["rows"]
        if row["against"] == "torch PGTransport" and row["route"] == "memory"
    }
    saves = {
        row["key"]: {entry["name"]: entry for entry in row["entries"]}
        for row in result(f"{CPU}/checkpoint.json")["rows"]
    }
    kept = {row["case"]: row for row in result(f"{CPU}/keeper.json")["recovery"]["rows"]}
    gib = "1 GiB in 16 tensors"
    return [
        ("live, 1 GiB, new tensors", live[gib, "new tensors, warm"]),
        ("live, 1 GiB, in place", live[gib, "in place"]),
        ("live, 20,000 small tensors, in place", live["20,000 tensors of 4 KB", "in place"]),
        ("save 4.1 GB to disk, synced", saves["save-disk"]["torchrelay"]["ratio"]),
        ("load 4.1 GB, verified, warm", saves["load-warm"]["torchrelay"]["ratio"]),
        ("restarted worker, 1.07 GB, page cache", kept["dcp.load, hot"]["keeper_is_faster"]),
    ]


WIDTH, LEFT, ROW, TOP = 760, 300, 30, 56
LONGEST = 80.0


def chart() -> str:
    """Bars on a logarithmic scale that begins at 1: as fast as torch."""
    found = bars()
    height = TOP + ROW * len(found) + 34
    span = WIDTH - LEFT - 80
    style, small = (f'font-family="sans-serif" font-size="{size}" fill="#444"' for size in (13, 11))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>Times as fast as torch's PGTransport and DCP, two cores</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="16" y="26" {style} font-weight="bold">Times as fast as torch 2.13 '
        "(PGTransport, DCP)</text>",
        f'<text x="16" y="44" {small}>two CPU cores, gloo, digests on where '
        "bytes cross a wire or rest on a medium; logarithmic</text>",
    ]
    for number, (name, value) in enumerate(found):
        y = TOP + ROW * number
        length = max(1.0, span * math.log(max(value, 1.01)) / math.log(LONGEST))
        lines += [
            f'<text x="{LEFT - 10}" y="{y + 19}" {style} text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LEFT}" y="{y + 5}" width="{length:.1f}" height="20" fill="#2a7f62"/>',
            f'<text x="{LEFT + length + 6:.1f}" y="{y + 19}" {style}>{ratio(value)}</text>',
        ]
    files = "live, checkpoint, keeper"
    lines.append(f'<text x="16" y="{height - 12}" {small}>benchmarks/results: {files}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        hardware, live_memory, live_tcp, links, connections, resharding, reuse, gpu_live, endpoint,
        swarm, keeper, staging, checkpoints, checkpoint_limits, retention, gpu_stalls,
        gpu_checkpoints,
        loaders, limits, kernels, frameworks, weights_reshard, weights_links, weights_gpu,
        weights_training, scale, headline, tcp_in_place, versions,
    )
}  # fmt: skip


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """A page with its regions made again."""
    return REGION.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    check = parser.parse_args().check
    made = {path: filled(path.read_text(encoding="utf-8")) for path in pages()}
    made[ROOT / CHART] = chart()
    stale = [p for p, text in made.items() if not p.exists() or p.read_text("utf-8") != text]
    for path in stale:
        print(path.relative_to(ROOT), "differs from the result files" if check else "written")
        if not check:
            path.write_text(made[path], encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
