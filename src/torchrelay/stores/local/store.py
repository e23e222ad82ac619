"""Checkpoints in a directory: one directory below it for each step.

    root/step-100/manifest.json            the commit record
    root/step-100/model.safetensors        data
    root/step-200.tmp-host-4711-9f2c/...   a draft; its writer holds a lock on it
    root/step-100.old-...                  a step moved away for its successor, where the file
                                           system cannot exchange two directories

A draft becomes a step by a rename, after its data and then its manifest are durable. A step leaves
by a rename too, so no reader finds half of one.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path

from torchrelay.files import exists
from torchrelay.stores.listing import Listing, settled
from torchrelay.stores.local.draft import LocalDraft
from torchrelay.stores.local.files import Files, claimed, lock
from torchrelay.stores.local.removal import closing, remove_directory
from torchrelay.stores.local.root import (
    LEFT,
    StepRoot,
    directory_id,
    is_committed,
    version_of,
)
from torchrelay.stores.local.step import LocalStep
from torchrelay.stores.lookalikes import DEPTH, MOST, explain
from torchrelay.stores.retry import ONCE, Retry
from torchrelay.stores.tokens import host_name, new_token

FOREIGN_AGE = 24 * 3600.0  # seconds after which another host's draft counts as left behind


class LocalStore:
    """A directory with checkpoints; created when the first step is begun."""

    def __init__(self, root: str | os.PathLike[str], *, files: Files | None = None) -> None:
        self._root = StepRoot(root, files or Files())
        self._files = self._root.files
        self.url = str(self._root.path)

    def steps(self) -> list[int]:
        def committed(listing: Listing) -> list[int]:
            return [step for step in listing if is_committed(self._root.listed(step, listing))]

        return settled(self.listing, committed)

    def listing(self) -> Listing:
        return self._root.folders()

    def lookalike(self) -> str:
        return explain(self.url, islice(self._root.below(DEPTH), MOST))

    def open(self, step: int, patience: Retry = ONCE) -> LocalStep:
        return LocalStep(str(self._root.existing(step)), patience)

    def draft_id(self, step: int) -> str:
        return directory_id(self._root.existing(step))

    def version(self, step: int) -> str:
        return version_of(self._root.existing(step))

    def draft(self, step: int, token: str, *, overwrite: bool = False) -> LocalDraft:
        return LocalDraft(self._root, step, token, overwrite)

    def free_bytes(self) -> int | None:
        place = self._root.path
        while not exists(place):
            place = place.parent
        return shutil.disk_usage(place).free

    def delete(self, step: int, listing: Listing | None = None) -> None:
        place = self._root.of(step)
        found = (self._root.folders() if listing is None else listing).get(step)
        for name, _ in reversed(found or [(place.name, 0)]):
            away = f"{place}.tmp-{new_token()}"
            with claimed(f"{self.url}/{name}"):  # or `clean` would take it for left behind
                self._files.rename(f"{self.url}/{name}", away)
                self._files.sync_dir(self.url)
                remove_directory(away, self._files)

    def clean(self) -> list[str]:
        removed = []
        matches = [match for match in map(LEFT.fullmatch, self._root.names()) if match]
        for match in sorted(matches, key=lambda match: match[2] != "old"):  # which may be steps
            path, step = self._root.path / match[0], self._root.of(int(match[1]))
            # A step that was moved away for its successor, which never came, is the step.
            is_step = match[2] == "old" and not exists(step)
            lock_fd = self._claimed(path, match[3])
            if lock_fd is None:
                continue
            with closing(lock_fd), suppress(OSError):  # another process may be cleaning too
                if is_step:
                    self._files.rename(str(path), str(step))
                    self._files.sync_dir(self.url)
                elif remove_directory(str(path), self._files):
                    removed.append(path.name)
        return removed

    def _claimed(self, path: Path, host: str) -> int | None:
        """The lock of a draft, if no live writer may own it. Locks of other hosts may not be
        visible here."""
        try:
            lock_fd = lock(str(path))
        except OSError:  # it just became a step, or was removed; or locks are not supported
            return None
        if lock_fd is None or host == host_name():
            return lock_fd
        with suppress(OSError):
            if time.time() - path.stat().st_mtime >= FOREIGN_AGE:
                return lock_fd
        os.close(lock_fd)
        return None
