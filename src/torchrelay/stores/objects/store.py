"""Checkpoints in object storage: S3 and what speaks like it, Google Cloud Storage, Azure.

    <prefix>/step-100/manifest.json                  the commit record, put last
    <prefix>/step-100/<token>/model.safetensors      data of the draft with that token
    <prefix>/step-300/<token>/manifest.json          says that a rollback set that folder aside

Objects cannot be renamed, so a draft's data stay where they are written and putting the manifest is
the commit. Which folder is the step's own is an attribute of the manifest object: the record and
what it refers to change in one request.
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from math import ceil
from weakref import WeakSet

from torchrelay.errors import UsageError
from torchrelay.memory.crew import Crew
from torchrelay.steps import MAX_STEP
from torchrelay.stores.local.final_act import FinalAct, unknown
from torchrelay.stores.local.removal import ownership
from torchrelay.stores.objects.bucket import Bucket, ObjectInfo
from torchrelay.stores.objects.reader import ObjectStep, check_name
from torchrelay.stores.retry import ONCE, Retry
from torchrelay.stores.seam import DATA_NAME, MANIFEST, MAX_MANIFEST_BYTES, Buffer

TOKEN = "torchrelaytoken"  # letters only: Azure and proxies refuse or drop other names
PART_BYTES = 16 << 20
LEAST_PART_BYTES = 5 << 20  # S3 takes no smaller part
MAX_PARTS = 10_000  # of one object, on S3 and GCS
CONCURRENCY = 8
DAY = 24 * 3600.0

_TOKEN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})")
_FOLDER = re.compile(rf"{_STEP.pattern}/([^/]+)")
_DATA = re.compile(rf"{_FOLDER.pattern}/([^/]+)")

# Drafts of this process that may still be committed: `clean` spares them, whatever their age.
_live: WeakSet[ObjectDraft] = WeakSet()
_live_lock = threading.Lock()


class ObjectStore:
    """Checkpoints below `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`;
    `memory://` is a private one for tests. Credentials, region and endpoint are those of the
    environment (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, ...) or of the machine's role.

    `timeout`: seconds that one request may take, with its retries. `grace`: seconds after its last
    object that a draft counts as left behind, since no machine sees whether another's writer is
    alive. An open data file holds about `concurrency + 2` parts of `part_bytes` in memory.

    A reader of a step that is replaced or deleted meanwhile gets `FileNotFoundError`. Make a store
    per process: it does not survive a fork. The parts of an upload whose process died are
    invisible here; a lifecycle rule of the bucket (abort incomplete multipart uploads) frees them.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 300.0,
        grace: float = DAY,
        part_bytes: int = PART_BYTES,
        concurrency: int = CONCURRENCY,
    ) -> None:
        if part_bytes < LEAST_PART_BYTES:
            raise UsageError(f"part_bytes={part_bytes}: services take {LEAST_PART_BYTES} or more")
        if concurrency < 1:
            raise UsageError(f"concurrency={concurrency}: at least one request has to run")
        self._bucket = Bucket(url, timeout=timeout)
        self.url = self._bucket.url
        self._grace = grace
        self._part_bytes = part_bytes
        self._concurrency = concurrency
        self._crew = Crew(concurrency)

    def steps(self) -> list[int]:
        folders = self._step_folders()
        while True:
            committed = self._crew.each(self._bucket.has, map(_manifest, folders))
            steps = [step for step, there in zip(folders, committed, strict=True) if there]
            # One that was removed since it was listed has a successor, which may not be listed.
            if len(steps) == len(folders) or (again := self._step_folders()) == folders:
                return steps
            folders = again

    def _step_folders(self) -> list[int]:
        try:
            names = self._bucket.folders()
        except OSError as fault:
            if fault.errno != errno.EILSEQ:
                raise
            names = [one.path.partition("/")[0] for one in self._objects()]
        matches = map(_STEP.fullmatch, set(names))
        steps = sorted(int(match[1]) for match in matches if match)
        return [step for step in steps if step <= MAX_STEP]

    def _objects(self) -> list[ObjectInfo]:
        """All objects of steps and drafts. Names that the library cannot list, of other objects,
        mostly come before those."""
        return self._bucket.objects(after="step-")

    def open(self, step: int, patience: Retry = ONCE) -> ObjectStep:
        return ObjectStep(self._bucket, self._crew, step, partial(self._folder, step), patience)

    def mark(self, step: int) -> str:
        return self._token(step)

    def _sizes(self, folder: str) -> dict[str, int]:
        found = self._bucket.objects(folder)
        matches = [(_DATA.fullmatch(one.path), one.nbytes) for one in found]
        return {match[3]: size for match, size in matches if match and match[3] != MANIFEST}

    def draft(self, step: int, token: str, *, overwrite: bool = False) -> ObjectDraft:
        if step < 0:
            raise UsageError(f"step {step} is negative")
        if not _TOKEN.fullmatch(token) or token == MANIFEST:
            raise UsageError(f"{token!r} cannot be a token")
        return ObjectDraft(self, step, token, overwrite)

    def delete(self, step: int) -> None:
        token = self._token(step)
        manifest = None
        with suppress(OSError):
            manifest = self._bucket.get(_manifest(step), MAX_MANIFEST_BYTES)[0]
        self._bucket.remove([_manifest(step)])
        if token:
            self._remove_own(f"step-{step}/{token}", manifest)

    def _remove_own(self, folder: str, manifest: bytes | None = None) -> None:
        """Remove the objects of a step with this record, or of a draft; others stay."""
        own = ownership(manifest)
        found = [one.path for one in self._bucket.objects(folder)]
        # Its own manifest first: without it, what a crash leaves is one more draft.
        found.sort(key=lambda path: not path.endswith(f"/{MANIFEST}"))
        names = [(path, _DATA.fullmatch(path)) for path in found]
        self._bucket.remove(
            [path for path, match in names if match and (match[3] == MANIFEST or own(match[3]))]
        )

    def set_aside(self, step: int) -> str:
        # A folder with a manifest of its own is spared by `clean`. While the step has its own too,
        # it is a step as before: taking that away is the one act that counts.
        content, attributes = self._bucket.get(_manifest(step), MAX_MANIFEST_BYTES)
        folder = self._folder(step, attributes)
        self._bucket.put(f"{folder}/{MANIFEST}", content, attributes, create=False)
        self._bucket.remove([_manifest(step)])
        return folder

    def aside(self) -> list[str]:
        found = [_DATA.fullmatch(one.path) for one in self._objects()]
        folders = [(int(match[1]), match[2]) for match in found if match and match[3] == MANIFEST]
        return [
            f"step-{step}/{token}" for step, token in sorted(folders) if self._is_aside(step, token)
        ]

    def _is_aside(self, step: int, token: str) -> bool:
        """Whether a folder with a manifest of its own is none of a step's."""
        try:
            return self._token(step) != token
        except FileNotFoundError:
            return True

    def remove_aside(self, name: str) -> None:
        match = _FOLDER.fullmatch(name)
        if (
            match is None
            or not self._bucket.has(f"{name}/{MANIFEST}")
            or not self._is_aside(int(match[1]), match[2])
        ):
            raise FileNotFoundError(
                errno.ENOENT, "nothing was set aside under this name", self._bucket.name(name)
            )
        self._remove_own(name, self._bucket.get(f"{name}/{MANIFEST}", MAX_MANIFEST_BYTES)[0])

    def clean(self) -> list[str]:
        drafts: dict[tuple[int, str], list[tuple[datetime, str]]] = {}
        for path, _, modified in self._objects():
            match = _DATA.fullmatch(path)
            if match and (match[3] == MANIFEST or DATA_NAME.fullmatch(match[3])):
                drafts.setdefault((int(match[1]), match[2]), []).append((modified, path))
        removed = []
        for (step, token), objects in sorted(drafts.items()):
            if any(path.endswith(f"/{MANIFEST}") for _, path in objects):
                continue
            age = datetime.now(timezone.utc) - max(objects)[0]
            if age.total_seconds() < self._grace or self._is_live(step, token):
                continue
            # Asked after the listing, so that a draft committed meanwhile is seen as a step.
            with suppress(FileNotFoundError):
                if self._token(step) in (token, ""):
                    continue
            self._bucket.remove([path for _, path in objects])
            removed.append(f"step-{step}/{token}")
        return removed

    def _is_live(self, step: int, token: str) -> bool:
        with _live_lock:
            return any(draft.key == (self.url, step, token) for draft in _live)

    def free_bytes(self) -> int | None:
        return None

    def _token(self, step: int, attributes: Mapping[str, str] | None = None) -> str:
        """Which draft a step was, by its manifest's attributes; "" where that cannot be told."""
        if attributes is None:
            attributes = self._bucket.attributes(_manifest(step))
        token = attributes.get(TOKEN)
        if token is None:  # lost by a tool that copied the bucket without attributes
            folders = self._bucket.folders(f"step-{step}")
            if len(folders) > 1:
                aside = f"step-{step}/{{}}/{MANIFEST}".format
                folders = [folder for folder in folders if not self._bucket.has(aside(folder))]
            token = folders[0] if len(folders) == 1 else ""
        return token if _TOKEN.fullmatch(token) else ""

    def _folder(self, step: int, attributes: Mapping[str, str]) -> str:
        token = self._token(step, attributes)
        if not token:
            name = self._bucket.name(_manifest(step))
            reason = f"the object has no attribute {TOKEN!r} that says which folder holds its data"
            raise OSError(errno.EINVAL, reason, name)
        return f"step-{step}/{token}"


