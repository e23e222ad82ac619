"""Run the tests with other releases of Python and torch: `python -m tools.versions [NAME...]`.

One environment after the other is made below `build/versions`, tested with `make suite`, and noted
in `benchmarks/results/versions.json`, from which docs/install.md gets its table. An environment
with a torch from the registry takes several GB; `--remove` deletes it once it is noted. Arguments
after `--` go to pytest: `python -m tools.versions newest -- tests/dropin`.

The environment `oldest` has the lowest release of each dependency that pyproject.toml allows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "versions"
RESULT = ROOT / "benchmarks" / "results" / "versions.json"
PROJECT = ROOT / "pyproject.toml"
PINS = ROOT / "constraints.txt"
OUTCOMES = ("failures", "errors", "skipped")


# A test tool whose pinned release needs newer dependencies than the lowest: pip chooses another.
TOO_NEW = {"twine"}
# The extras whose lower bounds are tested: the others bring frameworks, with bounds of their own.
BOUNDED_EXTRAS = ("cli", "cloud")


class Environment(NamedTuple):
    """An interpreter, as its program is called, and a torch; and whether the other dependencies are
    as old as they may be."""

    python: str
    torch: str
    floors: bool = False


ENVIRONMENTS = {
    "pinned": Environment("python3.11", "2.13.0"),
    "oldest": Environment("python3.10", "2.11.0", floors=True),
    "before": Environment("python3.11", "2.14.1"),
    "newest": Environment("python3.11", "2.15.0"),
    "newest-python": Environment("python3.14", "2.15.0"),
}


def tested(name: str, asked: Environment, words: list[str]) -> dict[str, Any]:
    """Make the environment if it is not there, run the tests in it, and return what to note."""
    venv, found = PLACE / name, PLACE / f"{name}.xml"
    PLACE.mkdir(parents=True, exist_ok=True)
    found.unlink(missing_ok=True)
    command = ["make", "-C", str(ROOT), "suite", f"PYTHON={asked.python}", f"TORCH={asked.torch}"]
    if asked.floors:
        pins = PLACE / f"{name}.txt"
        pins.write_text(lowest_pins(), encoding="utf-8")
        command.append(f"PINS={pins}")
    options = " ".join([f"--junitxml={found}", *words])
    command += [f"VENV={venv}", f"OPTIONS={options}"]
    subprocess.run(command, check=False, env={**os.environ, **other(name)})
    if not found.exists():
        raise SystemExit(f"{name}: the tests did not come to their end")
    return {"name": name, **versions(venv / "bin" / "python"), **counts(found), "only": words}


def floors() -> dict[str, str]:
    """The lower bound of each dependency in pyproject.toml, by name; `ValueError` without one."""
    text = PROJECT.read_text("utf-8")
    lists = [
        re.search(rf"^{name} = (\[.*?\])$", text, re.M | re.S)
        for name in ("dependencies", *BOUNDED_EXTRAS)
    ]
    found: dict[str, str] = {}
    for requirement in [each for one in lists if one for each in re.findall(r'"(.+?)"', one[1])]:
        bound = re.fullmatch(r"([\w.-]+)>=([\w.]+)", requirement)
        if bound is None:
            raise ValueError(f"{requirement!r} in pyproject.toml has no lower bound alone")
        found[bound[1]] = bound[2]
    return found


def lowest_pins() -> str:
    """The constraints of the environment that has the lowest releases."""
    return with_floors(PINS.read_text("utf-8"), floors())


def with_floors(pins: str, lowest: dict[str, str]) -> str:
    """The constraints in `pins`, with these releases instead of others of the same packages."""
    kept = [
        line
        for line in pins.splitlines()
        if re.split(r"[=<>!~; \[]", line)[0].lower() not in lowest.keys() | TOO_NEW
    ]
    return "\n".join([*kept, *(f"{name}=={low}" for name, low in lowest.items())]) + "\n"


def other(name: str) -> dict[str, str]:
    """Which environment that is there has another torch: tests exchange states with it."""
    for one in ("pinned", "newest"):
        python = PLACE / one / "bin" / "python"
        if ENVIRONMENTS[one].torch != ENVIRONMENTS[name].torch and python.exists():
            return {"TORCHRELAY_OTHER_PYTHON": str(python)}
    return {}


def counts(found: Path) -> dict[str, Any]:
    """How many tests passed, failed and were skipped, by a file that pytest wrote."""
    suites = ElementTree.parse(found).getroot().iter("testsuite")
    total = dict.fromkeys(("tests", *OUTCOMES), 0)
    for suite in suites:
        for outcome in total:
            total[outcome] += int(suite.get(outcome, "0"))
    others = sum(total[outcome] for outcome in OUTCOMES)
    return {
        "passed": total["tests"] - others,
        "failed": total["failures"] + total["errors"],
        "skipped": total["skipped"],
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def versions(python: Path) -> dict[str, str]:
    """The versions that an environment has."""
    names = ("torch", "numpy", "msgspec", "xxhash")
    program = (
        "import json, platform, importlib.metadata as m; "
        f"print(json.dumps({{'python': platform.python_version(), "
        f"**{{n: m.version(n) for n in {names}}}}}))"
    )
    said = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(said.stdout)
    return found


def note(row: dict[str, Any]) -> None:
    """Put a row into the result file, in place of an older one of that name."""
    rows = json.loads(RESULT.read_text("utf-8"))["rows"] if RESULT.exists() else []
    rows = [one for one in rows if one["name"] != row["name"]] + [row]
    text = json.dumps({"benchmark": "versions", "rows": rows}, indent=1) + "\n"
    RESULT.write_text(text, encoding="utf-8")


def main() -> int:
    given, words = sys.argv[1:], []
    if "--" in given:
        at = given.index("--")
        given, words = given[:at], given[at + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--remove", action="store_true", help="delete each environment afterwards")
    parser.add_argument("--pins", action="store_true", help="only print the constraints of oldest")
    asked = parser.parse_args(given)
    if asked.pins:
        print(lowest_pins(), end="")
        return 0
    if unknown := set(asked.names) - set(ENVIRONMENTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    os.environ.pop("VIRTUAL_ENV", None)
    failed = 0
    for name in asked.names or ENVIRONMENTS:
        row = tested(name, ENVIRONMENTS[name], words)
        failed += row["failed"]
        note(row)
        if asked.remove:
            shutil.rmtree(PLACE / name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
