"""The objects under a prefix of a bucket, through obstore: typed calls, deadlines, named errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from importlib import import_module
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from torchrelay.errors import UsageError
from torchrelay.stores.objects.failures import Failure, failure_of, reason_of

REQUEST_SECONDS = 30.0  # that a small request may take; whoever sent it sends it again then
UPLOAD_RATE = 1 << 20  # bytes per second, over all its parts, at which an upload is not given up
CONNECT_SECONDS = 10.0
DELETES = 3  # of the same objects, which obstore does not retry
STALL_SECONDS = 20.0  # without a byte, after which a read is sent again
CHUNK_BYTES = 8 << 20  # taken over from the library at once

# Where each service's environment names an endpoint; obstore reads these, but turns a
# plain http:// one down unless an option allows it.
ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "memory": (),
}
VENDORS = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
CLIENT_KEYS = (
    "allow_http",
    "allow_invalid_certificates",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "user_agent",
)


class ObjectInfo(NamedTuple):
    path: str
    nbytes: int
    modified: datetime


class Bucket:
    """Paths are relative to the URL's prefix. A missing object raises `FileNotFoundError`, any
    other failure `OSError`, each with the object's URL. A request that takes too long is sent
    again; one call ends within `timeout` seconds. Safe to use from several threads, not across a
    fork."""

    def __init__(self, url: str, *, timeout: float) -> None:
        scheme, _, rest = url.partition("://")
        if scheme not in ENDPOINTS or not (urlsplit(url).netloc or scheme == "memory"):
            kinds = ", ".join(f"{known}://" for known in ENDPOINTS)
            raise UsageError(f"{url!r} is not the URL of a bucket: {kinds} and its name are")
        if not timeout > 0:
            raise UsageError(f"timeout={timeout} leaves no time for a request")
        self.url = f"{scheme}://{rest.rstrip('/')}"
        try:
            self._obs: Any = import_module("obstore")
            self._errors: Any = import_module("obstore.exceptions")
            stores: Any = import_module("obstore.store")
        except ImportError as error:
            hint = "pip install 'torchrelay[cloud]'"
            raise UsageError(f"{url} needs the obstore library: {hint}") from error
        self._stores, self.timeout = stores, timeout
        self._writers: dict[float, Any] = {}  # by the seconds that one request may take
        if scheme == "memory":
            self._reads: Any = stores.MemoryStore()
            return
        # A read of any length may take half of the time, as long as bytes arrive.
        with self.named(""):
            try:
                self._reads = self._client(timeout / 2, read_timeout=STALL_SECONDS)
            except self._errors.UnknownConfigurationKeyError:  # an old obstore
                self._reads = self._client(timeout / 2)

    def _client(self, seconds: float, **more: float) -> Any:
        """A client with this many seconds for a request. Retries, the last one included, end within
        the bucket's timeout."""
        most = {"timeout": seconds, "connect_timeout": CONNECT_SECONDS, **more}
        limits = {name: timedelta(seconds=min(value, seconds)) for name, value in most.items()}
        options = client_options(self.url.partition("://")[0], os.environ) | limits
        retries = {"retry_timeout": timedelta(seconds=self.timeout - seconds)}
        return self._stores.from_url(self.url, client_options=options, retry_config=retries)

    def _writes(self, nbytes: int = 0) -> Any:
        """The client for requests while `nbytes` are sent. Their time is limited: the answer to a
        write comes at its end, and a connection that stalls is not seen before."""
        if self.url.startswith("memory://"):
            return self._reads
        seconds, needed = REQUEST_SECONDS, REQUEST_SECONDS + nbytes / UPLOAD_RATE
        while seconds < needed:  # few clients: each has connections of its own
            seconds *= 2
        seconds = min(seconds, self.timeout / 2)
        if seconds not in self._writers:
            self._writers[seconds] = self._client(seconds)
        return self._writers[seconds]

    def name(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url

    @contextmanager
    def named(self, path: str) -> Iterator[None]:
        """Turn what obstore raises into an `OSError` with the object's name."""
        try:
            yield
        except (self._errors.BaseError, OSError) as error:
            raise self._fault(error, self.name(path)) from error

    def _fault(self, error: BaseException, name: str) -> OSError:
        """The `OSError` for an exception of obstore: the cause first, then what to do about it."""
        failure, reason = failure_of(error, self._errors), reason_of(error)
        bucket = urlsplit(self.url).netloc
        if failure is Failure.NO_OBJECT:
            return FileNotFoundError(errno.ENOENT, reason, name)
        if failure is Failure.EXISTS:
            return FileExistsError(errno.EEXIST, "the object is there already", name)
        if failure is Failure.BAD_NAME:
            return OSError(errno.EILSEQ, reason, name)
        if failure is Failure.UNREADABLE:
            return OSError(errno.EINVAL, reason, name)
        if failure is Failure.NO_BUCKET:
            return OSError(
                errno.ENODEV,
                f"the bucket {bucket!r} does not exist: create it, or correct its name, the region "
                f"or the endpoint ({reason})",
                name,
            )
        if failure is Failure.REFUSED:
            return PermissionError(
                errno.EACCES,
                f"access to the bucket {bucket!r} is refused: correct the credentials, or the "
                f"rights of their user ({reason})",
                name,
            )
        code = error.errno if isinstance(error, OSError) else None
        return OSError(code or errno.EIO, reason, name)

    def put(self, path: str, content: bytes, *, create: bool) -> None:
        """Put a JSON object in one atomic request; `create`: `FileExistsError` if it exists."""
        if not create:
            self._put(path, content, "overwrite")
            return
        try:
            self.put_once(path, content)
        except NotImplementedError:
            # Of two writers in the same instant, both pass.
            if self.has(path):
                reason = "the object is there already"
                raise FileExistsError(errno.EEXIST, reason, self.name(path)) from None
            self._put(path, content, "overwrite")

    def put_once(self, path: str, content: bytes) -> None:
        """Create a JSON object in one conditional request. `NotImplementedError` if the service has
        none."""
        self._put(path, content, "create")

    def _put(self, path: str, content: bytes, mode: str) -> None:
        attributes = {"Content-Type": "application/json"}
        with self.named(path):
            try:
                self._obs.put(
                    self._writes(len(content)),
                    path,
                    content,
                    mode=mode,
                    attributes=attributes,
                    use_multipart=False,
                )
            except self._errors.NotSupportedError as error:
                raise NotImplementedError("the service has no conditional requests") from error

    def copy(self, old: str, new: str, nbytes: int) -> None:
        """Have the service copy an object of `nbytes`, which does not cross the network here."""
        with self.named(old):
            self._obs.copy(self._writes(nbytes), old, new)

    def has(self, path: str) -> bool:
        try:
            self.nbytes(path)
        except FileNotFoundError:
            return False
        except OSError as fault:
            if fault.errno != errno.EINVAL:  # else it is there, with metadata that no one can read
                raise
        return True

    def writer(self, path: str, part_bytes: int, concurrency: int) -> Any:
        """A file to write to: parts of a large one are uploaded while later ones are written.
        It keeps what it is given, without a copy."""
        with self.named(path):
            client = self._writes(part_bytes * concurrency)
            return self._obs.open_writer(
                client, path, buffer_size=part_bytes, max_concurrency=concurrency
            )

    def get(self, path: str, most: int) -> bytes:
        """The bytes of an object; `OSError` if there are more than `most`."""
        with self.named(path):
            return self._taken(path, self._obs.get(self._reads, path), most)

    def _taken(self, path: str, result: Any, most: int) -> bytes:
        """An answer in full. Memory is taken as bytes arrive, not by the length it announces."""
        parts: list[bytes] = []
        left = most - (result.range[1] - result.range[0])
        if left >= 0:
            left = most
            for part in result.stream(min_chunk_size=min(most, CHUNK_BYTES)):
                parts.append(bytes(part))
                left -= len(part)
                if left < 0:
                    break
        if left < 0:
            reason = f"the answer is longer than {most} bytes, and no such object is that large"
            raise OSError(errno.EFBIG, reason, self.name(path))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def nbytes(self, path: str) -> int:
        with self.named(path):
            return int(self._obs.head(self._reads, path)["size"])

    def read_range(self, path: str, start: int, nbytes: int) -> bytes:
        """At most that many bytes; fewer where the object ends."""
        with self.named(path):
            options = {"range": (start, start + nbytes)}
            return self._taken(path, self._obs.get(self._reads, path, options=options), nbytes)

    def below(self, path: str = "") -> tuple[list[str], list[str]]:
        """Names right below a path: of what looks like directories, and of objects."""
        with self.named(path):
            found = self._obs.list_with_delimiter(self._reads, path or None)
            folders = [str(one).rstrip("/") for one in found["common_prefixes"]]
            objects = [str(one["path"]) for one in found["objects"]]
        return _last(folders), _last(objects)

    def objects(self, path: str = "", *, after: str | None = None) -> list[ObjectInfo]:
        """All objects below a path, or those of them that come after a name.

        `OSError` with `EILSEQ` where one of them has a name that the library takes for none.
        """
        with self.named(path):
            found = self._obs.list(self._reads, path or None, offset=after, chunk_size=1000)
            infos = [(one["path"], one["size"], one["last_modified"]) for one in found.collect()]
            return [ObjectInfo(*info) for info in infos]

    def some(self, most: int) -> list[str]:
        """Paths of the first objects below the prefix: all of them, if they are no more."""
        with self.named(""):
            found = self._obs.list(self._reads, chunk_size=min(most, 1000))
            paths: list[str] = []
            for chunk in found:
                paths += [one["path"] for one in chunk]
                if len(paths) >= most:
                    break
            return paths

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of the objects right below a folder, by their names in it."""
        found = self.objects(folder)
        names = {one.path.removeprefix(f"{folder}/"): one.nbytes for one in found}
        return {name: size for name, size in names.items() if "/" not in name}

    def remove(self, paths: Sequence[str]) -> None:
        """Remove objects; an object that is gone already is not an error."""
        for left in reversed(range(DELETES)) if paths else ():
            try:
                with self.named(paths[0]):
                    self._remove(list(paths))
                return
            except OSError as fault:
                if fault.errno != errno.EIO or not left:
                    raise

    def _remove(self, paths: list[str]) -> None:
        try:
            self._obs.delete(self._writes(), paths)
        except FileNotFoundError:  # some services say so, and leave the rest in place
            for path in paths:
                with suppress(FileNotFoundError):
                    self._obs.delete(self._writes(), path)


def client_options(scheme: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Settings of the HTTP client in the environment. Options given to obstore replace the ones
    that it would take from there, so they are passed on."""
    names = {key: f"{VENDORS[scheme]}_{key.upper()}" for key in CLIENT_KEYS}
    options: dict[str, Any] = {key: environ[n] for key, n in names.items() if n in environ}
    endpoint = next((environ[name] for name in ENDPOINTS[scheme] if environ.get(name)), "")
    if endpoint.lower().startswith("http://"):
        options["allow_http"] = True
    return options


def _last(paths: list[str]) -> list[str]:
    return [path.rpartition("/")[2] for path in paths]
