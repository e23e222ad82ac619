"""An offered tree next to that of a destination: which leaves go to which, and what objects get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from msgspec.structs import replace

from torchrelay.errors import MismatchError
from torchrelay.landing.new_leaves import ObjectLeaf
from torchrelay.landing.options import LandingOptions
from torchrelay.planning.catalog import Catalog
from torchrelay.planning.destination import Destination
from torchrelay.planning.selection import Selection
from torchrelay.record import manifest as m
from torchrelay.state import tensors as t
from torchrelay.state.backing import missing_memory
from torchrelay.state.hints import with_hints
from torchrelay.state.matching import (
    Matched,
    Pair,
    TreeComparison,
    ends_of,
    listed,
    refuse_differences,
)
from torchrelay.state.objects import InPlaceObject, Objects
from torchrelay.state.optimizers import check_kind, parameter_of, parameters_of
from torchrelay.state.paths import Path, key_of, text_of
from torchrelay.state.tree import grafted, show, slots, subtree
from torchrelay.state.wrappers import without_wrappers

Branches = dict[Path, m.Node]  # by object, its offered state


@dataclass
class Pairing:
    """`matched` pairs leaves. `branches` has what is offered for each object that is given its
    state: of these, leaves are made `for_objects`, and the pairs `in_objects` are written in place.
    `missing` and `extra` are paths that one side alone has.
    """

    into: Destination
    matched: Matched
    branches: Branches = field(default_factory=dict)
    for_objects: list[ObjectLeaf] = field(default_factory=list)
    in_objects: list[Pair] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    all_new: bool = False  # nothing of it is the caller's

    @classmethod
    def with_nothing(cls) -> Pairing:
        return cls(Destination(()), Matched([]), all_new=True)


def paired(catalog: Catalog, into: Destination, options: LandingOptions) -> Pairing:
    """Pair the offered leaves that are wanted with a destination. `MismatchError` where the two
    differ in more than the options allow."""
    tree, strict, choice = catalog.tree, options.strict, catalog.selection
    checked = _checked_in_place(catalog, into.objects, strict=strict)
    with with_hints(checked, into.flat.tree):
        roots = [path for path, stateful in into.objects.items() if not stateful.in_place]
        if checked is tree and not roots and choice.plain and tree == into.flat.tree:
            return Pairing(into, Matched([], into.flat.tree))
        modules = [path for path, stateful in into.objects.items() if stateful.in_place]
        checked = without_wrappers(checked, into.flat.tree, modules)
        pairing = _matched(checked, into, roots, choice, strict=strict)
    for path, branch in pairing.branches.items():
        optimizer = into.objects[path].object
        if strict and isinstance(optimizer, torch.optim.Optimizer):
            check_kind(optimizer, branch, path)
    _add_objects(pairing, options)
    return pairing


def _matched(
    offered: m.Node,
    into: Destination,
    roots: Sequence[Path],
    choice: Selection,
    *,
    strict: bool,
) -> Pairing:
    """Find the slots that both trees have and `choice` takes, and the offered state of the objects
    at `roots`, whose slots are not paired. With `strict`, the two differ in nothing that is
    chosen."""
    branches = _branches(offered, roots, choice)
    stubs = {path: -1 - number for number, path in enumerate(roots)}
    found = TreeComparison(grafted(offered, stubs), grafted(into.flat.tree, stubs))
    if strict:
        kinds = found.kinds
        if choice.guessed:  # planners take tuples of tensors for lists
            alike = ("a list", "a tuple")
            kinds = [kind for kind in kinds if (kind.offered, kind.here) != alike]
        refuse_differences(
            _missing(found, branches, choice) if choice.exact else (),
            _extra(found, branches, choice),
            () if choice.patterns else kinds,
        )
    pairs = [pair for pair in found.pairs if pair[0] >= 0 and choice.takes(pair[1])]
    roots_there = {path for index, path, _ in found.pairs if index < 0}
    return Pairing(
        into,
        Matched(pairs),
        {path: branches[path] for path in branches if path in roots_there},
        missing=listed(_missing(found, branches, choice)),
        extra=listed(_extra(found, branches, choice)),
    )


def _add_objects(pairing: Pairing, options: LandingOptions) -> None:
    """Add what objects get: pairs that are filled in where they have them, as a ShardedTensor is
    always and any other unless `atomic`, and what is made for them."""
    into, leaves = pairing.into, pairing.into.flat.leaves
    here = dict(slots(into.flat.tree)) if pairing.branches else {}
    for root, branch in pairing.branches.items():
        stateful = into.objects[root]
        parameters = parameters_of(stateful.object)
        for below, index in slots(branch):
            path = (*root, *below)
            mine = leaves[here[path]] if path in here else None
            if t.is_sharded(mine) or (
                not options.atomic
                and not stateful.in_module
                and isinstance(mine, (torch.Tensor, np.ndarray))
            ):
                pairing.in_objects.append((index, path, here[path]))
            elif isinstance(mine, torch.Tensor):
                if t.is_plain(mine) and (why := missing_memory(mine)) is not None:
                    raise MismatchError(
                        f"the destination cannot be written: {why}", path=show(path)
                    )
                fits = isinstance(stateful.object, torch.optim.Optimizer)
                pairing.for_objects.append(ObjectLeaf(index, path, mine, fits))
            else:
                parameter = parameter_of(parameters, below)
                pairing.for_objects.append(ObjectLeaf(index, path, parameter, fits=False))
    if pairing.in_objects:
        pairing.matched = Matched([*pairing.matched.pairs, *pairing.in_objects])


def _missing(
    found: TreeComparison, branches: Mapping[Path, m.Node], choice: Selection
) -> Iterator[Path]:
    for path, node in ends_of(found.missing):
        if path in branches if _is_stub(node) else choice.takes(path):
            yield path


def _extra(
    found: TreeComparison, branches: Mapping[Path, m.Node], choice: Selection
) -> Iterator[Path]:
    for path, node in ends_of(found.extra):
        if choice.guessed and not isinstance(node, int):
            continue  # planners drop empty containers
        if path in branches or not choice.patterns if _is_stub(node) else choice.takes(path):
            yield path


def _branches(offered: m.Node, roots: Sequence[Path], choice: Selection) -> Branches:
    """The offered state of each of these objects; one takes all of its state, or none."""
    found: Branches = {}
    for root in roots:
        branch = subtree(offered, root)
        if branch is None:
            continue
        if not choice.patterns:
            found[root] = branch
            continue
        paths = [(*root, *below) for below, _ in slots(branch)]
        chosen = [choice.takes(path) for path in paths or [root]]
        if all(chosen):
            found[root] = branch
        elif any(chosen):
            raise MismatchError(
                "an object takes all of its state or none, and `include` leaves this out: "
                "name all of it",
                path=show(paths[chosen.index(False)]),
            )
    return found


def _is_stub(node: m.Node) -> bool:
    """Whether a node stands for an object that takes its state."""
    return isinstance(node, int) and node < 0


def _checked_in_place(catalog: Catalog, objects: Objects, *, strict: bool) -> m.Node:
    """The offered tree without the names that objects leave out. `MismatchError` where one refuses
    what is offered for it."""
    tree, choice = catalog.tree, catalog.selection
    for path, stateful in objects.items():
        if not isinstance(stateful.object, InPlaceObject):
            continue
        branch = subtree(tree, path)
        if not isinstance(branch, m.DictNode):
            branch = m.DictNode("dict", (), ())
        names = [text_of(key_of(branch, number)) for number in range(len(branch.items))]
        offered = {
            name: catalog.tensor_of(item) if isinstance(item, int) else None
            for name, item in zip(names, branch.items, strict=True)
        }

        def wanted(name: str, at: Path = path) -> bool:
            return choice.takes((*at, name))

        # Ranks whose trees differ may each have their own part of the names.
        left_out = set(stateful.object.check(offered, wanted, strict=strict and choice.exact))
        kept = [number for number, name in enumerate(names) if name not in left_out]
        if len(kept) < len(names):
            keys, items = (tuple([some[n] for n in kept]) for some in (branch.keys, branch.items))
            tree = grafted(tree, {path: replace(branch, keys=keys, items=items)})
    return tree
