"""Checkpoints in object storage: S3 and compatible services, Google Cloud Storage, Azure.

    <prefix>/step-100/manifest.json                  the commit record, put last
    <prefix>/step-100/<token>/model.safetensors      data of the draft with that token

Objects cannot be renamed, so the data of a draft stay where they are written, and putting the
manifest is the commit. The manifest names the folder with its data: the record and what it refers
to change in one request.
"""

from __future__ import annotations

import errno
import re
from contextlib import suppress
from datetime import datetime, timezone
from itertools import compress
from pathlib import PurePosixPath

from torchrelay.errors import UsageError
from torchrelay.memory.thread_pool import ThreadPool
from torchrelay.steps import MAX_STEP
from torchrelay.stores.listing import DATA_NAME, MANIFEST, Listing, settled
from torchrelay.stores.lookalikes import MOST, explain
from torchrelay.stores.objects.bucket import Bucket, ObjectInfo
from torchrelay.stores.objects.draft import CONCURRENCY, ObjectDraft, folder_of, remove_own
from torchrelay.stores.objects.step import TOKEN, ObjectStep, committed_at, manifest_path
from torchrelay.stores.retry import ONCE, Retry

DAY = 24 * 3600.0

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})")
_DATA = re.compile(rf"{_STEP.pattern}/([^/]+)/([^/]+)")


class ObjectStore:
    """Checkpoints below `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`;
    `memory://` is a private one for tests. Credentials, region and endpoint are those of the
    environment (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, ...) or of the machine's role.

    `timeout`: seconds that one request may take, with its retries. `grace`: seconds after its last
    object that a draft counts as left behind, since no machine sees whether another's writer is
    alive. An open data file holds about `CONCURRENCY + 2` parts of `PART_BYTES` in memory.

    A reader of a step that is replaced or deleted meanwhile gets `FileNotFoundError`. Make a store
    per process: it does not survive a fork. The parts of an upload whose process died are
    invisible here; a lifecycle rule of the bucket (abort incomplete multipart uploads) frees them.
    """

    def __init__(self, url: str, *, timeout: float = 300.0, grace: float = DAY) -> None:
        self._bucket = Bucket(url, timeout=timeout)
        self.url = self._bucket.url
        self._grace = grace
        self._pool = ThreadPool(CONCURRENCY)

    def steps(self) -> list[int]:
        def committed(listing: Listing) -> list[int]:
            there = self._pool.each(self._bucket.has, map(manifest_path, listing))
            return list(compress(listing, there))

        return settled(self.listing, committed)

    def listing(self) -> Listing:
        try:
            names, _ = self._bucket.below()
        except OSError as fault:
            if fault.errno != errno.EILSEQ:
                raise
            names = [one.path.partition("/")[0] for one in self._objects()]
        matches = map(_STEP.fullmatch, set(names))
        steps = sorted(int(match[1]) for match in matches if match)
        return {step: [(f"step-{step}", 0)] for step in steps if step <= MAX_STEP}

    def _objects(self) -> list[ObjectInfo]:
        """All objects of steps and drafts. Names of other objects that the library cannot list
        mostly come before those."""
        return self._bucket.objects(after="step-")

    def lookalike(self) -> str:
        # Data without a record are those of a save that did not end, as far as anyone can tell.
        paths = [path for path in self._bucket.some(MOST) if not _DATA.fullmatch(path)]
        folders = {f"{above}/" for path in paths for above in map(str, PurePosixPath(path).parents)}
        return explain(self.url, [*paths, *sorted(folders - {"./"})])

    def open(self, step: int, patience: Retry = ONCE) -> ObjectStep:
        return ObjectStep(self._bucket, self._pool, step, patience)

    def draft_id(self, step: int) -> str:
        return folder_of(self._bucket, step)

    version = draft_id

    def draft(self, step: int, token: str, *, overwrite: bool = False) -> ObjectDraft:
        if step < 0:
            raise UsageError(f"step {step} is negative")
        if not TOKEN.fullmatch(token) or token == MANIFEST:
            raise UsageError(f"{token!r} cannot be a token")
        return ObjectDraft(self._bucket, step, token, overwrite)

    def delete(self, step: int, listing: Listing | None = None) -> None:
        path = manifest_path(step)
        try:
            token, record = committed_at(self._bucket, step)
        except OSError as fault:
            if fault.errno not in (errno.EINVAL, errno.EFBIG):
                raise  # nothing is known of the step, so it stays
            token, record = "", b""  # no one can read this manifest: `clean` removes the data
        self._bucket.remove([path])
        if token:
            remove_own(self._bucket, f"step-{step}/{token}", record)

    def clean(self) -> list[str]:
        steps = list(self.listing())
        removed = []
        for step, drafts in zip(steps, self._pool.each(self._drafts, steps), strict=True):
            for token in drafts:
                folder = f"step-{step}/{token}"
                if self._remove_draft(step, token, self._bucket.objects(folder)):
                    removed.append(folder)
        return removed

    def _drafts(self, step: int) -> list[str]:
        """The folders of a step that may be drafts. Of most steps one request tells: they have one
        folder, and a manifest."""
        folders, objects = self._bucket.below(f"step-{step}")
        return [] if len(folders) == 1 and MANIFEST in objects else sorted(folders)

    def _remove_draft(self, step: int, token: str, objects: list[ObjectInfo]) -> bool:
        data = [(match, one) for one in objects if (match := _DATA.fullmatch(one.path))]
        own = [one for match, one in data if DATA_NAME.fullmatch(match[3])]
        if not own:
            return False
        age = datetime.now(timezone.utc) - max(one.modified for one in own)
        if age.total_seconds() < self._grace:
            return False
        # Asked after the listing, so that a draft committed meanwhile is seen as a step.
        with suppress(FileNotFoundError):
            if folder_of(self._bucket, step) in (token, ""):
                return False
        self._bucket.remove([one.path for one in own])
        return True

    def free_bytes(self) -> int | None:
        return None
