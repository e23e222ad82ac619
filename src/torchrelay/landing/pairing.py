"""An offered tree next to a destination: which of its leaves go to which, and what objects get."""

from __future__ import annotations

import numpy as np
import torch

from torchrelay.landing.checks.in_place import TensorOf, checked_in_place
from torchrelay.landing.destination import Pair, PreparedDestination
from torchrelay.landing.missing import GivenLeaf
from torchrelay.landing.options import LandingOptions
from torchrelay.plan.selection import Selection
from torchrelay.record import manifest as m
from torchrelay.state import tensors as t
from torchrelay.state.hints import with_hints
from torchrelay.state.matching import Matched
from torchrelay.state.optimizers import parameter_of, parameters_of
from torchrelay.state.tree import slots


class Pairing:
    """`matched` pairs leaves. `branches` has what is offered for each object that is given its
    state: of these, `given` leaves are made, and `filled` ones written in place, by leaf offered.
    """

    def __init__(
        self,
        tree: m.Node,
        into: PreparedDestination,
        options: LandingOptions,
        choice: Selection | None = None,
        tensor_of: TensorOf | None = None,
    ) -> None:
        self.into = into
        all_of_it = tree
        if tensor_of is not None:
            tree = checked_in_place(tree, into.objects, tensor_of, choice, strict=options.strict)
        with with_hints(tree, into.flat.tree):
            self.matched, self.branches = into.match(
                tree, choice or Selection(), strict=options.strict, whole=tree is all_of_it
            )
        if options.strict:
            into.check_optimizers(self.branches)
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
