"""A committed step in object storage, and reads of its data objects."""

from __future__ import annotations

import errno
import re
import threading

from torchrelay.errors import UsageError
from torchrelay.memory.thread_pool import ThreadPool
from torchrelay.stores.listing import MANIFEST, MAX_MANIFEST_BYTES
from torchrelay.stores.objects.bucket import Bucket
from torchrelay.stores.retry import Retry
from torchrelay.stores.step_files import DataReader
from torchrelay.stores.store import StoredStep

RANGE_BYTES = 8 << 20  # of one request of a large read
HEAD_BYTES = 256  # of a manifest, which name its folder

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
TOKEN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_FOLDER = re.compile(rb'\{"folder":"([A-Za-z0-9_][A-Za-z0-9._-]*)"(?:,|(?=\}))')


def manifest_path(step: int) -> str:
    return f"step-{step}/{MANIFEST}"


def with_folder(record: bytes, token: str) -> bytes:
    """A commit record, which is a JSON object, with the name of the folder of its data."""
    if not record.startswith(b"{"):
        raise UsageError("a commit record is a JSON object")
    comma = b"" if record.startswith(b"{}") else b","
    return b'{"folder":"%b"%b%b' % (token.encode(), comma, record[1:])


def split_folder(manifest: bytes) -> tuple[str, bytes]:
    """The folder and the commit record; "" for a manifest that names no folder."""
    match = _FOLDER.match(manifest)
    if match is None:
        return "", manifest
    return match[1].decode(), b"{" + manifest[match.end() :]


def committed_at(bucket: Bucket, step: int) -> tuple[str, bytes]:
    """The folder of a step, and its commit record."""
    return split_folder(bucket.get(manifest_path(step), MAX_MANIFEST_BYTES))


class ObjectStep(StoredStep):
    """One request brings the record and the name of its folder."""

    costly_reads = True
    trusted = False

    def __init__(self, bucket: Bucket, pool: ThreadPool, step: int, patience: Retry) -> None:
        self._bucket, self._pool, self._step, self._patience = bucket, pool, step, patience
        self.url = bucket.name(f"step-{step}")
        self._sizes: dict[str, int] | None = None
        self._lock = threading.Lock()
        self._token, self._record = patience(lambda: committed_at(bucket, step))

    def manifest(self) -> bytes:
        return self._record

    @property
    def _folder(self) -> str:
        if not self._token:
            reason = "the manifest names no folder with its data"
            raise OSError(errno.EINVAL, reason, self._bucket.name(manifest_path(self._step)))
        return f"step-{self._step}/{self._token}"

    def sizes(self) -> dict[str, int]:
        folder = self._folder
        return self._patience(lambda: self._bucket.sizes(folder))

    def reader(self, name: str, *, once: bool = True) -> ObjectReader:
        check_name(name)
        path = f"{self._folder}/{name}"
        nbytes = self._listed().get(name)
        if nbytes is None:  # a service may list an object late
            nbytes = self._patience(lambda: self._bucket.nbytes(path))
        return ObjectReader(self._bucket, self._pool, path, self._patience, nbytes)

    def _listed(self) -> dict[str, int]:
        """Bytes of its data objects, which are never written twice: one request for a thousand.
        Empty where they may not be listed."""
        with self._lock:
            if self._sizes is None:
                try:
                    self._sizes = self.sizes()
                except OSError as fault:
                    if fault.errno not in (errno.EACCES, errno.EILSEQ):
                        raise
                    self._sizes = {}
            return self._sizes

    def close(self) -> None:
        pass


class ObjectReader(DataReader):
    """One data object, which is never written twice. Large reads are split into ranges that are
    fetched in parallel."""

    cold = batched = True

    def __init__(
        self, bucket: Bucket, pool: ThreadPool, path: str, patience: Retry, nbytes: int
    ) -> None:
        self._bucket, self._pool, self._path, self._patience = bucket, pool, path, patience
        self.nbytes = nbytes

    def read_into(self, position: int, view: memoryview) -> None:
        end = position + len(view)
        if end > self.nbytes:
            name = self._bucket.name(self._path)
            raise EOFError(f"{name} has {self.nbytes} bytes, the read ends at {end}")
        cuts = range(0, len(view), RANGE_BYTES)
        parts = [(position + at, view[at : at + RANGE_BYTES]) for at in cuts]
        if len(parts) == 1:
            self._fetch(*parts[0])
            return
        # After a failure too, nothing writes into the caller's buffers once this returns.
        self._pool.each(lambda part: self._fetch(*part), parts)

    def _fetch(self, start: int, view: memoryview) -> None:
        fetched = self._patience(lambda: self._bucket.read_range(self._path, start, len(view)))
        if len(fetched) != len(view):
            name = self._bucket.name(self._path)
            raise EOFError(f"{name} gave {len(fetched)} of {len(view)} bytes at byte {start}")
        view[:] = fetched


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be the name of a data file: letters, digits and ._-")
