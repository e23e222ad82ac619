"""Make torchft's Python files importable by the tests, on any machine.

torchft ships compiled wheels for x86_64 only; its Python files run anywhere. This unpacks them into
`<prefix>/torchft-src`, which is on nobody's path: a test that wants them adds it. A download that
fails is not an error here, since the tests skip and say why.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.2.0"
DESTINATION = Path(sys.prefix) / "torchft-src"
DOWNLOAD_SECONDS = 120


def fetch() -> str:
    """Fill `DESTINATION` unless it is there already; return what happened, in words."""
    if (DESTINATION / f"torchft-{VERSION}.dist-info").is_dir():
        return f"torchft {VERSION} is in {DESTINATION}"
    with tempfile.TemporaryDirectory(dir=sys.prefix) as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        command += ["--only-binary", ":all:", "--python-version", "3.11"]
        command += ["--platform", "manylinux_2_17_x86_64", "--platform", "manylinux2014_x86_64"]
        command += ["--dest", scratch, f"torchft=={VERSION}"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return (
                f"torchft not fetched: no download within {DOWNLOAD_SECONDS} s; its tests will skip"
            )
        wheels = list(Path(scratch).glob("torchft-*.whl"))
        if done.returncode != 0 or not wheels:
            reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            return f"torchft not fetched: {reason[:200]}; its tests will skip"
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(unpacked)
        shutil.rmtree(DESTINATION, ignore_errors=True)
        unpacked.rename(DESTINATION)
    return f"torchft {VERSION} unpacked into {DESTINATION}"


if __name__ == "__main__":
    print(fetch())
