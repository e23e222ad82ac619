"""Certificates of this machine, signed by themselves."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def certificate(folder: Path) -> tuple[str, str]:
    """Files with a key, and with a certificate for it of localhost and 127.0.0.1."""
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key]
    command += ["-out", cert, "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if made.returncode:
        pytest.skip(f"openssl makes no certificate: {made.stderr[-200:]}")
    return key, cert
