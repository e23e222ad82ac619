"""Values of the standard library: sets, times, numbers, ranges, and namespaces of them."""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import fractions
import pathlib
import types
import uuid
import zoneinfo
from collections.abc import Callable
from datetime import timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import torchrelay as tr
from tests.support.ranks import RankPool
from tests.support.records import stream_record
from torchrelay import dropin
from torchrelay.dropin.conversion import convert
from torchrelay.errors import ManifestError, UnsupportedLeafError
from torchrelay.inspection.step_source import contents_of
from torchrelay.record import manifest as m
from torchrelay.record import typed
from torchrelay.record.encoding import decode, encode
from torchrelay.record.values import Float, Text, Typed

VIENNA = zoneinfo.ZoneInfo("Europe/Vienna")
MOMENT = datetime.datetime(2026, 10, 25, 2, 30, 15, 123456)


def namespace(**values: Any) -> argparse.Namespace:
    found = argparse.Namespace()
    vars(found).update(values)
    return found


VALUES: dict[str, Any] = {
    "set": {1, 2.5, None, "a", b"b", 3j, "c"},
    "empty set": set(),
    "frozenset": frozenset({"x", ("y", (1, frozenset({2, 3})))}),
    "pairs": {(i, -i, f"{i}") for i in range(40)},
    "set of all": {
        MOMENT,
        MOMENT.date(),
        Path("a/b"),
        uuid.UUID(int=5),
        fractions.Fraction(1, 3),
        decimal.Decimal("2.50"),
        range(3),
        timezone.utc,
        timedelta(3),
        1 << 100,
        "\ud800",
    },
    "many": set(range(0, 30_000, 7)),
    "datetime": MOMENT,
    "folded": MOMENT.replace(fold=1, tzinfo=VIENNA),
    "utc": MOMENT.replace(tzinfo=timezone.utc),
    "fixed": MOMENT.replace(tzinfo=timezone(timedelta(hours=-3, minutes=-30, microseconds=1))),
    "named": MOMENT.replace(tzinfo=timezone(timedelta(hours=1), "here")),
    "utc by name": MOMENT.replace(tzinfo=timezone(timedelta(0), "UTC")),
    "date": datetime.date(1, 1, 1),
    "time": datetime.time(23, 59, 59, 999_999, tzinfo=timezone.utc, fold=1),
    "timedelta": timedelta(-3, 4, 5),
    "longest": timedelta.min,
    "timezone": timezone.utc,
    "zone": VIENNA,
    "uuid": uuid.uuid5(uuid.NAMESPACE_DNS, "x"),
    "safe uuid": uuid.UUID(int=9, is_safe=uuid.SafeUUID.safe),
    "decimals": [decimal.Decimal(x) for x in ("0.10", "-0E+3", "NaN123", "sNaN", "-Infinity")],
    "fraction": fractions.Fraction(-(1 << 70), 3),
    "range": range(10, -5, -3),
    "slices": [slice(None), slice(1, 1 << 80, -2), slice("a", (1, 2), None)],
    "complex": complex(-0.0, float("inf")),
    "paths": [Path("a"), pathlib.PurePosixPath("/b"), pathlib.PureWindowsPath("C:/c")],
    "namespace": namespace(lr=0.1, self="x", nested=argparse.Namespace(tags={"a"})),
    "simple": types.SimpleNamespace(day=datetime.date(2026, 1, 2)),
}
OTHERS: dict[str, Any] = {
    **dict.fromkeys(VALUES),
    "set": {5},
    "frozenset": frozenset(range(9)),
    "many": set(),
    "datetime": "a text",
    "decimals": [0] * 5,
    "slices": [0] * 3,
    "paths": [Path("x"), pathlib.PurePosixPath("x"), pathlib.PureWindowsPath("x")],
    "namespace": namespace(lr=0.5, self=0, nested=argparse.Namespace(tags=set())),
    "simple": types.SimpleNamespace(day=0),
}


