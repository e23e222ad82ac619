"""Objects of a draft that have the bytes of a committed step's objects: the service copies them."""

from __future__ import annotations

import errno

from torchrelay.stores.draft import Buffer, CommittedFile, ReuseRefusedError
from torchrelay.stores.objects.bucket import Bucket
from torchrelay.stores.objects.step import check_name


def path_of(source: CommittedFile) -> str:
    """The object of a committed file. The version of a step is the name of its folder."""
    check_name(source.name)
    return f"step-{source.step}/{source.version}/{source.name}"


class CopiedObject:
    """A `Sink` that nothing is written to: `finish` has the service copy an object."""

    ordered = True

    def __init__(self, bucket: Bucket, path: str, nbytes: int, source: CommittedFile) -> None:
        self._bucket, self._path, self._nbytes = bucket, path, nbytes
        self._source = path_of(source)

    def write(self, position: int, data: Buffer) -> None:
        raise AssertionError("an object that is reused is not written")

    def finish(self) -> None:
        try:
            self._bucket.copy(self._source, self._path, self._nbytes)
        except FileNotFoundError:
            raise
        except OSError as fault:
            raise ReuseRefusedError(fault.errno or errno.EIO, fault.strerror, self._path) from fault
        if (there := self._bucket.nbytes(self._path)) != self._nbytes:
            reason = f"{there} bytes in {self._source}, {self._nbytes} were saved"
            raise OSError(errno.EIO, reason, self._bucket.name(self._path))

    def abort(self) -> None:
        """Nothing: the object goes with the draft."""
