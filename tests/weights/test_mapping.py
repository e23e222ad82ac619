"""Weights under other names and in other layouts: exact, from where they belong, all or nothing."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import torchrelay as tr
from tests.endpoint.liars import Between
from tests.support import flat
from tests.support.forge import flip
from tests.support.ranks import RankPool
from tests.support.states import bits
from tests.support.trips import trip
from tests.weights.random_mappings import Case, random_case
from torchrelay.errors import (
    DamagedError,
    MismatchError,
    RelayError,
    UnsupportedLeafError,
    UsageError,
)
from torchrelay.weights.mapping import (
    MappedDestination,
    ParameterRule,
    SourcePart,
    WeightMapping,
)

TIMEOUT = 20.0
EXACT = [ParameterRule("**")]


def blank(wanted: dict[str, torch.Tensor], turned: bool = False) -> dict[str, torch.Tensor]:
    """Memory for these tensors, full of NaN; with dimensions in another order if `turned`."""
    found = {}
    for name, tensor in wanted.items():
        memory = torch.full_like(tensor, float("nan"), memory_format=torch.contiguous_format)
        if turned and tensor.ndim > 1:
            memory = memory.transpose(0, -1).contiguous().transpose(0, -1)
        found[name] = memory
    return found


def assert_exact(into: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert into.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert into[name].dtype is tensor.dtype
        assert bits(into[name]) == bits(tensor), name


def check_ranks(case: Case, load: Any) -> None:
    for rank, wanted in enumerate(case.wanted):
        into = blank(wanted, turned=rank % 2 == 1)
        got = load(MappedDestination(into, case.mapping, shard=(rank, case.ranks)))
        assert_exact(into, wanted)
        assert got.report.bytes == case.nbytes[rank]


@pytest.mark.parametrize("seed", range(40))
def test_random_mappings_load_exactly(seed: int, tmp_path: Path) -> None:
    case = random_case(seed)
    with tr.Checkpointer(tmp_path, timeout=TIMEOUT) as there:
        there.save(1, case.published)
        check_ranks(case, there.load)


@pytest.mark.parametrize("same_host", [True, False])
def test_random_mappings_are_pulled_exactly(same_host: bool) -> None:
    cases = [random_case(seed) for seed in range(100, 106)]
    with tr.serve(cases[0].published, step=0, timeout=TIMEOUT) as endpoint:
        for step, case in enumerate(cases, 1):
            endpoint.publish({"model": case.published}, step=step).result(TIMEOUT)
            check_ranks(
                case,
                lambda into: tr.pull(
                    endpoint.url,
                    into={"model": into},
                    no_dist=True,
                    timeout=TIMEOUT,
                    options=tr.options.PullOptions(same_host=same_host),
                ),
            )


def test_another_processes_whole_state_is_received_by_other_names() -> None:
    state = {"a": torch.arange(4.0), "b": torch.arange(4.0, 10.0)}
    mapping = WeightMapping((ParameterRule("ab", (SourcePart("a", 4), SourcePart("b", 6))),))
    for atomic in (True, False):
        into = {"ab": torch.zeros(10)}
        trip(state, into=MappedDestination(into, mapping), atomic=atomic)
        assert torch.equal(into["ab"], torch.arange(10.0))


class Fused(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(4, 6)
        self.head = torch.nn.Linear(3, 4, bias=False)


FUSED = WeightMapping(
    (
        ParameterRule("qkv.*", (SourcePart("q.*"), SourcePart("k.*"), SourcePart("v.*"))),
        ParameterRule("head.weight", (SourcePart("out"),), transpose=True, dtype="float64"),
    )
)


def published() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {f"{name}.weight": torch.randn(2, 4) for name in "qkv"}
    found |= {f"{name}.bias": torch.randn(2) for name in "qkv"}
    return {**found, "out": torch.randn(3, 4, dtype=torch.float64)}


def fused(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "qkv.weight": torch.cat([state[f"{name}.weight"] for name in "qkv"]),
        "qkv.bias": torch.cat([state[f"{name}.bias"] for name in "qkv"]),
        "head.weight": state["out"].t().float(),
    }


def test_a_module_is_filled_and_views_are_its_own_memory(tmp_path: Path) -> None:
    model, state = Fused(), published()
    destination = MappedDestination(model, FUSED)
    views = destination.state_dict()
    assert views.keys() == state.keys()
    for place, name in enumerate("qkv"):
        assert views[f"{name}.weight"].data_ptr() == model.qkv.weight[2 * place].data_ptr()
    assert views["out"].dtype is torch.float64
    version = model.qkv.weight._version
    with tr.Checkpointer(tmp_path, timeout=TIMEOUT) as there:
        there.save(1, state)
        assert there.load(destination).state is destination
    assert_exact(dict(model.state_dict()), fused(state))
    assert model.qkv.weight._version > version


def test_parameters_of_an_engines_own_type_are_filled() -> None:
    class OwnParameter(torch.nn.Parameter):
        """As vLLM's are."""

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    into = {"a": OwnParameter(torch.zeros(3), requires_grad=False)}
    assert type(into["a"]) is OwnParameter
    trip({"a": torch.arange(3.0)}, into=MappedDestination(into, WeightMapping((*EXACT,))))
    assert into["a"].tolist() == [0, 1, 2]


