"""Requests to a server of steps, and their answers, checked."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from torchrelay.deadlines import Deadline
from torchrelay.errors import EndpointError, ManifestError, StepNotFoundError
from torchrelay.record.encoding import content_digest, decode_at_rest
from torchrelay.record.schema import Record
from torchrelay.sources.connection import RECORD_BYTES, Host, Reply
from torchrelay.sources.lent_memory import Count, LocalFacts
from torchrelay.steps import MAX_STEP

LOCAL_SECONDS = 5.0  # that a server may take to say where it lends memory

Result = TypeVar("Result")
Step = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
SnapshotId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class StepFacts(msgspec.Struct):
    """A line of `/steps.json`, as far as a reader needs it. `here`: the volumes, of `volumes`, that
    the server has itself. `state`: a digest that steps with the same state share, if it is known.
    """

    step: Step
    snapshot: SnapshotId
    bytes: Count
    volumes: Count = 0
    here: list[str] = []
    state: str = ""


class StepList(msgspec.Struct):
    steps: list[StepFacts]


class HolderFacts(msgspec.Struct):
    """`/places.json`: the URLs that have each volume. An empty text is the server itself."""

    volumes: dict[str, list[str]]


_step_list = msgspec.json.Decoder(StepList)
_holders = msgspec.json.Decoder(HolderFacts)
_local = msgspec.json.Decoder(LocalFacts)


class DamagedRecordError(EndpointError):
    """A record with wrong bytes, which may have been changed on their way."""


def listed_steps(host: Host, query: str, seconds: float) -> list[StepFacts]:
    return _get(_step_list, f"/steps.json{query}", seconds, host).steps


def holders_of(host: Host, snapshot: str, seconds: float) -> dict[str, list[str]]:
    """The URLs that have each volume of a step. An empty text is the server itself."""
    return _get(_holders, f"/places.json?snapshot={snapshot}", seconds, host).volumes


def local_facts(host: Host) -> LocalFacts:
    """Where a server lends memory; raises `OSError` or `EndpointError` if it does not say."""
    return _get(_local, "/local.json", LOCAL_SECONDS, host)


def record_of(host: Host, step: int, snapshot: str, seconds: float) -> tuple[bytes, Record]:
    """The record of a step: its bytes, and what they say."""
    answer = host.get(f"/record?step={step}", seconds=seconds, limit=RECORD_BYTES)
    if answer.status == 404:
        raise StepNotFoundError(f"no step {step} at {host.url}", step=step)
    _check(host, answer)
    if answer.headers.get("torchrelay-snapshot", snapshot) != snapshot:
        raise StepNotFoundError(f"step {step} was replaced meanwhile: pull again", step=step)
    return answer.body, checked_record(host.url, answer.body, step, snapshot)


def checked_record(url: str, data: bytes, step: int, snapshot: str) -> Record:
    """The record that a server sent; `EndpointError` unless it is that of this step and content."""
    try:
        record = decode_at_rest(data)
    except ManifestError as fault:
        raise DamagedRecordError(f"{url} has no valid record: {fault.message}") from fault
    if record.step != step or content_digest(record) != snapshot:
        raise EndpointError(f"{url} sends a record of something else than it lists")
    return record


def time_share(deadline: Deadline, *, alone: bool) -> float:
    """Seconds that a server may take to answer: half of what is left, unless it is `alone`."""
    return max(deadline.left() / (1 if alone else 2), 0.01)


def _check(host: Host, answer: Reply) -> None:
    if answer.status == 401:
        text = f"{host.url} does not take this token ({answer.text}): give Access(token=) its token"
        raise EndpointError(text)
    if answer.status != 200:
        raise EndpointError(f"{host.url} answered {answer.status}: {answer.text}")


def _get(decoder: msgspec.json.Decoder[Result], path: str, seconds: float, host: Host) -> Result:
    answer = host.get(path, seconds=seconds)
    _check(host, answer)
    try:
        return decoder.decode(answer.body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as fault:
        text = f"{host.url} answers in another way than an endpoint: {fault}"
        raise EndpointError(text) from None