class ObjectDraft:
    """See `seam.Draft`. `begin` writes nothing: a draft is there with its first data object."""

    def __init__(self, store: ObjectStore, step: int, token: str, overwrite: bool) -> None:
        self._store = store
        self._bucket = store._bucket
        self._step = step
        self._token = token
        self._overwrite = overwrite
        self._folder = f"step-{step}/{token}"
        self._act = FinalAct()
        self.key = (store.url, step, token)
        self.mark = token

    def begin(self) -> None:
        name = self._bucket.name(_manifest(self._step))
        with suppress(FileNotFoundError):
            committed = self._store._token(self._step)
            if not self._overwrite:
                raise FileExistsError(errno.EEXIST, "the step is committed", name)
            if committed == self._token:
                raise UsageError(f"{name} was committed with token {self._token}: take a new one")
        self._set_live(True)

    def open(self, name: str, nbytes: int) -> ObjectSink:
        check_name(name)
        self._set_live(True)
        part_bytes = max(self._store._part_bytes, ceil(nbytes / MAX_PARTS))
        path = f"{self._folder}/{name}"
        return ObjectSink(self, self._bucket, path, nbytes, part_bytes, self._store._concurrency)

    def sizes(self) -> dict[str, int]:
        return self._store._sizes(self._folder)

    def commit(self, manifest: bytes) -> None:
        replaced, before = "", b""
        if self._overwrite:
            with suppress(FileNotFoundError):
                replaced = self._store._token(self._step)
                before = self._bucket.get(_manifest(self._step), MAX_MANIFEST_BYTES)[0]
        attributes = {TOKEN: self._token, "Content-Type": "application/json"}
        path = _manifest(self._step)
        with self._act.begun():
            try:
                self._bucket.put(path, manifest, attributes, create=not self._overwrite)
            except OSError as fault:
                self._decide(fault, manifest)
        self._set_live(False)
        if replaced and replaced != self._token:
            with suppress(OSError):  # the step is committed; `clean` removes what is left
                self._store._remove_own(f"step-{self._step}/{replaced}", before)

    def _decide(self, fault: OSError, manifest: bytes) -> None:
        """Raise what a failed put means. A lost answer, or the retry after one, looks like a
        failure: the object decides. Unless the service refused it, it may still arrive."""
        there = self._is_in_place(manifest)
        if there:
            return
        if isinstance(fault, PermissionError):
            raise fault
        if isinstance(fault, FileExistsError) and there is not None:
            raise fault
        name = self._bucket.name(_manifest(self._step))
        raise unknown(self._step, fault.strerror or str(fault), name) from fault

    def _is_in_place(self, manifest: bytes) -> bool | None:
        """Whether this draft is the step; None where that cannot be told."""
        try:
            content, attributes = self._bucket.get(_manifest(self._step), MAX_MANIFEST_BYTES)
        except FileNotFoundError:
            return False
        except OSError:
            return None
        return content == manifest and attributes.get(TOKEN) == self._token

    def revoke(self) -> bool:
        return self._act.revoke()

    def discard(self) -> None:
        if not self.revoke():
            return
        self._set_live(False)
        with suppress(OSError):
            try:
                # A commit that seemed to fail may have arrived: its data stay.
                committed: str | None = self._store._token(self._step)
            except FileNotFoundError:
                committed = None
            if committed not in (self._token, ""):
                self._store._remove_own(self._folder)

    def _set_live(self, live: bool) -> None:
        with _live_lock:
            (_live.add if live else _live.discard)(self)