def test_one_tensor_for_several_parameters(tmp_path: Path) -> None:
    """A publisher ties what is here apart, and the other way round."""
    table, rules = torch.randn(6, 3), (ParameterRule("*", (SourcePart("table"),)),)
    apart = {"embedding": torch.zeros(6, 3), "head": torch.zeros(6, 3)}
    tied = dict.fromkeys(apart, torch.zeros(6, 3))
    with tr.Checkpointer(tmp_path, timeout=TIMEOUT) as there:
        there.save(1, {"table": table})
        for into in (apart, tied):
            there.load(MappedDestination(into, WeightMapping(rules)))
            assert_exact(into, dict.fromkeys(into, table))
        # One piece of memory under two names is not copied.
        views = MappedDestination(tied, WeightMapping(rules)).state_dict()
        assert views["table"].data_ptr() == tied["head"].data_ptr()
        # Ranks of their own number for each parameter.
        halves = {"embedding": torch.zeros(3, 3), "head": torch.zeros(2, 3)}
        split = WeightMapping((ParameterRule("*", (SourcePart("table", 6),), split=0),))
        there.load(MappedDestination(halves, split, shard={"embedding": (1, 2), "**": (1, 3)}))
        assert_exact(halves, {"embedding": table[3:], "head": table[2:4]})


