"""A step that is being written to object storage, and its data objects."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from math import ceil

from torchrelay.errors import UsageError
from torchrelay.stores.draft import Buffer, CommitPoint, CommittedFile
from torchrelay.stores.listing import MAX_MANIFEST_BYTES, Listing
from torchrelay.stores.local.removal import ownership
from torchrelay.stores.objects.bucket import Bucket
from torchrelay.stores.objects.reuse import CopiedObject, path_of
from torchrelay.stores.objects.step import (
    HEAD_BYTES,
    check_name,
    committed_at,
    manifest_path,
    split_folder,
    with_folder,
)
from torchrelay.stores.retry import commit_unknown
from torchrelay.stores.step_files import DataReader

PART_BYTES = 16 << 20  # S3 takes none below 5 MiB
MAX_PARTS = 10_000  # of one object, on S3 and GCS
CONCURRENCY = 8  # requests at once
LEFT_AGE = timedelta(hours=12)  # of an object that is used again: `clean` takes those of a day
PUTS = 4  # of one manifest, before it is not known whether it arrived


def folder_of(bucket: Bucket, step: int) -> str:
    """The folder with the data of a step; "" if its manifest names none."""
    return split_folder(bucket.read_range(manifest_path(step), 0, HEAD_BYTES))[0]


def remove_own(bucket: Bucket, folder: str, record: bytes | None = None) -> None:
    """Remove the objects of a step with this record, or of a draft; others stay."""
    own = ownership(record)
    bucket.remove([f"{folder}/{name}" for name in bucket.sizes(folder) if own(name)])


class ObjectDraft(CommitPoint):
    """A `Draft` in a bucket. `begin` writes nothing: it exists with its first data object."""

    def __init__(self, bucket: Bucket, step: int, token: str, overwrite: bool) -> None:
        super().__init__()
        self._bucket, self._step, self._overwrite = bucket, step, overwrite
        self._token = self.id = token
        self._folder = f"step-{step}/{token}"
        self._left: dict[str, int] | None = None
        self.place = bucket.name(self._folder)

    def begin(self, listing: Listing | None = None) -> None:
        if listing is not None and self._step not in listing:
            return
        try:
            committed = folder_of(self._bucket, self._step)
        except FileNotFoundError:
            return
        name = self._bucket.name(manifest_path(self._step))
        if not self._overwrite:
            raise FileExistsError(errno.EEXIST, "the step is committed", name)
        if committed == self._token:
            raise UsageError(f"{name} was committed with token {self._token}: take a new one")

    def check_visible(self) -> None:
        """Nothing: a URL is the same bucket everywhere."""

    def open(self, name: str, nbytes: int) -> ObjectSink:
        check_name(name)
        return ObjectSink(self._bucket, f"{self._folder}/{name}", nbytes)

    def has(self, name: str, nbytes: int, check: Callable[[DataReader], bool]) -> bool:
        # An object is there once all of it has come.
        check_name(name)
        if self._left is None:
            oldest = datetime.now(timezone.utc) - LEFT_AGE
            found = self._bucket.objects(self._folder)
            self._left = {one.path: one.nbytes for one in found if one.modified > oldest}
        return self._left.get(f"{self._folder}/{name}") == nbytes

    def reuse(self, name: str, nbytes: int, source: CommittedFile) -> CopiedObject:
        check_name(name)
        return CopiedObject(self._bucket, f"{self._folder}/{name}", nbytes, source)

    def holds(self, source: CommittedFile, nbytes: int) -> bool:
        return True  # an object is never written to: one that is gone fails the copy

    def read(self, source: CommittedFile, position: int, view: memoryview) -> None:
        path = path_of(source)
        data = self._bucket.read_range(path, position, len(view))
        if len(data) != len(view):
            reason = f"it ends before byte {position + len(view)}"
            raise OSError(errno.EIO, reason, self._bucket.name(path))
        view[:] = data

    def sizes(self) -> dict[str, int]:
        return self._bucket.sizes(self._folder)

    def commit(self, manifest: bytes) -> None:
        path, content = manifest_path(self._step), with_folder(manifest, self._token)
        replaced, before = "", b""
        if self._overwrite:
            with suppress(FileNotFoundError):
                replaced, before = committed_at(self._bucket, self._step)
        with self.passing():
            self._put(path, content)
        if replaced and replaced != self._token:
            with suppress(OSError):  # the step is committed; `clean` removes what is left
                remove_own(self._bucket, f"step-{self._step}/{replaced}", before)

    def _put(self, path: str, content: bytes) -> None:
        """Put the manifest. A request whose outcome is unknown is sent again: it creates the same
        object, and only once."""
        deadline = time.monotonic() + self._bucket.timeout / 2
        for left in reversed(range(PUTS)):
            try:
                self._bucket.put(path, content, create=not self._overwrite)
                return
            except OSError as fault:
                if self._is_there(fault, path, content):
                    return
                if not left or time.monotonic() >= deadline:
                    name, why = self._bucket.name(path), fault.strerror or str(fault)
                    raise commit_unknown(self._step, why, name) from fault

    def _is_there(self, fault: OSError, path: str, content: bytes) -> bool:
        """Whether a put that seems to have failed was carried out: the object decides, since a lost
        answer, and the retry after it, look like failures. Raises the failure if the service
        refused the request. Otherwise the request may still arrive."""
        known = True
        try:
            if self._bucket.get(path, MAX_MANIFEST_BYTES) == content:
                return True
        except OSError as unread:
            known = isinstance(unread, FileNotFoundError)
        if isinstance(fault, PermissionError) or (isinstance(fault, FileExistsError) and known):
            raise fault
        return False

    def leave(self) -> None:
        """Nothing: its objects stay."""

    def discard(self) -> None:
        if not self.revoke():
            return
        with suppress(OSError):
            committed: str | None = None
            with suppress(FileNotFoundError):
                # A commit that seemed to fail may have arrived: its data stay.
                committed = folder_of(self._bucket, self._step)
            if committed not in (self._token, ""):
                remove_own(self._bucket, self._folder)


class ObjectSink:
    """One object being uploaded: in parts, several at a time, if it is larger than one part."""

    ordered = True

    def __init__(self, bucket: Bucket, path: str, nbytes: int) -> None:
        self._bucket, self._path, self._nbytes = bucket, path, nbytes
        self._part_bytes = max(PART_BYTES, ceil(nbytes / MAX_PARTS))
        self._writer = bucket.writer(path, self._part_bytes, CONCURRENCY)
        self._written = 0
        self._open = True

    def write(self, position: int, data: Buffer) -> None:
        self._check_open()
        if position != self._written:
            raise UsageError(f"{self._path}: byte {self._written} is next, not {position}")
        if position + len(data) > self._nbytes:
            raise UsageError(f"{self._path}: more than the {self._nbytes} bytes it was opened for")
        try:
            with self._bucket.named(self._path):
                self._writer.write(bytes(data))  # which it keeps
        except BaseException:
            self._stop()
            raise
        self._written += len(data)

    def finish(self) -> None:
        self._check_open()
        name = self._bucket.name(self._path)
        if self._written != self._nbytes:
            reason = f"{self._written} of {self._nbytes} bytes were written"
            raise OSError(errno.EIO, reason, name)
        self._open = False
        with self._bucket.named(self._path):
            self._writer.close()
        if (there := self._bucket.nbytes(self._path)) != self._nbytes:
            reason = f"{there} bytes are in the object, {self._nbytes} were written"
            raise OSError(errno.EIO, reason, name)

    def abort(self) -> None:
        self._stop()
        with suppress(OSError):
            self._bucket.remove([self._path])

    def _stop(self) -> None:
        """Let go of the upload, so that the service keeps no parts of it.

        obstore has no call for that: closing completes a sound upload (its object is removed after)
        and gives up a broken one. But a writer that has not begun its upload, which it does with
        the first whole part, must not be closed: it would put an object, and after a failed begin
        under a wrong name.
        """
        if self._open and self._written >= self._part_bytes:
            with suppress(OSError), self._bucket.named(self._path):
                self._writer.close()
        self._open = False

    def _check_open(self) -> None:
        if not self._open:
            raise UsageError(f"{self._path}: the file is finished, aborted or failed")
