"""What answers a page is part of a process that starts fast: it imports no torch."""

from __future__ import annotations

import subprocess
import sys


def test_the_server_process_imports_no_torch() -> None:
    program = (
        "import sys, torchrelay.endpoint.server.program, torchrelay.endpoint.page.answers\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False\n", done.stderr
