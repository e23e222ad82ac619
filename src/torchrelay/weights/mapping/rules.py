"""How a publisher's names and layouts become the parameters of another program: plain data.

A mapping is a list of rules. Each names the publisher's tensors that a parameter is made of. It can
be written as JSON and read back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any

import msgspec

from torchrelay.errors import UsageError
from torchrelay.record.dtypes import ITEM_SIZES

# Wildcards of a pattern, and places where a name takes the text that one of them stood for.
_TOKENS = re.compile(r"\*\*|\*|\{(\d+)\}")


@dataclass(frozen=True)
class SourcePart:
    """One of the publisher's tensors, or a part of one, in a parameter.

    - `name`: the publisher's name; a wildcard, or `{1}`, is the text of the rule's first wildcard.
    - `size`: length along the rule's `dim`, before any split among ranks. If None, such parts share
      evenly what the others leave of the parameter.
    - `start`: where the part begins along `dim` in the publisher's tensor.
    - `pieces`: the largest number of pieces that it is split into. If ranks are more, several have
      the same piece, as with the attention heads of keys and values.
    """

    name: str
    size: int | None = None
    start: int = 0
    pieces: int | None = None

    def __post_init__(self) -> None:
        _check_counts(self, size=0, start=0, pieces=1)


@dataclass(frozen=True)
class ParameterRule:
    """The parts that a parameter is made of, and how they lie in it.

    - `parameter`: its name. `*` is one part between dots, `**` any number of them.
    - `parts`: what is in it, one after the other along `dim`. Empty: the tensor of the same name.
    - `split`: the dimension along which ranks have each part in equal pieces, in their order.
      None: every rank has all of it. Not used for DTensors, which say themselves what they have.
    - `padded`: the parameter may be longer than its one part. The rest of it is set to zero.
    - `transpose`: the publisher has the two dimensions of a matrix in the other order. Dimensions
      of the rule are those of the parameter.
    - `dtype`: the publisher's, if it is another one than the parameter's; values are converted as
      by `Tensor.to`.
    """

    parameter: str
    parts: tuple[SourcePart, ...] = ()
    dim: int = 0
    split: int | None = None
    padded: bool = False
    transpose: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        _check_counts(self, dim=0, split=0)
        if not self.parts:
            object.__setattr__(self, "parts", (SourcePart(self.parameter),))
        for part in self.parts:
            check_pair(self.parameter, part.name)
        if self.dtype is not None and self.dtype not in ITEM_SIZES:
            raise UsageError(f"{self.parameter}: no dtype is called {self.dtype!r}")
        if self.padded:
            if len(self.parts) > 1 or self.parts[0].size is None or self.parts[0].pieces:
                raise UsageError(
                    f"{self.parameter}: a padded parameter has one part, and the size of it"
                )
            if self.split not in (None, self.dim):
                raise UsageError(f"{self.parameter}: split={self.split} is not the padded dim")

    def sources(self, parameter: str) -> tuple[str, ...] | None:
        """The publisher's name of each part of a parameter; None if the rule is not about it."""
        texts = matched(self.parameter, parameter)
        return None if texts is None else tuple([complete(part.name, texts) for part in self.parts])


@dataclass(frozen=True)
class WeightMapping:
    """The `rules` of all parameters. The first rule that matches a name counts.

    `ignored` has patterns of the publisher's names that no parameter takes, `kept` those of
    parameters that stay as they are. Any other name that is left over on either side is an error.
    """

    rules: tuple[ParameterRule, ...]
    ignored: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def rule_for(self, parameter: str) -> tuple[ParameterRule, tuple[str, ...]] | None:
        """The rule for a parameter, and the publisher's name of each of its parts."""
        for rule in self.rules:
            if (names := rule.sources(parameter)) is not None:
                return rule, names
        return None

    def ignores(self, name: str) -> bool:
        return any(matched(pattern, name) is not None for pattern in self.ignored)

    def keeps(self, parameter: str) -> bool:
        return any(matched(pattern, parameter) is not None for pattern in self.kept)

    def to_dict(self) -> dict[str, Any]:
        """The mapping as dicts, lists, text and numbers."""
        plain: dict[str, Any] = msgspec.to_builtins(asdict(self))
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WeightMapping:
        """The mapping that `to_dict` gave. `UsageError` for anything else."""
        try:
            _check_fields(cls, data)
            for rule in data.get("rules", ()):
                _check_fields(ParameterRule, rule)
                for part in rule.get("parts", ()):
                    _check_fields(SourcePart, part)
            return msgspec.convert(data, cls)
        except (msgspec.ValidationError, AttributeError, TypeError) as fault:
            raise UsageError(f"not a mapping of weights: {fault}") from fault


msgspec.json.Decoder(WeightMapping)  # looks its fields up, which threads must not do at once


def _check_counts(one: SourcePart | ParameterRule, **least: int) -> None:
    """Raise `UsageError` for a field that is a number below its least one."""
    for name, lowest in least.items():
        value = getattr(one, name)
        if value is not None and (type(value) is not int or value < lowest):
            raise UsageError(f"{name} is a number of at least {lowest}, not {value!r}")


def _check_fields(kind: type, data: Mapping[str, Any]) -> None:
    unknown = set(data) - {field.name for field in fields(kind)}
    if unknown:
        raise UsageError(f"{kind.__name__} has no field {', '.join(sorted(map(str, unknown)))}")


def matched(pattern: str, name: str) -> tuple[str, ...] | None:
    """The texts that the wildcards of a pattern stand for in a name; None if it does not match.

    `*` is a part of a name between two dots, or of such a part; `**` may contain dots. Both stand
    for at least one character.
    """
    found = _compiled(pattern).fullmatch(name)
    return None if found is None else found.groups()


def complete(pattern: str, texts: tuple[str, ...]) -> str:
    """The name that a pattern is with these texts: its first wildcard is the first of them and so
    on, and `{2}` is the second."""
    wildcards = iter(texts)

    def text(token: re.Match[str]) -> str:
        return next(wildcards) if token[1] is None else texts[int(token[1]) - 1]

    return _TOKENS.sub(text, pattern)


def check_pair(pattern: str, other: str) -> None:
    """Raise `UsageError` unless every name that matches `pattern` makes a name of `other`."""
    if any(token[1] for token in _TOKENS.finditer(pattern)):
        raise UsageError(f"{pattern!r} refers to a wildcard, and is where the wildcards stand")
    count = len(list(_TOKENS.finditer(pattern)))
    tokens = list(_TOKENS.finditer(other))
    references = [int(token[1]) for token in tokens if token[1]]
    if len(tokens) - len(references) > count or any(not 0 < n <= count for n in references):
        raise UsageError(f"{other!r} needs more wildcards than {pattern!r} has, which is {count}")


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    expression, at = "", 0
    for token in _TOKENS.finditer(pattern):
        expression += re.escape(pattern[at : token.start()])
        expression += "(.+)" if token[0] == "**" else r"([^.]+)"
        at = token.end()
    return re.compile(expression + re.escape(pattern[at:]), re.DOTALL)
