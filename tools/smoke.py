"""Try what is about to be released: `python -m tools.smoke [PYTHON...]`, after `make package`.

For each interpreter (default: this one) and each archive in `dist`, an empty environment is made,
the archive installed, and every script of the README run there; then the extra `cli` is added for
the command and a small demo. Ends with status 1 at the first step that fails, and shows its output.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
SECONDS = 900.0


class SmokeError(Exception):
    """A step failed; the message has its command and output."""


def scripts() -> list[str]:
    """The scripts of the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def archives(dist: Path) -> list[Path]:
    """The wheel and the source archive. Raises `SmokeError` if one is missing or there are more."""
    found = [*sorted(dist.glob("*.whl")), *sorted(dist.glob("*.tar.gz"))]
    if [path.suffix for path in found] != [".whl", ".gz"]:
        names = [path.name for path in found]
        raise SmokeError(
            f"{dist} has {names}, not a wheel and a source archive: run `make package`"
        )
    return found


def try_archive(python: str, archive: Path, folder: Path, options: Sequence[str] = ()) -> None:
    """Install an archive in an empty environment below `folder`, and use it. `options` go to pip.
    Raises `SmokeError`."""
    run([python, "-m", "venv", "env"], folder)
    inside = folder / "env" / "bin"
    install = [str(inside / "python"), "-m", "pip", "install", "-q", *options]
    run([*install, str(archive)], folder)
    for number, script in enumerate(scripts()):
        place = folder / str(number)
        place.mkdir()
        (place / "script.py").write_text(script, encoding="utf-8")
        run([str(inside / "python"), "script.py"], place)
    command = str(inside / "torchrelay")
    without_extra = run([command, "--version"], folder, code=2)
    if "pip install 'torchrelay[cli]'" not in without_extra:
        raise SmokeError(f"the command does not name the extra that it needs:\n{without_extra}")
    run([*install, f"{archive}[cli]"], folder)
    run([command, "--version"], folder)
    run([command, "demo", "--small"], folder)


def run(command: Sequence[str], folder: Path, code: int = 0) -> str:
    """The output of a command that ends with this status. Raises `SmokeError` for another one."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=clean,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise SmokeError(f"{' '.join(command)}\n{fault}") from fault
    if done.returncode != code:
        raise SmokeError(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", default=[sys.executable])
    try:
        for python in parser.parse_args().pythons:
            for archive in archives(DIST):
                with tempfile.TemporaryDirectory() as folder:
                    try_archive(python, archive, Path(folder))
                print(f"{archive.name} works with {python}", flush=True)
    except SmokeError as fault:
        print(fault, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