class ObjectSink:
    """One object being uploaded: in parts, several at a time, if it is larger than one part."""

    ordered = True

    def __init__(
        self,
        draft: ObjectDraft,
        bucket: Bucket,
        path: str,
        nbytes: int,
        part_bytes: int,
        concurrency: int,
    ) -> None:
        self._draft = draft  # keeps it live
        self._bucket = bucket
        self._path = path
        self._nbytes = nbytes
        self._part_bytes = part_bytes
        self._part = bytearray()  # handed over when it is full; the writer makes no copy
        self._written = 0
        self._open = True
        self._begun = False
        self._writer = bucket.writer(path, part_bytes, concurrency)

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        self._check_open()
        if position != self._written:
            raise UsageError(f"{self._path}: byte {self._written} is next, not {position}")
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        if position + sum(map(len, views)) > self._nbytes:
            raise UsageError(f"{self._path}: more than the {self._nbytes} bytes it was opened for")
        for view in views:
            while len(view):
                piece = view[: self._part_bytes - len(self._part)]
                self._part += piece
                self._written += len(piece)
                view = view[len(piece) :]
                if len(self._part) == self._part_bytes:
                    self._hand_over()
                    self._begun = True

    def _hand_over(self) -> None:
        part, self._part = self._part, bytearray()
        try:
            with self._bucket.named(self._path):
                self._writer.write(part)
        except BaseException:
            self._stop()
            raise

    def finish(self) -> None:
        self._check_open()
        name = self._bucket.name(self._path)
        if self._written != self._nbytes:
            reason = f"{self._written} of {self._nbytes} bytes were written"
            raise OSError(errno.EIO, reason, name)
        if self._part:
            self._hand_over()
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
        if self._open and self._begun:
            with suppress(OSError), self._bucket.named(self._path):
                self._writer.close()
        self._open = False
        self._part = bytearray()

    def _check_open(self) -> None:
        if not self._open:
            raise UsageError(f"{self._path}: the file is finished, aborted or failed")


def _manifest(step: int) -> str:
    return f"step-{step}/{MANIFEST}"
