"""Failures of object storage by kind, from obstore's exceptions. The only place that reads them.

obstore has classes for a few failures and `GenericError` for all others, such as a listing that was
refused or a bucket that does not exist. The status and the error code that the service sent stand
in its message. They are protocols of S3, Google and Azure; nothing else of the text decides.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Any

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z]+)</Code>")
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
# Not of the service, but of obstore: an answer whose headers it cannot read, or of another length.
_UNREADABLE = re.compile(r"InvalidMetadata|Requested \S+, got \S+")
_ANSWER = re.compile(r"(<\?xml[^>]*>\s*)?<Error>.*</Error>", re.DOTALL)
_REASONS = re.compile(r"<(?:Code|Message)>([^<]*)<")


class Failure(Enum):
    NO_OBJECT = auto()
    NO_BUCKET = auto()
    REFUSED = auto()  # by the rights of these credentials
    EXISTS = auto()
    BAD_NAME = auto()  # of an object, to obstore
    UNREADABLE = auto()  # the object is there, and stays as it is
    OTHER = auto()  # which another attempt may not meet


def failure_of(error: BaseException, errors: Any) -> Failure:
    """The kind of an exception; `errors` is the module `obstore.exceptions`."""
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    no_bucket = code is not None and code[1] in _NO_BUCKET
    if isinstance(error, FileNotFoundError):
        return Failure.NO_BUCKET if no_bucket else Failure.NO_OBJECT
    if isinstance(error, errors.AlreadyExistsError):
        return Failure.EXISTS
    if isinstance(error, errors.InvalidPathError):
        return Failure.BAD_NAME
    if isinstance(error, (errors.PermissionDeniedError, errors.UnauthenticatedError)):
        return Failure.REFUSED
    if _UNREADABLE.search(text):
        return Failure.UNREADABLE
    if status is not None and status[1] in ("401", "403"):
        return Failure.REFUSED
    if no_bucket or (status is not None and status[1] == "404"):  # a listing has no object
        return Failure.NO_BUCKET
    return Failure.OTHER


def reason_of(error: BaseException) -> str:
    """obstore's message without the dump of its internals, which stays in the cause. An answer in
    XML is shortened to its code and message."""
    text = str(error).partition("\n\nDebug source")[0].strip()
    return _ANSWER.sub(lambda found: ": ".join(_REASONS.findall(found[0])), text)
