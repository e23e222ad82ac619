"""Probes of a bucket that steps are saved to: conditional puts, uploads in parts, and speed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torchrelay.check.report import Finding, Verdict
from torchrelay.errors import RelayError
from torchrelay.stores.objects.bucket import Bucket

AREA = "bucket"
NBYTES = 64 << 20
PART_BYTES = 8 << 20
REQUEST_SECONDS = 20.0
LEAST_SPEED = 0.05e9


def probe(url: str) -> list[Finding]:
    """Try a bucket from this process."""
    prefix = f"torchrelay-check-{os.urandom(6).hex()}"
    try:
        bucket = Bucket(f"{url.rstrip('/')}/{prefix}", timeout=REQUEST_SECONDS)
        return judge(url, facts(bucket))
    except (OSError, RelayError) as fault:
        remedy = "check the name, the credentials and the endpoint in the environment"
        return [Finding(AREA, url, "problem", f"cannot be used: {_why(fault)}", remedy)]


def facts(bucket: Bucket) -> dict[str, Any]:
    """The facts of an empty prefix, which is empty again afterwards. `OSError` where the
    bucket cannot be written at all."""
    made = ["first.json", "large"]
    found: dict[str, Any] = {}
    try:
        bucket.put("first.json", b"{}", create=False)
        try:
            bucket.put_once("first.json", b"[]")
            found["conditional"] = "a second writer replaced the object of the first"
        except FileExistsError:
            found["conditional"] = ""
        except (NotImplementedError, OSError) as fault:
            found["conditional"] = _why(fault)
        found.update(_speeds(bucket))
    finally:
        for name in made:
            with suppress(OSError):
                bucket.remove([name])
    return found


def _speeds(bucket: Bucket) -> dict[str, Any]:
    block = os.urandom(PART_BYTES)
    try:
        begin = time.perf_counter()
        writer = bucket.writer("large", PART_BYTES, 8)
        with bucket.named("large"):
            for _ in range(NBYTES // PART_BYTES):
                writer.write(block)
            writer.close()
        write = NBYTES / (time.perf_counter() - begin)
        begin = time.perf_counter()
        count = bucket.nbytes("large")
        for start in range(0, count, PART_BYTES):
            if bucket.read_range("large", start, PART_BYTES) != block:
                return {"parts": "an upload in parts came back with other bytes"}
        return {"parts": "", "write": write, "read": count / (time.perf_counter() - begin)}
    except OSError as fault:
        return {"parts": _why(fault)}


def judge(url: str, found: Mapping[str, Any]) -> list[Finding]:
    """Rows about a bucket."""
    rows = [Finding(AREA, "access", "ok", url)]
    if found["conditional"]:
        rows.append(
            Finding(
                AREA,
                "conditional puts",
                "problem",
                found["conditional"],
                "turn them on (S3: If-None-Match; MinIO since 2024; Ceph since Squid): until then "
                "two jobs that save the same step at once may both believe that theirs is it",
            )
        )
    else:
        rows.append(Finding(AREA, "conditional puts", "ok", "the second of two writers is refused"))
    if found["parts"]:
        remedy = "the permissions of multipart uploads are s3:PutObject, s3:AbortMultipartUpload"
        rows.append(Finding(AREA, "upload in parts", "problem", found["parts"], remedy))
        return rows
    rows.append(Finding(AREA, "upload in parts", "ok", f"{NBYTES >> 20} MiB came back exact"))
    for name in ("write", "read"):
        speed = found[name]
        verdict: Verdict = "ok" if speed >= LEAST_SPEED else "slow"
        remedy = "" if verdict == "ok" else "use a bucket of the same region, and its private link"
        shown = f"{speed / 1e9:.3g} GB/s by one process"
        rows.append(Finding(AREA, f"{name} speed", verdict, shown, remedy))
    return rows


def _why(fault: BaseException) -> str:
    if isinstance(fault, OSError) and fault.strerror:
        return fault.strerror
    return str(fault)