def state(tensor: float = 1.0) -> dict[str, Any]:
    args = namespace(**vars(VALUES["namespace"]), w=torch.full((3,), tensor))
    return {"config": {**VALUES, "args": args}, "w": torch.full((3,), tensor)}


def other() -> dict[str, Any]:
    args = namespace(**vars(OTHERS["namespace"]), w=torch.zeros(3))
    return {"config": {**OTHERS, "args": args}, "w": torch.zeros(3)}


def spelled(value: Any) -> Any:
    """A value in words that tell apart all that is compared equal, and NaNs that are equal."""
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, map(spelled, value)))
    if isinstance(value, (list, tuple)):
        return type(value), [*map(spelled, value)]
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return type(value), [(name, spelled(one)) for name, one in vars(value).items()]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    fold = getattr(value, "fold", None)
    return type(value), repr(value), fold, getattr(value, "is_safe", None)


def check(got: dict[str, Any]) -> None:
    sent = state()["config"]
    assert {name: spelled(value) for name, value in got["config"].items()} == {
        name: spelled(value) for name, value in sent.items()
    }
    assert got["w"].tolist() == [1.0] * 3


def test_saved_and_loaded(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state())
        check(checkpointer.load().state)
        for atomic in (True, False):
            into = other()
            args = into["config"]["args"].w
            checkpointer.load(into, atomic=atomic)
            check(into)
            assert into["config"]["args"].w is args  # filled in place
        assert checkpointer.verify() == 1


def test_served_pulled_and_subscribed() -> None:
    with tr.serve(state(), step=1, timeout=60) as endpoint:
        check(tr.pull(endpoint.url, timeout=60).state)
        into = other()
        tr.pull(endpoint.url, into=into, timeout=60)
        check(into)
        into = other()
        with tr.subscribe(endpoint.url, into=into) as subscription:
            subscription.update(timeout=60)
            check(into)
            endpoint.publish({**state(), "w": torch.full((3,), 2.0)}, step=2)
            subscription.update(timeout=60)
        assert into["w"].tolist() == [2.0] * 3


def relayed(rank: int, group: Any) -> None:
    with tr.Relay(group, timeout=30) as relay:
        for step, (source, into) in enumerate([(0, None), (0, other()), ([0], other())]):
            if rank == 0:
                relay.send(state(), to=[1], step=step)
            else:
                check(relay.recv(source, into=into, step=step).state)


def test_sent_and_received(pool2: RankPool) -> None:
    pool2.run(relayed)


def transported(rank: int, group: Any) -> None:
    transport = dropin.PGTransport(group, timedelta(seconds=30), torch.device("cpu"))
    if rank == 0:
        transport.send_checkpoint([1], state())
    else:
        check(transport.recv_checkpoint(0))  # type: ignore[arg-type]


def test_by_the_drop_in_transport(pool2: RankPool) -> None:
    pool2.run(transported)


def saved_by_ranks(rank: int, group: Any, root: str) -> None:
    # Each rank's own set of text has another order: Python hashes text with a secret.
    tags = {f"tag {n}" for n in range(rank, 50)} | {f"tag {n}" for n in range(rank)}
    with tr.Checkpointer(root, group=group, timeout=30) as checkpointer:
        checkpointer.save(1, {"tags": tags, "own": {rank, (rank, "x")}, "at": MOMENT})
        got = checkpointer.load().state
        record = checkpointer.record(1)
    assert got == {"tags": tags, "own": {rank, (rank, "x")}, "at": MOMENT}
    assert [len(one.leaves) for one in record.differences] == [1]  # "own" alone


