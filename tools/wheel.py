"""What installing the wheel does to an environment: `python -m tools.wheel [PYTHON...]`.

The wheel is built, and pip is asked what it would install next to what each interpreter (default:
this one) has. Nothing is installed. Ends with status 1 if a version would change.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 600.0


class Effect(NamedTuple):
    """Packages that an installation adds, and those whose version it changes, with the versions
    before and after."""

    added: dict[str, str]
    changed: dict[str, tuple[str, str]]


def build(folder: Path) -> Path:
    """Build the wheel of this tree, from a copy of it, in a folder."""
    copy = folder / "tree"
    copy.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    command = [sys.executable, "-m", "build", "-q", "--wheel", "--outdir", str(folder), str(copy)]
    subprocess.run(command, check=True, timeout=SECONDS, stdout=sys.stderr)
    return next(folder.glob("*.whl"))


def effect_on(python: str, wheel: Path, *options: str) -> Effect:
    """What pip would do to install the wheel next to what an interpreter has."""
    before = {one["name"].lower(): one["version"] for one in json.loads(_pip(python, "list"))}
    wanted = _planned(python, str(wheel), *options)
    changed = {name: (before[name], new) for name, new in wanted.items() if name in before}
    return Effect({name: new for name, new in wanted.items() if name not in before}, changed)


def wheels_for(version: str, requirements: list[str]) -> dict[str, str]:
    """The releases that another Python on this kind of machine would take, of each requirement
    alone. Raises if one has no wheel for it."""
    with tempfile.TemporaryDirectory() as folder:
        where = ["--target", folder, "--python-version", version, "--only-binary", ":all:"]
        return _planned(sys.executable, "--no-deps", *where, *requirements)


def _planned(python: str, *what: str) -> dict[str, str]:
    report: dict[str, Any] = json.loads(_pip(python, "install", *what))
    chosen = [one["metadata"] for one in report["install"]]
    return {one["name"].lower(): one["version"] for one in chosen}


def _pip(python: str, task: str, *what: str) -> str:
    """pip's answer as JSON. This interpreter's pip asks for the other one, which may have none."""
    how = ["--format", "json"] if task == "list" else ["--dry-run", "--quiet", "--report", "-"]
    command = [sys.executable, "-m", "pip", "--python", python, task, *how, *what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", default=[sys.executable])
    asked = parser.parse_args()
    changes = 0
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        for python in asked.pythons:
            found = effect_on(python, wheel)
            changes += len(found.changed)
            print(python)
            for name, version in sorted(found.added.items()):
                print(f"  adds {name} {version}")
            for name, (old, new) in sorted(found.changed.items()):
                print(f"  CHANGES {name} {old} to {new}")
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
