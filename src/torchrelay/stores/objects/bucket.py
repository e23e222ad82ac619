"""The objects under a prefix of a bucket, through obstore: typed calls, deadlines, named errors."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from importlib import import_module
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from torchrelay.errors import UsageError

CONNECT_TIME = timedelta(seconds=10)
STALL_TIME = timedelta(seconds=20)  # without a byte, after which a read is asked for again
_STATUS = re.compile(r"status code: (\d{3})")
_REFUSALS = {"401": errno.EACCES, "403": errno.EACCES, "404": errno.ENODEV}  # 404: of the bucket
_ANSWER = re.compile(r"(<\?xml[^>]*>\s*)?<Error>.*</Error>", re.DOTALL)
_SAID = re.compile(r"<(?:Code|Message)>([^<]*)<")
_DAMAGED = re.compile(r"InvalidMetadata|Requested \S+, got \S+")  # or of another length
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|specified (bucket|container) does not")
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
    other failure `OSError`, each with the object's URL. One request, with its retries, ends within
    `timeout` seconds. Safe to use from several threads, not across a fork."""

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
        if scheme == "memory":
            self._store: Any = stores.MemoryStore()
            self._reads: Any = self._store
            return
        # The last retry may begin just before its deadline and then take a whole request.
        half = timedelta(seconds=timeout / 2)
        options = client_options(scheme, os.environ)
        options |= {"timeout": half, "connect_timeout": min(half, CONNECT_TIME)}
        retries = {"retry_timeout": half}
        with self.named(""):
            self._store = stores.from_url(self.url, client_options=options, retry_config=retries)
            # For reads alone: the time counts while a request is sent, too, and large parts take
            # their time.
            options["read_timeout"] = min(half, STALL_TIME)
            self._reads = self._store
            with suppress(self._errors.UnknownConfigurationKeyError):  # an old obstore
                self._reads = stores.from_url(
                    self.url, client_options=options, retry_config=retries
                )

    def name(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url

    @contextmanager
    def named(self, path: str) -> Iterator[None]:
        """Turn what obstore raises into an `OSError` with the object's name."""
        name = self.name(path)
        try:
            yield
        except FileNotFoundError as error:
            if _NO_BUCKET.search(str(error)):
                raise OSError(errno.ENODEV, self._remedy(errno.ENODEV, error), name) from error
            raise FileNotFoundError(errno.ENOENT, _reason(error), name) from error
        except self._errors.AlreadyExistsError as error:
            raise FileExistsError(errno.EEXIST, "the object is there already", name) from error
        except self._errors.InvalidPathError as error:
            raise OSError(errno.EILSEQ, _reason(error), name) from error
        except (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError) as error:
            reason = self._remedy(errno.EACCES, error)
            raise PermissionError(errno.EACCES, reason, name) from error
        except (self._errors.BaseError, OSError) as error:
            code = error.errno if isinstance(error, OSError) else None
            # obstore has no class for a listing that was refused: asking again is of no use then.
            if code is None and (status := _STATUS.search(str(error))) is not None:
                code = _REFUSALS.get(status[1])
            if _DAMAGED.search(str(error)):  # and it stays so
                code = errno.EINVAL
            raise OSError(code or errno.EIO, self._remedy(code, error), name) from error

    def _remedy(self, code: int | None, error: BaseException) -> str:
        """The cause first, with what to do about it; then the text of the service, or library."""
        said = _reason(error)
        bucket = urlsplit(self.url).netloc
        if code == errno.ENODEV:
            return (
                f"the bucket {bucket!r} does not exist: create it, or correct its name, the region "
                f"or the endpoint ({said})"
            )
        if code == errno.EACCES:
            return (
                f"access to the bucket {bucket!r} is refused: correct the credentials, or the "
                f"rights of their user ({said})"
            )
        return said

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
                    self._store,
                    path,
                    content,
                    mode=mode,
                    attributes=attributes,
                    use_multipart=False,
                )
            except self._errors.NotSupportedError as error:
                raise NotImplementedError("the service has no conditional requests") from error

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
            return self._obs.open_writer(
                self._store, path, buffer_size=part_bytes, max_concurrency=concurrency
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
        if not paths:
            return
        with self.named(paths[0]):
            try:
                self._obs.delete(self._store, list(paths))
            except FileNotFoundError:  # some services say so, and leave the rest in place
                for path in paths:
                    with suppress(FileNotFoundError):
                        self._obs.delete(self._store, path)


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


def _reason(error: BaseException) -> str:
    """obstore's message without the dump of its internals, which stays in the cause; of a service's
    answer in XML, what it says."""
    text = str(error).partition("\n\nDebug source")[0].strip()
    return _ANSWER.sub(lambda found: ": ".join(_SAID.findall(found[0])), text)
