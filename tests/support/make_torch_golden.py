"""Write golden files of releases of torch: `python -m tests.support.make_torch_golden PYTHON...`

For each interpreter `tests/dropin/golden/torch-VERSION.zip` gets a DCP directory that torch's own
code wrote with two ranks, and the messages of torch's own `PGTransport`. With `--ours`
`ours-VERSION.zip` gets the same of this library, which the interpreter has to be able to import. A
file that is there stays as it is: later versions read what earlier ones wrote.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.support.torch_peers import ROOT, Peers

GOLDEN = ROOT / "tests" / "dropin" / "golden"
CONTENTS = ("plain", "dense", "distributed", "sharded")
DATE = (2026, 1, 1, 0, 0, 0)


def stock(peers: Peers, folder: Path) -> None:
    folder.mkdir()
    peers.both("save", how="stock", path=str(folder / "dcp"))
    for content in CONTENTS:
        peers.both("record", how="stock", content=content, file=str(folder / content))


def ours(peers: Peers, python: str, folder: Path) -> None:
    folder.mkdir()
    steps = folder / "steps"
    peers.both("save", how="writer", path=str(steps))
    peers.both("save", how="checkpointer", path=str(folder / "checkpointer"))
    convert = [python, "-m", "torchrelay", "convert", str(steps), str(folder / "converted")]
    environment = {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run([*convert, "--to", "dcp"], check=True, timeout=100, env=environment)
    for content in CONTENTS[:-1]:
        peers.both("record", how="ours", content=content, file=str(folder / content))


def pack(folder: Path, target: Path) -> None:
    """The files of a folder; their times are of no interest."""
    with zipfile.ZipFile(target, "x") as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                entry = zipfile.ZipInfo(str(file.relative_to(folder)), DATE)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, file.read_bytes(), compresslevel=9)
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size} bytes")


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    pythons = [word for word in sys.argv[1:] if word != "--ours"]
    for python in pythons:
        with Peers([python, python]) as peers, tempfile.TemporaryDirectory() as scratch:
            (version, _), _ = peers.both("versions")
            if not (target := GOLDEN / f"torch-{version}.zip").exists():
                stock(peers, Path(scratch, "stock"))
                pack(Path(scratch, "stock"), target)
            if "--ours" in sys.argv and not (target := GOLDEN / f"ours-{version}.zip").exists():
                ours(peers, python, Path(scratch, "ours"))
                pack(Path(scratch, "ours"), target)


if __name__ == "__main__":
    main()
