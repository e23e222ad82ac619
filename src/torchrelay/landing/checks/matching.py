"""An offered tree next to that of a destination with objects in it: which slots go together, and
what objects that are filled in place leave out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from torchrelay.errors import MismatchError
from torchrelay.plan.selection import Selection
from torchrelay.record import manifest as m
from torchrelay.state.matching import Comparison, Matched, ends_of, listed, refuse_differences
from torchrelay.state.objects import InPlaceObject, Objects, OfferedTensor
from torchrelay.state.paths import Path, key_of, text_of
from torchrelay.state.tree import grafted, show, slots, subtree

Branches = dict[Path, m.Node]  # by object, its offered state
TensorOf = Callable[[int], OfferedTensor | None]  # of an offered leaf


def match(
    offered: m.Node, here: m.Node, roots: Sequence[Path], choice: Selection, *, strict: bool
) -> tuple[Matched, Branches]:
    """The slots that both trees have and `choice` takes, and the offered state of the objects at
    `roots`, whose slots are not paired. With `strict`, the two differ in nothing that is chosen."""
    branches = _branches(offered, roots, choice)
    stubs = {path: -1 - number for number, path in enumerate(roots)}
    found = Comparison(grafted(offered, stubs), grafted(here, stubs))
    if strict:
        kinds = found.kinds
        if choice.guessed:  # planners take tuples of tensors for lists
            kinds = [kind for kind in kinds if (kind.offered, kind.here) != ("a list", "a tuple")]
        refuse_differences(
            _missing(found, branches, choice) if choice.exact else (),
            _extra(found, branches, choice),
            () if choice.patterns else kinds,
        )
    pairs = [pair for pair in found.pairs if pair[0] >= 0]
    if choice.patterns:
        pairs = [pair for pair in pairs if choice.takes(pair[1])]
    missing, extra = (
        listed(_missing(found, branches, choice)),
        listed(_extra(found, branches, choice)),
    )
    paired = {path for index, path, _ in found.pairs if index < 0}
    return Matched(pairs, missing, extra), {p: branches[p] for p in branches if p in paired}


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


def checked_in_place(
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
