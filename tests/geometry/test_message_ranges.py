"""Every number of every message has a range, and what is outside of it is a typed error."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from msgspec import inspect

import torchrelay as tr
from tests.support.faults import CHUNK, Outcome, attempt, received, weights
from tests.support.messages import (
    KINDS,
    ROUTE_KINDS,
    Field,
    fields_of,
    forged,
    send_payload,
    wrong_values,
)
from tests.support.ways import patched
from torchrelay.errors import RemoteProtocolError
from torchrelay.transports.group.lines import ControlLine
from torchrelay.transports.protocol import wire

OLD, NEW, NEXT = 100, 1, 2
TIMEOUT = 8.0
RANKS = 2
FIELDS = [field for kind in KINDS for field in fields_of(kind)]
ROUTE_FIELDS = [field for kind in ROUTE_KINDS for field in fields_of(kind)]
NUMBERS = [field for field in FIELDS if isinstance(field.type, inspect.IntType | inspect.FloatType)]


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


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.id)
def test_what_a_field_may_not_be_is_refused(field: Field) -> None:
    for value in [] if isinstance(field.type, inspect.NoneType) else wrong_values(field.type):
        with pytest.raises(RemoteProtocolError, match="unreadable message"):
            wire.read_message(forged(field, value), RANKS)


@pytest.mark.parametrize("field", ROUTE_FIELDS, ids=lambda field: field.id)
def test_what_a_route_may_not_say_is_refused(field: Field) -> None:
    for value in [] if isinstance(field.type, inspect.NoneType) else wrong_values(field.type):
        with pytest.raises(RemoteProtocolError, match="unreadable message"):
            wire.read_as(field.kind, forged(field, value))


@pytest.mark.parametrize("kind", ROUTE_KINDS, ids=lambda kind: kind.__name__)
def test_what_a_route_may_say_is_read(kind: type) -> None:
    for field in fields_of(kind):
        if isinstance(field.type, inspect.IntType):
            for value in (field.type.ge, field.type.le):
                assert wire.read_as(kind, forged(field, value)) is not None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_its_fields_may_be_is_read(kind: type) -> None:
    """So that the messages above are refused for the one field that is wrong."""
    for field in fields_of(kind):
        if isinstance(field.type, inspect.IntType):
            for value in (field.type.ge, field.type.le):
                assert wire.read_message(forged(field, value), 1 << 31) is not None


RANKED = [field for field in NUMBERS if field.name in ("upstream", "downstream", "rank")]


def test_a_rank_that_is_not_in_the_group() -> None:
    assert len(RANKED) == 3
    for field in RANKED:
        wire.read_message(forged(field, RANKS - 1), RANKS)
        for rank in (RANKS, 10**6):
            with pytest.raises(RemoteProtocolError, match=f"rank {rank} .* group of {RANKS}"):
                wire.read_message(forged(field, rank), RANKS)


# Between processes: one side says it, the other raises in time and has its old weights.


INSTEAD: dict[str, type] = {"Join": wire.Join, "Accept": wire.Accept, "Offer": wire.Offer}
"""What a message is sent in place of; others stand in for the go, or the end of a receiver."""


def cases(union: Any) -> list[tuple[Field, Any]]:
    """For each number of each message one that may not be; for ranks also one that is nobody's."""
    found: list[tuple[Field, Any]] = []
    for index, field in enumerate(NUMBERS):
        if field.kind in union.__args__:
            values = [v for v in wrong_values(field.type) if type(v) in (int, float)]
            found.append((field, values[index % len(values)]))
    return found + [(field, 10**6) for field in RANKED if field.kind in union.__args__]


def said_instead(field: Field, value: Any, kind: type) -> contextlib.AbstractContextManager[None]:
    """Within: the first message of this kind is another one."""
    original, left = ControlLine.send, [1]

    def send(self: ControlLine, message: wire.Message) -> None:
        if isinstance(message, kind) and left:
            left.pop()
            send_payload(self, forged(field, value))
        else:
            original(self, message)

    return patched(ControlLine, send=send)


def exchange(rank: int, group: Any, liar: int) -> list[tuple[str, Outcome]]:
    """For each case a transfer in which `liar` says what may not be; then one that is right."""
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK, route="group")
    live = weights(OLD)

    def call(step: int) -> Outcome:
        if rank == 0:
            return attempt(lambda: relay.send(weights(step), 1, step=step))
        return received(relay, 0, live, OLD, step, TIMEOUT)

    outcomes = []
    for field, value in cases(wire.ToReceiver if liar == 0 else wire.ToSender):
        kind = INSTEAD.get(field.kind.__name__, wire.Go if liar == 0 else wire.Done)
        lie = said_instead(field, value, kind) if rank == liar else contextlib.nullcontext()
        with lie:
            outcomes.append((f"{field.id}={value!r}", call(NEW)))
    return [*outcomes, ("after", call(NEXT))]


@pytest.mark.parametrize("liar", [0, 1], ids=["sender", "receiver"])
def test_no_number_ends_or_hangs_the_other_side(pool2: Any, liar: int) -> None:
    results = pool2.run(exchange, liar, timeout=50, fresh_group=True)
    *scenes, (_, after) = results[1 - liar]
    said = wire.ToReceiver if liar == 0 else wire.ToSender
    assert len(scenes) == len(list(cases(said))) >= 10 and after.error is None
    for name, outcome in scenes:
        assert outcome.error == ("RemoteProtocolError", "PeerLostError")[liar], (name, outcome)
        assert outcome.seconds < TIMEOUT / 2, (name, outcome)
        assert liar == 1 or outcome.weights == OLD, (name, outcome)
