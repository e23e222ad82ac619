"""Mappings as data: patterns of names, checks of rules, JSON and back, and boxes of one rank."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torchrelay.errors import MismatchError, UsageError
from torchrelay.geometry.boxes import around, without
from torchrelay.weights.mapping.layout import layout_of
from torchrelay.weights.mapping.rules import (
    ParameterRule,
    SourcePart,
    WeightMapping,
    complete,
    matched,
)
from torchrelay.weights.mapping.vllm import llama_to_vllm


@pytest.mark.parametrize(
    ("pattern", "name", "texts"),
    [
        ("a.*.b", "a.7.b", ("7",)),
        ("a.*.b", "a.7.8.b", None),
        ("a.**.b", "a.7.8.b", ("7.8",)),
        ("a.*.b.*", "a.0.b.weight", ("0", "weight")),
        ("a.b", "a.b", ()),
        ("a.b", "a-b", None),
        ("a.*", "a.", None),
        ("x[0].*", "x[0].y", ("y",)),
    ],
)
def test_a_pattern_gives_the_texts_of_its_wildcards(
    pattern: str, name: str, texts: tuple[str, ...] | None
) -> None:
    assert matched(pattern, name) == texts


def test_wildcards_are_filled_in_order_or_by_number() -> None:
    assert complete("h.*.mlp.*", ("3", "bias")) == "h.3.mlp.bias"
    assert complete("{2}.of.{1}.{2}", ("3", "bias")) == "bias.of.3.bias"


def test_the_first_rule_that_matches_counts() -> None:
    special = ParameterRule("a.*.b", (SourcePart("special.*"),))
    mapping = WeightMapping((special, ParameterRule("a.**", (SourcePart("rest.**"),))))
    assert mapping.rule_for("a.1.b") == (special, ("special.1",))
    assert mapping.rule_for("a.1.c") == (mapping.rules[1], ("rest.1.c",))
    assert mapping.rule_for("b") is None


def test_a_mapping_is_json_and_back() -> None:
    mapping = WeightMapping(
        (
            ParameterRule(
                "l.*.qkv", (SourcePart("l.*.q", 8), SourcePart("l.{1}.k", 4, 2, 2)), 1, 1
            ),
            ParameterRule("e", (SourcePart("t", 10),), split=0, padded=True, dtype="float32"),
            ParameterRule("**", transpose=True),
        ),
        ignored=("x.*",),
        kept=("y",),
    )
    config = {"num_attention_heads": 4, "hidden_size": 8, "vocab_size": 10}
    for one in (mapping, llama_to_vllm(config, dtype="float32")):
        assert WeightMapping.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    hash(mapping)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"rules": [{"parameter": "a", "parts": [{"name": "b", "sizes": 3}]}]}, "sizes"),
        ({"rules": [{"parameter": "a", "axis": 1}]}, "axis"),
        ({"rules": [], "more": 1}, "more"),
        ({}, "rules"),
        ({"rules": 5}, "mapping"),
        ({"rules": [5]}, "mapping"),
        ({"rules": [{"parameter": 5}]}, "str"),
        ({"rules": [{"parameter": "a", "dim": -1}]}, "dim"),
        ({"rules": [{"parameter": "a", "dtype": "float33"}]}, "float33"),
        ({"rules": [{"parameter": "a", "parts": [{"name": "b.*"}]}]}, "wildcards"),
        ({"rules": [{"parameter": "a.*", "parts": [{"name": "b.{2}"}]}]}, "wildcards"),
        ({"rules": [{"parameter": "a.{1}"}]}, "wildcard"),
        ({"rules": [{"parameter": "a", "padded": True}]}, "padded"),
    ],
)
def test_what_is_no_mapping_is_refused(data: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        WeightMapping.from_dict(data)


def test_fused_rows_of_a_rank_with_shared_heads() -> None:
    kv = {"size": 4, "pieces": 2}
    rule = ParameterRule("p", (SourcePart("q", 8), SourcePart("k", **kv)), split=0)
    boxes = layout_of(rule, (4, 3), (3, 4)).boxes
    assert [tuple(box) for box in boxes] == [
        (0, (8, 3), ((6, 0), (2, 3)), ((0, 0), (2, 3))),
        (1, (4, 3), ((2, 0), (2, 3)), ((2, 0), (2, 3))),
    ]


def test_a_padded_rank_has_rows_and_zeros() -> None:
    rule = ParameterRule("p", (SourcePart("e", 10),), split=0, padded=True)
    found = [layout_of(rule, (4, 2), (rank, 4)) for rank in range(4)]
    assert [one.boxes[0].box for one in found] == [
        ((0, 0), (4, 2)),
        ((4, 0), (4, 2)),
        ((8, 0), (2, 2)),
        ((10, 0), (0, 2)),
    ]
    paddings = [one.padding for one in found]
    assert paddings == [None, None, ((2, 0), (2, 2)), ((0, 0), (4, 2))]


def test_a_transposed_box_is_the_publishers() -> None:
    rule = ParameterRule("p", (SourcePart("a", 2), SourcePart("b", 4)), 1, 1, transpose=True)
    boxes = layout_of(rule, (5, 3), (1, 2)).boxes
    assert [(one.shape, one.box) for one in boxes] == [
        ((2, 5), ((1, 0), (1, 5))),
        ((4, 5), ((2, 0), (2, 5))),
    ]


@pytest.mark.parametrize(
    ("rule", "shape", "shard", "said"),
    [
        (ParameterRule("p", (SourcePart("a", 3), SourcePart("b", 3))), (5,), (0, 1), "makes 6"),
        (ParameterRule("p", (SourcePart("a"), SourcePart("b"))), (5,), (0, 1), "2 equal parts"),
        (ParameterRule("p", (SourcePart("a", 3),), split=0), (1,), (0, 2), "cut into 2"),
        (ParameterRule("p", (SourcePart("a", 6, pieces=2),), split=0), (2,), (0, 3), "3 ranks"),
        (ParameterRule("p", split=1), (4,), (0, 2), "split=1"),
        (ParameterRule("p", dim=2), (4, 4), (0, 1), "dim=2"),
        (ParameterRule("p", transpose=True), (4,), (0, 1), "transposed"),
        (ParameterRule("p", split=0), (), (0, 2), "scalar"),
        (ParameterRule("p", (SourcePart("a", 9),), split=0, padded=True), (4,), (0, 2), "9 are"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(
    rule: ParameterRule, shape: tuple[int, ...], shard: tuple[int, int], said: str
) -> None:
    with pytest.raises(MismatchError, match=said):
        layout_of(rule, shape, shard)


def test_boxes_around_and_without() -> None:
    holes = [((1, 1), (2, 2)), ((3, 0), (1, 4))]
    assert around(holes) == ((1, 0), (3, 4))
    left = without(((0, 0), (4, 4)), holes)
    cells = {(r + i, c + j) for (r, c), (n, m) in left for i in range(n) for j in range(m)}
    assert sum(n * m for _, (n, m) in left) == len(cells) == 16 - 4 - 4
    assert not cells & {(1, 1), (2, 2), (3, 3)}
