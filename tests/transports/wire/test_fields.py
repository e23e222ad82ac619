"""Every field of every message has a range, and what is outside of it is a typed error."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch.distributed as dist
from msgspec import inspect

import torchrelay as tr
from tests.support.faults import CHUNK, Outcome, attempt, received, weights
from tests.support.messages import (
    KINDS,
    OTHER_KINDS,
    ROUTE_KINDS,
    Field,
    fields_of,
    forged,
    frame,
    read_as,
    send_bytes,
    wrong_values,
)
from tests.support.ways import patched
from torchrelay.errors import RemoteProtocolError
from torchrelay.transports.meeting.connection import Connection
from torchrelay.transports.wire import messages
from torchrelay.transports.wire.messages import FrameReader, Message

OLD, NEW, NEXT = 100, 1, 2
TIMEOUT = 8.0
FIELDS = [field for kind in KINDS for field in fields_of(kind)]
ROUTE_FIELDS = [field for kind in (*ROUTE_KINDS, *OTHER_KINDS) for field in fields_of(kind)]


@pytest.mark.parametrize("field", FIELDS + ROUTE_FIELDS, ids=lambda field: field.id)
def test_every_field_is_bounded(field: Field) -> None:
    """Also one that is added later: a number has two ends, anything with a length has a most."""
    found = field.type
    if isinstance(found, inspect.IntType | inspect.FloatType):
        assert found.ge is not None and found.le is not None, field.id
    elif isinstance(
        found, inspect.StrType | inspect.BytesType | inspect.VarTupleType | inspect.DictType
    ):
        assert found.max_length is not None, field.id
    else:
        # A tuple of fixed length has its items as fields of their own.
        known = inspect.BoolType | inspect.NoneType | inspect.TupleType
        assert isinstance(found, known), field.id


def wrong(field: Field) -> list[Any]:
    return [] if isinstance(field.type, inspect.NoneType) else wrong_values(field.type)


def edges(field: Field) -> list[Any]:
    return [field.type.ge, field.type.le] if isinstance(field.type, inspect.IntType) else []


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.id)
def test_what_a_field_may_not_be_is_refused(field: Field) -> None:
    for value in wrong(field):
        with pytest.raises(RemoteProtocolError, match="unreadable message"):
            list(FrameReader().feed(frame(field.kind, forged(field, value))))


@pytest.mark.parametrize("field", ROUTE_FIELDS, ids=lambda field: field.id)
def test_what_a_route_may_not_say_is_refused(field: Field) -> None:
    for value in wrong(field):
        with pytest.raises(RemoteProtocolError, match="unreadable message"):
            read_as(field.kind, forged(field, value))


@pytest.mark.parametrize("kind", (*ROUTE_KINDS, *OTHER_KINDS), ids=lambda kind: kind.__name__)
def test_what_a_route_may_say_is_read(kind: type) -> None:
    for field in fields_of(kind):
        for value in edges(field):
            assert read_as(kind, forged(field, value)) is not None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_its_fields_may_be_is_read(kind: type) -> None:
    """So that the messages above are refused for the one field that is wrong."""
    for field in fields_of(kind):
        for value in edges(field):
            [(message, _)] = FrameReader().feed(frame(kind, forged(field, value)))
            assert type(message) is kind


# Between processes: one side says it, the other raises in time and has its old weights.


FROM_SENDER = (messages.Offer, messages.Go, messages.Confirmed)
FROM_RECEIVER = (messages.Accept, messages.Fetched, messages.Done)


def cases(kinds: tuple[type, ...]) -> list[tuple[Field, Any]]:
    """For each field of these messages a value that may not be."""
    found: list[tuple[Field, Any]] = []
    for index, field in enumerate(field for kind in kinds for field in fields_of(kind)):
        if values := wrong(field):
            found.append((field, values[index % len(values)]))
    return found


def said_instead(field: Field, value: Any) -> contextlib.AbstractContextManager[None]:
    """Within: the first message of this kind that this process sends has this value in it."""
    original, left = Connection.send, [1]

    def send(self: Connection, message: Message) -> None:
        if isinstance(message, field.kind) and left:
            left.pop()
            send_bytes(self, frame(field.kind, forged(field, value)))
        else:
            original(self, message)

    return patched(Connection, send=send)


def exchange(rank: int, group: Any, liar: int) -> list[tuple[str, Outcome]]:
    """For each case a transfer in which `liar` says what may not be; then one that is right."""
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK, route="tcp")
    live = weights(OLD)

    def call(step: int) -> Outcome:
        if rank == 0:
            return attempt(lambda: relay.send(weights(step), 1, step=step))
        return received(relay, 0, live, OLD, step, TIMEOUT)

    outcomes = []
    for field, value in cases(FROM_SENDER if liar == 0 else FROM_RECEIVER):
        lie = said_instead(field, value) if rank == liar else contextlib.nullcontext()
        with lie:
            outcomes.append((f"{field.id}={value!r:.40}", call(NEW)))
        dist.barrier(group)
    return [*outcomes, ("after", call(NEXT))]


@pytest.mark.parametrize("liar", [0, 1], ids=["sender", "receiver"])
def test_no_field_ends_or_hangs_the_other_side(pool2: Any, liar: int) -> None:
    results = pool2.run(exchange, liar, timeout=100, fresh_group=True)
    *scenes, (_, after) = results[1 - liar]
    said = FROM_SENDER if liar == 0 else FROM_RECEIVER
    assert len(scenes) == len(cases(said)) >= 5 and after.error is None
    for name, outcome in scenes:
        assert outcome.seconds < TIMEOUT / 2, (name, outcome)
        assert outcome.error in ("RemoteProtocolError", "PeerLostError"), (name, outcome)
        assert liar == 1 or outcome.weights == OLD, (name, outcome)


def joins_wrongly(rank: int, group: Any) -> list[Outcome]:
    """One send, to which rank 1 comes with every wrong `Join` before it comes with a right one."""
    relay = tr.Relay(group, timeout=60, chunk_bytes=CHUNK)
    if rank == 0:
        return [attempt(lambda: relay.send(weights(NEW), 1, step=NEW))]
    live, outcomes = weights(OLD), []
    for field, value in cases((messages.Join,)):
        with said_instead(field, value):
            outcomes.append(received(relay, 0, live, OLD, NEW, TIMEOUT))
    return [*outcomes, received(relay, 0, live, OLD, NEW, TIMEOUT)]


def test_a_join_that_is_none_costs_its_sender_alone(pool2: Any) -> None:
    [ours], [*wrong, right] = pool2.run(joins_wrongly, timeout=90, fresh_group=True)
    assert ours.error is None and right.error is None and right.weights == NEW
    assert len(wrong) >= 10
    for outcome in wrong:
        assert outcome.error == "PeerLostError" and outcome.seconds < TIMEOUT / 2, outcome
        assert outcome.weights == OLD, outcome
