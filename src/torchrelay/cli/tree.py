"""A state as the lines of a tree: paths cut at their dots, with totals of what is below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torchrelay.cli.output import count, size

Row = tuple[str, ...]


class _TreeNode:
    """A node of the tree: leaves have `facts`, others have `below`."""

    def __init__(self) -> None:
        self.below: dict[str, _TreeNode] = {}
        self.facts: dict[str, Any] | None = None
        self.text = ""
        self.parameter = ""  # the name of the parameter whose state is below
        self.tensors = 0
        self.nbytes = 0


def tree_rows(facts: dict[str, Any], *, shards: bool) -> list[Row]:
    """Cells of each line: path, dtype, shape, size, shards, statistics."""
    root = _TreeNode()
    for tensor in facts["tensors"]:
        _at(root, tensor["name"], 1, tensor["bytes"]).facts = tensor
    for value in facts["values"]:
        several = f" ({value['ranks']} values on the ranks)" if value["ranks"] > 1 else ""
        _at(root, value["path"]).text = value["text"] + several
    for alias in facts["aliases"]:
        _at(root, alias["path"]).text = f"= {alias['tensor']}"
    for path, name in facts["parameters"].items():
        if (found := _found(root, path)) is not None:
            found.parameter = name
    return list(_rows(root, "", shards))


def _at(root: _TreeNode, path: str, tensors: int = 0, nbytes: int = 0) -> _TreeNode:
    here = root
    for name in path.split("."):
        here = here.below.setdefault(name, _TreeNode())
        here.tensors += tensors
        here.nbytes += nbytes
    return here


def _found(root: _TreeNode, path: str) -> _TreeNode | None:
    here: _TreeNode | None = root
    for name in path.split("."):
        here = None if here is None else here.below.get(name)
    return here


def _rows(branch: _TreeNode, rest: str, shards: bool) -> Iterator[Row]:
    children = list(branch.below.items())
    for place, (key, child) in enumerate(children):
        name = _named(key, child)
        while child.facts is None and not child.text and len(child.below) == 1:
            ((more, child),) = child.below.items()
            name += f".{_named(more, child)}"
        last = place == len(children) - 1
        mark, bar = ("└── ", "    ") if last else ("├── ", "│   ")
        if child.facts is not None:
            yield (rest + mark + name, *_cells(child.facts))
            if shards:
                yield from _shard_rows(child.facts["shards"], rest + bar)
        elif child.text:
            yield (rest + mark + name, child.text)
        else:
            shown = count(child.tensors, "tensor") if child.tensors else ""
            yield (rest + mark + name, shown, "", size(child.nbytes) if child.tensors else "")
        yield from _rows(child, rest + bar, shards)


def _named(key: str, node: _TreeNode) -> str:
    return f"{key} ({node.parameter})" if node.parameter else key


def _cells(facts: dict[str, Any]) -> Sequence[str]:
    cells = [facts["dtype"], _by(facts["shape"]), size(facts["bytes"]), _content(facts["shards"])]
    if "stats" in facts:
        cells.append(_numbers(facts["stats"]))
    return cells


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "()"


def _content(shards: list[dict[str, Any]]) -> str:
    ranks = sorted({shard["rank"] for shard in shards if shard["rank"] is not None})
    if not ranks:
        return "" if len(shards) < 2 else f"{len(shards)} shards"
    if len(shards) == 1:
        return f"rank {ranks[0]}"
    sizes = {tuple(shard["sizes"]) for shard in shards}
    each = f" of {_by(sizes.pop())}" if len(sizes) == 1 else ""
    run = len(ranks) == ranks[-1] - ranks[0] + 1
    shown = f"{ranks[0]}-{ranks[-1]}" if run else ", ".join(map(str, ranks))
    return f"{len(shards)} shards{each} on ranks {shown}"


def _shard_rows(shards: list[dict[str, Any]], rest: str) -> Iterator[Row]:
    for shard in shards:
        rank = "" if shard["rank"] is None else f"rank {shard['rank']}"
        box = ", ".join(
            f"{start}:{start + length}"
            for start, length in zip(shard["offsets"], shard["sizes"], strict=True)
        )
        yield (f"{rest}  {rank}", "", f"[{box}]", "", shard["file"])


def _numbers(stats: dict[str, Any] | None) -> str:
    if stats is None:
        return "no numbers"
    shown = [f"norm {stats['norm']:.4g}"]
    shown += [f"{name} {stats[name]:.4g}" for name in ("min", "max") if stats[name] is not None]
    shown += [
        f"{stats[name]} {label}"
        for name, label in (("nan", "NaN"), ("inf", "infinite"))
        if stats[name] or name == "nan"
    ]
    return ", ".join(shown)