def test_nothing_changes_if_anything_is_refused(tmp_path: Path) -> None:
    class Refuses:
        def state_dict(self) -> dict[str, int]:
            return {"x": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if state["x"] == 2:
                raise ValueError("no")

    state = {"model": published(), "other": {"x": 2}}
    model = Fused()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    into = {"model": MappedDestination(model, FUSED), "other": Refuses()}
    with tr.serve(state, step=1, timeout=TIMEOUT) as endpoint:
        for same_host in (True, False):
            with pytest.raises(MismatchError, match="refused"):
                tr.pull(
                    endpoint.url,
                    into=into,
                    timeout=TIMEOUT,
                    options=tr.options.PullOptions(same_host=same_host),
                )
            assert_exact(dict(model.state_dict()), before)


def test_nothing_changes_if_bytes_are_altered_on_their_way() -> None:
    model, state = Fused(), published()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    destination = MappedDestination(model, FUSED)
    altered = True

    def alter(line: str, body: bytes) -> bytes:
        return body[:-1] + bytes([body[-1] ^ altered]) if "/volumes/" in line else body

    with tr.serve({"weights": state}, step=1, timeout=TIMEOUT) as endpoint:
        between = Between(endpoint.url, alter)
        how: Any = {"into": destination, "key": "weights", "same_host": False, "timeout": TIMEOUT}
        try:
            with pytest.raises(RelayError):
                flat.pull(between.url, **how)
            assert_exact(dict(model.state_dict()), before)
            altered = False
            # The same destination again and again, with memory of its own or not.
            for step in range(2, 4):
                flat.pull(between.url, **how)
                assert_exact(dict(model.state_dict()), fused(state))
                state = {name: tensor + 1 for name, tensor in state.items()}
                endpoint.publish({"weights": state}, step=step).result(TIMEOUT)
        finally:
            between.close()


@pytest.mark.parametrize("name", ["q.weight", "out"])
def test_nothing_changes_if_bytes_are_damaged(name: str, tmp_path: Path) -> None:
    model, state = Fused(), published()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    destination = MappedDestination(model, FUSED)
    with tr.Checkpointer(tmp_path, timeout=TIMEOUT) as there:
        there.save(1, state)
        (file,) = tmp_path.glob("step-1/*.safetensors")
        at = file.read_bytes().index(bits(state[name]))
        flip(file, at)
        with pytest.raises(DamagedError):
            there.load(destination, step=1)
        assert_exact(dict(model.state_dict()), before)
        flip(file, at)
        there.load(destination)
    assert_exact(dict(model.state_dict()), fused(state))


def test_every_difference_is_in_one_error(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        **{f"right.{n}": torch.zeros(2) for n in range(9)},
        **{f"lone.{n}": torch.zeros(2) for n in range(9)},
        "wide": torch.zeros(2, 3),
        "half": torch.zeros(2, dtype=torch.float16),
        "text": "a value",
        "skipped.x": torch.zeros(1),
    }
    into: dict[str, Any] = {
        **{f"right.{n}": torch.zeros(2) for n in range(9)},
        **{f"unknown.{n}": torch.zeros(2) for n in range(9)},
        **{f"absent.{n}": torch.zeros(2) for n in range(9)},
        "wide": torch.zeros(3, 2),
        "half": torch.zeros(2),
        "text": torch.zeros(2),
        "odd": torch.zeros(3),
        "meta": torch.zeros(3, device="meta"),
        "number": 5,
        "left.x": torch.zeros(1),
    }
    rules = [
        *(ParameterRule(name) for name in ("right.*", "absent.*", "wide", "half", "text", "meta")),
        ParameterRule("odd", (SourcePart("right.0"), SourcePart("right.1"))),
        ParameterRule("number", (SourcePart("right.2"),)),
    ]
    mapping = WeightMapping(tuple(rules), ignored=("skipped.*",), kept=("left.*",))
    with tr.Checkpointer(tmp_path, timeout=TIMEOUT) as there:
        there.save(1, state)
        with pytest.raises(MismatchError) as caught:
            there.load(MappedDestination(into, mapping))
        lines = caught.value.message.splitlines()[1:]
        assert {line.split(":")[0].strip() for line in lines} == {
            *(f"{kind}.{n}" for kind in ("lone", "unknown", "absent") for n in range(9)),
            *("wide", "half", "text", "odd", "meta", "number"),
        }
        assert len(lines) == 33
        assert "33 places" in caught.value.message
        said = caught.value.message
        for expected in (
            "lone.3: published, and no parameter takes it",
            "unknown.3: no rule is about this parameter",
            "absent.3: not published, and absent.3 is made of it",
            "wide: published with shape (2, 3), and wide takes (3, 2)",
            "half: published with dtype float16, and half takes float32",
            "text: published as something else than a tensor",
            "odd: has 3 along dimension 0, and the rule makes 0 and 2 equal parts of it",
        ):
            assert expected in said
        # Names that are left over do not count without `strict`; the rest does.
        with pytest.raises(MismatchError, match="in 6 places"):
            there.load(MappedDestination(into, mapping), strict=False)
    assert not any(
        one.any() for one in into.values() if isinstance(one, torch.Tensor) and not one.is_meta
    )


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_ignored_name_may_stand_anywhere(place: int) -> None:
    names = ["a", "b"]
    names.insert(place, "ignored")
    state = {name: torch.full((2,), float(number)) for number, name in enumerate(names)}
    into = {"a": torch.zeros(2), "b": torch.zeros(2)}
    mapping = WeightMapping((*EXACT,), ignored=("ignored",))
    for landed in (
        lambda to: trip(state, into=to),
        lambda to: trip({"sub": state, "n": 1}, into={"sub": to, "n": 2}),
    ):
        landed(MappedDestination(into, mapping))
        assert_exact(into, {name: state[name] for name in into})
    with tr.serve(state, step=1, timeout=TIMEOUT) as endpoint:
        tr.pull(endpoint.url, into=MappedDestination(into, mapping), timeout=TIMEOUT)
    assert_exact(into, {name: state[name] for name in into})


def test_names_that_are_left_over_stay_as_they_are_without_strict(tmp_path: Path) -> None:
    into = {"a": torch.zeros(2), "b": torch.ones(2), "c": torch.ones(2)}
    rules = (ParameterRule("a"), ParameterRule("b", dtype="float64"))
    with tr.Checkpointer(tmp_path, timeout=TIMEOUT) as there:
        there.save(1, {"a": torch.full((2,), 3.0), "z": torch.zeros(1)})
        got = there.load(MappedDestination(into, WeightMapping(rules)), strict=False)
    assert {name: tensor.tolist() for name, tensor in into.items()} == {
        "a": [3, 3],
        "b": [1, 1],
        "c": [1, 1],
    }
    assert got.report.unexpected_keys == ("['z']",)
    assert got.report.missing_keys == ("['b']",)


def test_included_names_alone_are_checked_and_loaded(tmp_path: Path) -> None:
    into = {"a": torch.zeros(2), "b": torch.ones(2)}
    mapping = WeightMapping((ParameterRule("*", (SourcePart("of.*"),), dtype="float64"),))
    with tr.Checkpointer(tmp_path, timeout=TIMEOUT) as there:
        there.save(1, {f"of.{name}": torch.full((2,), 3.0, dtype=torch.float64) for name in "ab"})
        there.load(MappedDestination(into, mapping), include="of.a")
    assert into["a"].tolist() == [3, 3]
    assert into["b"].tolist() == [1, 1]


def test_a_part_of_what_can_only_be_read_whole_is_refused(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(2, 6)
    columns = {"a": matrix[:, :4], "b": matrix[:, 2:]}  # they overlap: one image of bytes
    mapping = WeightMapping((ParameterRule("*", split=0),))
    halves = {name: torch.zeros(1, 4) for name in columns}
    whole = {name: torch.zeros(2, 4) for name in columns}
    with tr.Checkpointer(tmp_path, timeout=TIMEOUT) as there:
        there.save(1, columns)
        with pytest.raises(MismatchError, match=r"in 2 places:\n  a: .* cannot be read alone"):
            there.load(MappedDestination(halves, mapping, shard=(1, 2)))
        there.load(MappedDestination(whole, mapping))
    assert_exact(whole, columns)
    with pytest.raises(MismatchError, match="list of ranks"):
        trip(
            {"a": torch.zeros(2, 4)},
            into=MappedDestination({"a": halves["a"]}, mapping, shard=(1, 2)),
        )


def test_two_layouts_of_one_tensor_are_refused() -> None:
    into = {"a": torch.zeros(4), "b": torch.zeros(2, 2)}
    mapping = WeightMapping((ParameterRule("*", (SourcePart("x"),)),))
    with pytest.raises(MismatchError, match=r"b: takes x as float32 \[2, 2\], and a takes it as"):
        trip({"x": torch.zeros(4)}, into=MappedDestination(into, mapping))


def test_two_tensors_for_one_piece_of_memory_are_refused() -> None:
    tied = torch.zeros(2)
    into = {"a": tied, "b": tied}
    state = {name: torch.full((2,), float(n), dtype=torch.float64) for n, name in enumerate("ab")}
    for dtype in ("float64", None):
        one = {
            name: tensor.to(torch.float64 if dtype else tied.dtype)
            for name, tensor in state.items()
        }
        mapping = WeightMapping((ParameterRule("*", dtype=dtype),))
        said = r"a'\] and .*b'\] go to the same memory; the destination shares memory"
        with pytest.raises(MismatchError, match=said):
            trip(one, into=MappedDestination(into, mapping))
    assert not tied.any()


# How a state comes to a destination.


def _send(state: object, into: object, folder: Path) -> None:
    trip(state, into=into)


def _load(state: object, into: object, folder: Path) -> None:
    with tr.Checkpointer(folder, timeout=TIMEOUT) as there:
        there.save(1, state)
        there.load(into)


def _pull(state: object, into: object, folder: Path, *, same_host: bool = True) -> None:
    with tr.serve(state, step=1, timeout=TIMEOUT) as endpoint:
        tr.pull(
            endpoint.url,
            into=into,
            no_dist=True,
            timeout=TIMEOUT,
            options=tr.options.PullOptions(same_host=same_host),
        )


def _pull_over_tcp(state: object, into: object, folder: Path) -> None:
    _pull(state, into, folder, same_host=False)


def _subscribe(state: object, into: object, folder: Path) -> None:
    with (
        tr.serve(state, step=1, timeout=TIMEOUT) as endpoint,
        tr.subscribe(endpoint.url, into=into, no_dist=True, timeout=TIMEOUT) as updates,
    ):
        updates.update()


WAYS = [_send, _load, _pull, _pull_over_tcp, _subscribe]
WIDE = ParameterRule("*", dtype="float64")  # converted to what the parameter has


def _overlapping(kind: str) -> tuple[dict[str, Any], Any, torch.Tensor]:
    """A state, a destination that would have to hold two of its values in one place, and the memory
    that must not change."""
    buf = torch.full((6,), -1.0)
    state: dict[str, Any] = {
        name: torch.full((4,), float(number), dtype=torch.float64)
        for number, name in enumerate("ab")
    }
    into: Any = {"a": buf[0:4], "b": buf[2:6]}
    if kind == "converted":
        return state, MappedDestination(into, WeightMapping((WIDE,))), buf
    if kind == "one of them converted":
        state["b"] = state["b"].float()
        return state, MappedDestination(into, WeightMapping((ParameterRule("b"), WIDE))), buf
    if kind == "several parameters of one tensor":
        into["c"] = torch.zeros(4)  # of the same tensor as b, so both are copied
        rules = (ParameterRule("a"), ParameterRule("*", (SourcePart("b"),)))
        state = {name: tensor.float() for name, tensor in state.items()}
        return state, MappedDestination(into, WeightMapping(rules)), buf
    if kind == "one tensor, shifted":
        rules = (ParameterRule("*", (SourcePart("a"),), dtype="float64"),)
        return {"a": torch.arange(4.0).double()}, MappedDestination(into, WeightMapping(rules)), buf
    if kind == "padding":
        # The last row is padding, and another parameter.
        rules = (
            ParameterRule("a", (SourcePart("a", 3),), split=0, padded=True),
            ParameterRule("b"),
        )
        state = {"a": torch.arange(3.0), "b": torch.ones(1)}
        into = {"a": buf[0:4], "b": buf[3:4]}
        return state, MappedDestination(into, WeightMapping(rules)), buf
    if kind == "expanded":
        into = {"a": buf[:1].expand(4)}
        state = {"a": torch.arange(4.0).double()}
        return state, MappedDestination(into, WeightMapping((WIDE,))), buf
    if kind == "another leaf of the state":
        mapped = MappedDestination({"a": into["a"]}, WeightMapping((WIDE,)))
        return {"m": {"a": state["a"]}, "b": state["b"].float()}, {"m": mapped, "b": into["b"]}, buf
    if kind == "an array":
        mapped = MappedDestination({"a": into["a"]}, WeightMapping((WIDE,)))
        array = into["b"].numpy()
        offered = {"m": {"a": state["a"]}, "b": state["b"].float().numpy()}
        return offered, {"m": mapped, "b": array}, buf
    assert kind == "another mapped destination"
    both = {x: MappedDestination({x: into[x]}, WeightMapping((WIDE,))) for x in "ab"}
    return {x: {x: state[x]} for x in "ab"}, both, buf


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "kind",
    [
        "converted",
        "one of them converted",
        "several parameters of one tensor",
        "one tensor, shifted",
        "padding",
        "expanded",
        "another leaf of the state",
        "an array",
        "another mapped destination",
    ],
)
def test_memory_that_would_take_two_values_is_refused(kind: str, way: Any, tmp_path: Path) -> None:
    state, into, memory = _overlapping(kind)
    before = memory.clone()
    with pytest.raises(MismatchError, match="shares memory"):
        way(state, into, tmp_path)
    assert torch.equal(memory, before)


@pytest.mark.parametrize("way", WAYS)
def test_memory_that_takes_one_value_twice_is_converted_once_or_twice(
    way: Any, tmp_path: Path
) -> None:
    """Views that overlap, and take what they share from the same elements."""
    buf, columns = torch.zeros(4), torch.zeros(2, 4)
    into = {"all": buf, "first": columns[:, :2], "second": columns[:, 2:], "view": buf.view(4)}
    rules = (
        ParameterRule("all", (SourcePart("x"),), dtype="float64"),
        ParameterRule("view", (SourcePart("x"),), dtype="float64"),
        WIDE,
    )
    x, first, second = (torch.randn(s, dtype=torch.float64) for s in ((4,), (2, 2), (2, 2)))
    state = {"x": x, "first": first, "second": second}
    way(state, MappedDestination(into, WeightMapping(rules)), tmp_path)
    assert torch.equal(buf, x.float())
    assert torch.equal(columns, torch.cat([first, second], 1).float())


@pytest.mark.parametrize("seed", range(8))
def test_overlapping_memory_is_refused_as_counting_each_element_tells(seed: int) -> None:
    """Random views of one buffer, converted or not: refused if an element would take two values,
    and exact otherwise."""
    random, told = Random(seed), {True: 0, False: 0}
    for _ in range(60):
        buf = torch.full((24,), -1.0)
        numbers = torch.arange(24)
        into, state, rules, elements = {}, {}, [], []
        for name in "abc"[: random.randint(2, 3)]:
            sizes, steps = random.choice([((4,), (1,)), ((2, 3), (6, 1)), ((3, 2), (1, 6))])
            at = random.choice([0, 2, 3, 4, 6, 8, 12])
            into[name] = buf.as_strided(sizes, steps, at)
            source = random.choice("xy") + str(len(sizes)) + str(sizes[0])
            dtype = random.choice([torch.float64, torch.float32])
            source += str(dtype)[-2:]
            state.setdefault(source, torch.randn(sizes).to(dtype))
            kind = str(dtype).removeprefix("torch.")
            rules.append(ParameterRule(name, (SourcePart(source),), dtype=kind))
            places = numbers.as_strided(sizes, steps, at).flatten().tolist()
            elements += [(place, source, n) for n, place in enumerate(places)]
        taken: dict[int, set[tuple[str, int]]] = {}
        for place, source, n in elements:
            taken.setdefault(place, set()).add((source, n))
        fine = all(len(values) == 1 for values in taken.values())
        told[fine] += 1
        destination = MappedDestination(into, WeightMapping(tuple(rules)))
        if not fine:
            with pytest.raises(MismatchError, match="shares memory"):
                trip(state, into=destination)
            assert (buf == -1).all()
            continue
        trip(state, into=destination)
        for place, values in taken.items():
            ((source, n),) = values
            assert buf[place] == state[source].flatten()[n].float()
    assert min(told.values()) > 3, told


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0)])
def test_a_shard_is_a_rank_of_so_many(shard: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="number of ranks"):
        MappedDestination({}, WeightMapping(()), shard=shard)