def test_ranks_with_equal_sets_share_one(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(saved_by_ranks, str(tmp_path))


def same_to_python(rank: int, group: Any, root: str) -> None:
    mine: Any = [(True, 1, 1.0)[rank], {(1, True)[rank % 2]}, 0.0 if rank else -0.0]
    with tr.Checkpointer(root, group=group, timeout=30) as checkpointer:
        checkpointer.save(1, {"x": mine})
        got = checkpointer.load().state["x"]
    assert [*map(spelled, got)] == [*map(spelled, mine)], rank


def test_ranks_keep_values_that_python_takes_for_equal(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(same_to_python, str(tmp_path))


def test_inspected_and_converted(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path / "steps") as checkpointer:
        checkpointer.save(1, state())
        contents = contents_of(checkpointer.record(1))
    texts = {value.path: value.text for value in contents.values}
    assert texts["config.date"] == "datetime.date(1, 1, 1)"
    assert texts["config.fraction"].startswith("Fraction(-1180591620717411303424, 3)")
    assert texts["config.args.argparse.Namespace.lr"] == "0.1"
    assert texts["config.many"].startswith("{0, 7, 14, 21")
    assert "Europe/Vienna" in texts["config.zone"]
    convert(tmp_path / "steps", tmp_path / "again", step=1)
    with tr.Checkpointer(tmp_path / "again") as checkpointer:
        check(checkpointer.load().state)
    convert(tmp_path / "steps", tmp_path / "state.pt", to="torch", step=1)
    found = torch.load(tmp_path / "state.pt", weights_only=True)["config"]
    assert found["set"] == VALUES["set"] and found["empty set"] == set()
    assert found["datetime"] == MOMENT.isoformat() and found["date"] == "0001-01-01"
    assert found["uuid"] == str(VALUES["uuid"]) and found["decimals"][0] == "0.10"
    assert found["fraction"] == "-1180591620717411303424/3"
    assert found["range"] == (10, -5, -3) and found["slices"][0] == (None, None, None)
    assert found["namespace"] == {"lr": 0.1, "self": "x", "nested": {"tags": {"a"}}}
    assert found["timedelta"] == VALUES["timedelta"].total_seconds()
    assert found["pairs"] == VALUES["pairs"]
    convert(tmp_path / "steps", tmp_path / "stock", to="dcp", step=1)
    convert(tmp_path / "stock", tmp_path / "back", step=1)
    with tr.Checkpointer(tmp_path / "back") as checkpointer:
        back = checkpointer.load().state["config"]
    assert back["set"] == VALUES["set"] and back["uuid"] == str(VALUES["uuid"])


class Mine:
    """Nobody has registered it."""

    def __init__(self) -> None:
        self.a = 1


class Slots:
    __slots__ = ()


class Day(datetime.date):
    pass


class Numbers(list):  # type: ignore[type-arg]
    pass


class Color(enum.Enum):
    RED = 1


class OddZone(datetime.tzinfo):
    pass


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (
            Mine(),
            r"register\(Mine, encode=vars, decode=lambda fields: Mine\(\*\*fields\)\)",
        ),
        (Slots(), r"torchrelay\.register\(Slots, encode=str, decode=Slots\)"),
        (Day(2026, 1, 1), r"torchrelay\.register\(Day, encode="),
        (Numbers(), r"torchrelay\.register\(Numbers, encode=list, decode=Numbers\)"),
        (Color.RED, r"torchrelay\.register\(Color\) on every rank"),
        (len, "put its name as text"),
        ({1, Color.RED}, r"a set with a \S+\.Color in it"),
        ({(1, (2, Mine()))}, r"a set with a \S+\.Mine in it"),
        ({torch.ones(1)}, r"a set with a torch\.Tensor in it"),
        (frozenset({Numbers}), r"a frozenset with a type in it"),
        (MOMENT.replace(tzinfo=OddZone()), r"a datetime with a \S+\.OddZone in it"),
        (fractions.Fraction(1, 1 << 70_000), "more than 65536 bits"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_others_are_refused_by_path_with_the_line_to_write(
    tmp_path: Path, leaf: Any, text: str
) -> None:
    with tr.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(UnsupportedLeafError, match=text) as caught:
            checkpointer.save(1, {"x": [leaf]})
        assert caught.value.path == "['x'][0]"


def test_the_line_to_write_works(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(UnsupportedLeafError) as caught:
            checkpointer.save(1, Numbers([1, 2]))
        line = caught.value.message.split("call ")[1].split(" on every rank")[0]
        eval(line, {"torchrelay": tr, "Numbers": Numbers, "list": list})
        checkpointer.save(1, {"x": Numbers([1, 2])})
        got = checkpointer.load().state["x"]
    assert type(got) is Numbers and got == [1, 2]


def test_a_name_that_cannot_be_written_is_refused_at_once() -> None:
    with pytest.raises(tr.errors.UsageError, match="cannot be written"):
        tr.register(Mine, name="\ud800", encode=vars, decode=lambda fields: Mine())


def test_the_caller_s_decimal_context_changes_nothing(tmp_path: Path) -> None:
    with decimal.localcontext(decimal.Context(prec=3, capitals=0)):
        record = typed.encode_typed(decimal.Decimal("1.23456E+99"))
        assert typed.decode_typed(record) == decimal.Decimal("1.23456E+99")
    assert record == Typed("decimal.Decimal", ("1.23456E+99",))


def value(name: str, *items: Any) -> m.ValueLeaf:
    return m.ValueLeaf("object", Typed(name, items))


HOSTILE = {
    "no type": m.ValueLeaf("object", 3),
    "object as plain": m.ValueLeaf("plain", Typed("range", (0, 1, 1))),
    "unknown type": value("os.system", "x"),
    "twice": value("set", 1, 1),
    "twice in other words": value("set", 1, Float(0x3FF0000000000000)),
    "out of order": value("set", 2, 1),
    "unhashable": value("set", Typed("set", ())),
    "month 13": value("datetime.date", 2026, 13, 1),
    "a bool": value("datetime.date", 2026, True, 1),
    "text": value("datetime.date", "x", 1, 1),
    "fold": value("datetime.time", 1, 2, 3, 4, True, None),
    "too few": value("datetime.datetime", 1),
    "too many": value("range", 1, 2, 3, 4),
    "step": value("range", 1, 2, 0),
    "normalised": value("datetime.timedelta", 0, 86_400, 0),
    "offset": value("datetime.timezone", Typed("datetime.timedelta", (2, 0, 0))),
    "reduced": value("fractions.Fraction", 2, 4),
    "zero": value("fractions.Fraction", 1, 0),
    "decimal": value("decimal.Decimal", "1_0"),
    "no decimal": value("decimal.Decimal", "ten"),
    "long uuid": value("uuid.UUID", -1),
    "safe": value("uuid.UUID", 5, 7),
    "path": value("pathlib.Path", 5),
    "surrogates": value("pathlib.Path", Text(b"\xff")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_record_of_no_value_is_refused(name: str) -> None:
    with pytest.raises(ManifestError):
        decode(encode(stream_record(0, [HOSTILE[name]])))


@pytest.mark.parametrize(
    "key", ["../../etc/passwd", "/etc/passwd", "", "a//b", "a.b", 7, "x" * 300]
)
def test_a_zone_is_a_name_and_no_path(key: Any) -> None:
    with pytest.raises(ValueError, match="a time zone has a name"):
        typed.decode_typed(Typed("zoneinfo.ZoneInfo", (key,)))


def test_a_zone_that_this_machine_lacks_is_refused_by_path(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"when": MOMENT.replace(tzinfo=VIENNA), "x": 5})
        path = tmp_path / "step-1" / "manifest.json"
        rewrite(path, lambda body: body.replace(b"Europe/Vienna", b"Europe/Atlant"))
        with pytest.raises(UnsupportedLeafError, match="tzdata") as caught:
            checkpointer.load(step=1)
        assert caught.value.path == "['when']"
        assert checkpointer.load(step=1, include="x").state == {"x": 5}
        assert "Europe/Atlant" in contents_of(checkpointer.record(1)).values[0].text


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    import xxhash

    sealed = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    body = change(bytes(sealed["record"]))
    digest = xxhash.xxh3_128_hexdigest(body)
    path.write_bytes(msgspec.json.encode({"record": msgspec.Raw(body), "digest": digest}))
