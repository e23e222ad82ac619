"""An offered tree next to a destination: which of its leaves go to which, and what objects get."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from msgspec.structs import replace

from torchrelay.errors import MismatchError
from torchrelay.landing.destination import Pair, PreparedDestination
from torchrelay.landing.missing import GivenLeaf
from torchrelay.landing.options import LandingOptions
from torchrelay.plan.selection import Selection
from torchrelay.record import manifest as m
from torchrelay.state import tensors as t
from torchrelay.state.hints import with_hints
from torchrelay.state.matching import Comparison, Matched, ends_of, listed, refuse_differences
from torchrelay.state.objects import InPlaceObject, Objects, OfferedTensor
from torchrelay.state.optimizers import check_kind, parameter_of, parameters_of
from torchrelay.state.paths import Path, key_of, text_of
from torchrelay.state.tree import grafted, show, slots, subtree
from torchrelay.state.wrappers import without_wrappers

Branches = dict[Path, m.Node]  # by object, its offered state
TensorOf = Callable[[int], OfferedTensor | None]  # of an offered leaf


class Pairing:
    """`matched` pairs leaves. `branches` has what is offered for each object that is given its
    state: of these, `given` leaves are made, and `filled` ones written in place, by leaf offered.
    """

    def __init__(
        self,
        tree: m.Node,
        into: PreparedDestination,
        options: LandingOptions,
        tensor_of: TensorOf,
        choice: Selection | None = None,
    ) -> None:
        self.into, strict, choice = into, options.strict, choice or Selection()
        checked = _checked_in_place(tree, into.objects, tensor_of, choice, strict=strict)
        self.branches: Branches = {}
        self.missing: list[str] = []  # paths that one side alone has
        self.extra: list[str] = []
        with with_hints(checked, into.flat.tree):
            roots = [path for path, held in into.objects.items() if not held.in_place]
            if checked is tree and not roots and choice.plain and tree == into.flat.tree:
                self.matched = Matched([], into.flat.tree)
            else:
                modules = [path for path, held in into.objects.items() if held.in_place]
                checked = without_wrappers(checked, into.flat.tree, modules)
                self._match(checked, roots, choice, strict=strict)
        for path, branch in self.branches.items() if strict else ():
            optimizer = into.objects[path].object
            if isinstance(optimizer, torch.optim.Optimizer):
                check_kind(optimizer, branch, path)
        pairs, self.given = self._for_objects(options)
        self.filled = {index: into.flat.leaves[here] for index, _, here in pairs}
        if pairs:
            self.matched = Matched([*self.matched.pairs, *pairs])

    def _match(
        self, offered: m.Node, roots: Sequence[Path], choice: Selection, *, strict: bool
    ) -> None:
        """Find the slots that both trees have and `choice` takes, and the offered state of the
        objects at `roots`, whose slots are not paired. With `strict`, the two differ in nothing
        that is chosen."""
        branches = _branches(offered, roots, choice)
        stubs = {path: -1 - number for number, path in enumerate(roots)}
        found = Comparison(grafted(offered, stubs), grafted(self.into.flat.tree, stubs))
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
        self.matched = Matched(
            [pair for pair in found.pairs if pair[0] >= 0 and choice.takes(pair[1])]
        )
        self.missing = listed(_missing(found, branches, choice))
        self.extra = listed(_extra(found, branches, choice))
        paired = {path for index, path, _ in found.pairs if index < 0}
        self.branches = {path: branches[path] for path in branches if path in paired}

    def _for_objects(self, options: LandingOptions) -> tuple[list[Pair], list[GivenLeaf]]:
        """What objects get: pairs that are filled in where they have them, as a ShardedTensor is
        always and any other unless `atomic`, and what is made for them."""
        into = self.into
        here = dict(slots(into.flat.tree)) if self.branches else {}
        leaves = into.flat.leaves
        pairs: list[Pair] = []
        given: list[GivenLeaf] = []
        for root, branch in self.branches.items():
            held = into.objects[root]
            parameters = parameters_of(held.object)
            for below, index in slots(branch):
                path = (*root, *below)
                mine = leaves[here[path]] if path in here else None
                if isinstance(mine, t.ShardedTensor) or (
                    not options.atomic
                    and not held.in_module
                    and isinstance(mine, (torch.Tensor, np.ndarray))
                ):
                    pairs.append((index, path, here[path]))
                elif isinstance(mine, torch.Tensor):
                    fits = isinstance(held.object, torch.optim.Optimizer)
                    given.append(GivenLeaf(index, path, mine, fits))
                else:
                    parameter = parameter_of(parameters, below)
                    given.append(GivenLeaf(index, path, parameter, fits=False))
        return pairs, given

    @property
    def likes(self) -> dict[int, torch.Tensor | None]:
        """Of each leaf that is made for an object, the tensor that it resembles."""
        return {one.leaf: one.like for one in reversed(self.given)}


def _missing(
    found: Comparison, branches: Mapping[Path, m.Node], choice: Selection
) -> Iterator[Path]:
    for path, node in ends_of(found.missing):
        if path in branches if _is_stub(node) else choice.takes(path):
            yield path


def _extra(found: Comparison, branches: Mapping[Path, m.Node], choice: Selection) -> Iterator[Path]:
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


def _checked_in_place(
    tree: m.Node, objects: Objects, tensor_of: TensorOf, choice: Selection, *, strict: bool
) -> m.Node:
    """The offered tree without the names that objects leave out. `MismatchError` where one refuses
    what is offered for it."""
    for path, held in objects.items():
        if not isinstance(held.object, InPlaceObject):
            continue
        branch = subtree(tree, path)
        if not isinstance(branch, m.DictNode):
            branch = m.DictNode("dict", (), ())
        names = [text_of(key_of(branch, place)) for place in range(len(branch.items))]
        offered = {
            name: tensor_of(item) if isinstance(item, int) else None
            for name, item in zip(names, branch.items, strict=True)
        }

        def wanted(name: str, at: Path = path) -> bool:
            return choice.takes((*at, name))

        # Ranks whose trees differ may each have their own part of the names.
        left_out = set(held.object.check(offered, wanted, strict=strict and choice.exact))
        kept = [place for place, name in enumerate(names) if name not in left_out]
        if len(kept) < len(names):
            keys, items = (tuple(some[n] for n in kept) for some in (branch.keys, branch.items))
            tree = grafted(tree, {path: replace(branch, keys=keys, items=items)})
    return tree
