"""Exceptions of obstore by kind: its classes first, then the status and the code of the service."""

from __future__ import annotations

from typing import Any

import pytest

from torchrelay.stores.objects.failures import Failure, failure_of, reason_of

errors: Any = pytest.importorskip("obstore.exceptions")

ANSWER = "<?xml version='1.0'?><Error><Code>{}</Code><Message>no {}</Message></Error>"
STATUS = "Server returned non-2xx status code: {}: "


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FileNotFoundError("Object at location a not found"), Failure.NO_OBJECT),
        (FileNotFoundError(STATUS.format(404) + ANSWER.format("NoSuchKey", "")), Failure.NO_OBJECT),
        (FileNotFoundError(ANSWER.format("NoSuchBucket", "")), Failure.NO_BUCKET),
        (FileNotFoundError(ANSWER.format("ContainerNotFound", "")), Failure.NO_BUCKET),
        (errors.AlreadyExistsError("it exists"), Failure.EXISTS),
        (errors.InvalidPathError("a//b"), Failure.BAD_NAME),
        (errors.PermissionDeniedError("denied"), Failure.REFUSED),
        (errors.UnauthenticatedError("who"), Failure.REFUSED),
        (errors.GenericError(STATUS.format(403)), Failure.REFUSED),
        (errors.GenericError(STATUS.format(401)), Failure.REFUSED),
        (errors.GenericError(STATUS.format(404)), Failure.NO_BUCKET),
        (errors.GenericError(STATUS.format(503)), Failure.OTHER),
        (errors.GenericError("error sending request: 404 403 NoSuchBucket"), Failure.OTHER),
        (errors.GenericError("InvalidMetadata { key: odd }"), Failure.UNREADABLE),
        (errors.GenericError("Requested 0..4, got 0..2"), Failure.UNREADABLE),
        (ConnectionResetError("by peer"), Failure.OTHER),
    ],
)
def test_an_exception_has_a_kind(error: BaseException, expected: Failure) -> None:
    assert failure_of(error, errors) is expected


def test_the_reason_is_what_the_service_says() -> None:
    error = errors.GenericError(
        f"PUT failed: {ANSWER.format('SlowDown', 'hurry')}\n\nDebug source:"
    )
    assert reason_of(error) == "PUT failed: SlowDown: no hurry"