# Ranks


def save_and_load(rank: int, group: Any, root: str) -> list[str]:
    """Saved as a trainer shards it, loaded as tensor parallelism does; what came out wrong."""
    mesh = dist.init_device_mesh("cpu", (2,))
    whole = {
        f"{name}.weight": torch.arange(24.0).view(6, 4) + 100 * n for n, name in enumerate("qk")
    }
    whole["out"] = torch.arange(20.0).view(4, 5)
    rules = (
        ParameterRule("qk", (SourcePart("q.weight"), SourcePart("k.weight")), split=0),
        ParameterRule("out", split=1, transpose=True, dtype="float32"),
        ParameterRule("unready"),
    )
    full = torch.cat([whole["q.weight"], whole["k.weight"]])
    wrong = []
    with tr.Checkpointer(root, group=group, timeout=TIMEOUT) as there:
        trained = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in whole.items()}
        there.save(1, trained)
        # DTensors have rows of what is fused.
        turned = torch.zeros(5, 4, dtype=torch.bfloat16)
        into = {
            "qk": distribute_tensor(torch.zeros(12, 4), mesh, [Shard(0)]),
            "out": distribute_tensor(turned, mesh, [Shard(1)]),
        }
        there.load(MappedDestination(into, WeightMapping(rules)))
        wrong += [] if torch.equal(into["qk"].full_tensor(), full) else ["DTensor"]
        right = torch.equal(into["out"].full_tensor(), whole["out"].t().bfloat16())
        wrong += [] if right else ["DTensor of another dtype"]
        # Plain tensors have their piece of each.
        mine = {"qk": torch.zeros(6, 4), "out": torch.zeros(5, 2)}
        got = there.load(MappedDestination(mine, WeightMapping(rules), shard=(rank, 2)))
        pieces = [whole[f"{name}.weight"].chunk(2)[rank] for name in "qk"]
        wrong += [] if torch.equal(mine["qk"], torch.cat(pieces)) else ["rows"]
        wrong += [] if torch.equal(mine["out"], whole["out"].t().chunk(2, 1)[rank]) else ["turned"]
        wrong += [] if got.report.bytes == 4 * (24 + 10) else [f"{got.report.bytes} bytes"]
        # The same from the memory of both ranks.
        mine = {"qk": torch.zeros(6, 4), "out": torch.zeros(5, 2)}
        destination = MappedDestination(mine, WeightMapping(rules), shard=(rank, 2))
        with tr.serve(trained, step=1, group=group, timeout=TIMEOUT) as endpoint:
            for same_host in (True, False):
                mine["qk"].zero_()
                tr.pull(
                    endpoint.url,
                    into=destination,
                    group=group,
                    timeout=TIMEOUT,
                    options=tr.options.PullOptions(same_host=same_host),
                )
                wrong += [] if torch.equal(mine["qk"], torch.cat(pieces)) else ["pulled"]
            dist.barrier(group)
        # And by live transfers: whole tensors, and pieces of them.
        relay = tr.Relay(group, timeout=TIMEOUT)
        if rank == 0:
            relay.send({"a": torch.arange(4.0), "b": torch.arange(2.0)}, to=1)
            relay.send(whole, to=1)
        else:
            joined, ab = {"ab": torch.zeros(6)}, (SourcePart("a", 4), SourcePart("b", 2))
            relay.recv(0, into=MappedDestination(joined, WeightMapping((ParameterRule("ab", ab),))))
            wrong += [] if joined["ab"].tolist() == [0, 1, 2, 3, 0, 1] else ["received"]
            mine["qk"].zero_()
            relay.recv([0], into=destination)
            wrong += [] if torch.equal(mine["qk"], torch.cat(pieces)) else ["gathered"]
        relay.close()
        # A mapping that does not fit on one rank changes nothing on any.
        before = mine["qk"].clone()
        there.save(2, {name: one + 1 for name, one in whole.items()})
        unready = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
        bad = {**mine, "more": torch.zeros(1), "unready": unready} if rank else mine
        try:
            there.load(MappedDestination(bad, WeightMapping(rules), shard=(rank, 2)))
        except MismatchError as fault:
            right = "more: no rule" in fault.message and "unready: a DTensor" in fault.message
            wrong += [] if right else [fault.message]
        else:
            wrong.append("not refused")
        wrong += [] if torch.equal(mine["qk"], before) else ["written"]
    return wrong


def test_ranks_load_what_they_have_of_fused_parameters(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(save_and_load, str(tmp_path)) == [[], []]


def test_weights_are_recovered_by_other_names(tmp_path: Path) -> None:
    model, state = Fused(), published()
    with tr.Checkpointer(tmp_path, timeout=TIMEOUT) as there:
        there.save(1, state)
        got = tr.recover(sources=[there], into=MappedDestination(model, FUSED), timeout=TIMEOUT)
    assert got.step == 1
    assert_exact(dict(model.state_dict()), fused(state))


def test_an_object_that_cannot_tell_its_state_is_named() -> None:
    class Broken:
        def state_dict(self) -> Any:
            raise ValueError("no state")

        def load_state_dict(self, state: Any) -> None: ...

    into = MappedDestination({"x": Broken()}, WeightMapping((*EXACT,)))
    with pytest.raises(UnsupportedLeafError, match="no state"):
        trip({"x": torch.zeros(1)}, into=into)
