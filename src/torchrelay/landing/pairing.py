"""An offered tree next to a destination: which of its leaves go to which, and what objects get."""

from __future__ import annotations

import numpy as np
import torch

from torchrelay.landing.checks.matching import Branches, TensorOf, checked_in_place, match
from torchrelay.landing.destination import Pair, PreparedDestination
from torchrelay.landing.missing import GivenLeaf
from torchrelay.landing.options import LandingOptions
from torchrelay.plan.selection import Selection
from torchrelay.record import manifest as m
from torchrelay.state import tensors as t
from torchrelay.state.hints import with_hints
from torchrelay.state.matching import Matched
from torchrelay.state.optimizers import check_kind, parameter_of, parameters_of
from torchrelay.state.tree import slots
from torchrelay.state.wrappers import without_wrappers


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
        checked = checked_in_place(tree, into.objects, tensor_of, choice, strict=strict)
        with with_hints(checked, into.flat.tree):
            roots = [path for path, held in into.objects.items() if not held.in_place]
            if checked is tree and not roots and choice.plain and tree == into.flat.tree:
                self.matched = Matched([], [], [], into.flat.tree)
                self.branches: Branches = {}
            else:
                modules = [path for path, held in into.objects.items() if held.in_place]
                checked = without_wrappers(checked, into.flat.tree, modules)
                found = match(checked, into.flat.tree, roots, choice, strict=strict)
                self.matched, self.branches = found
        for path, branch in self.branches.items() if strict else ():
            optimizer = into.objects[path].object
            if isinstance(optimizer, torch.optim.Optimizer):
                check_kind(optimizer, branch, path)
        self.missing, self.extra = self.matched.missing, self.matched.extra
        pairs, self.given = self._for_objects(options)
        self.filled = {index: into.flat.leaves[here] for index, _, here in pairs}
        if pairs:
            self.matched = Matched([*self.matched.pairs, *pairs], self.missing, self.extra)

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
