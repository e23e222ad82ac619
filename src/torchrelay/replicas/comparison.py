"""The result of `compare_ranks`: `Comparison`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torchrelay.results import Differing, replica_error
from torchrelay.tables import html_table


class FirstDifference(NamedTuple):
    """How the values of two ranks differ at a path. `at`: the index of the first element that does,
    in the local tensor. `values`: as text, those of `ranks`, first that of the majority, if there
    is one. `differing` of all `elements` differ, or more, if it is not `counted`."""

    path: str
    ranks: tuple[int, int]
    at: tuple[int, ...]
    values: tuple[str, str]
    elements: int
    differing: int
    counted: bool = True

    def __str__(self) -> str:
        (right, rank), (value, other) = self.ranks, self.values
        at = ", ".join(map(str, self.at))
        least = "" if self.counted else "at least "
        return (
            f"element ({at}) is {other} on rank {rank} and {value} on rank {right}; "
            f"{least}{self.differing} of {self.elements} differ"
        )


@dataclass(frozen=True)
class Comparison:
    """Which replicas differ. The same on all ranks, but for what this rank compared: `tensors` and
    their `bytes`. `str(comparison)` is a table for people."""

    tensors: int
    bytes: int
    seconds: float
    differ: int = 0  # number of tensors whose replicas differ
    differing: tuple[Differing, ...] = ()  # the first 256 of them
    details: tuple[FirstDifference, ...] = ()  # of the first 16, with detail=True

    @property
    def equal(self) -> bool:
        """Whether all replicas have the same bytes."""
        return not self.differ

    def raise_if_different(self) -> Comparison:
        """Raise `ReplicaError` with paths and ranks unless all replicas are equal."""
        if not self.equal:
            raise replica_error(self.differing, self.differ)
        return self

    def _headline(self) -> str:
        compared = f"{self.tensors} tensors of {self.bytes:,} bytes compared on this rank"
        result = "replicas are equal" if self.equal else f"replicas of {self.differ} tensors differ"
        return f"{result}: {compared} in {self.seconds:.3g} s"

    def _rows(self) -> list[tuple[str, str, str, str]]:
        """Path, kind, ranks and first difference of each."""
        details = {one.path: str(one) for one in self.details}
        return [
            (one.path, one.kind, one.named_ranks, details.get(one.path, ""))
            for one in self.differing
        ]

    def __str__(self) -> str:
        if self.equal:
            return self._headline()
        head = ("path", "kind", "ranks", "first difference" if self.details else "")
        rows = [head, *self._rows()]
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"{a:{wide[0]}}  {b:{wide[1]}}  {c:{wide[2]}}  {d}".rstrip() for a, b, c, d in rows
        ]
        if (rest := self.differ - len(self.differing)) > 0:
            lines.append(f"and {rest} more")
        return "\n  ".join([self._headline(), *lines])

    def _repr_html_(self) -> str:
        """For notebooks: the summary and a table of the tensors that differ."""
        return html_table(
            self._headline(), ("path", "kind", "ranks", "first difference"), self._rows()
        )
