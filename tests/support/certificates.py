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


def authority(folder: Path) -> dict[str, str]:
    """A private authority, and a certificate of this machine that it has signed: `cafile`,
    `certfile` and `keyfile`."""
    ca_key, ca = str(folder / "ca-key.pem"), str(folder / "ca.pem")
    key, request, cert = (str(folder / name) for name in ("key.pem", "request.pem", "cert.pem"))
    names = folder / "names.cnf"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    # Python 3.13 and later want this of an authority.
    signs = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    new = ["openssl", "req", "-newkey", "rsa:2048", "-nodes"]
    for command in (
        [
            *(*new, *signs, "-x509", "-keyout", ca_key, "-out", ca),
            *("-days", "2", "-subj", "/CN=authority"),
        ],
        [*new, "-keyout", key, "-out", request, "-subj", "/CN=localhost"],
        [
            *("openssl", "x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key),
            *("-CAcreateserial", "-out", cert, "-days", "2", "-extfile", str(names)),
        ],
    ):
        made = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if made.returncode:
            pytest.skip(f"openssl makes no certificate: {made.stderr[-200:]}")
    return {"cafile": ca, "certfile": cert, "keyfile": key}
