"""`compare_ranks`: whether ranks still have the same values where they should."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from torchrelay.arguments import items_of
from torchrelay.coordination.call import Call
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.coordination.messages import decoded
from torchrelay.deadlines import Deadline, Timeout
from torchrelay.errors import UsageError
from torchrelay.replicas.common import CommonTensors, ReplicaSelection, common_tensors
from torchrelay.replicas.comparison import Comparison, FirstDifference
from torchrelay.replicas.details import (
    DETAILED,
    TensorBlocks,
    blocks_of,
    bytes_of,
    differing_blocks,
    first_difference,
    sent_blocks,
)
from torchrelay.results import Differing, Report
from torchrelay.shares.replicas import (
    Disagreement,
    Replica,
    Split,
    TeamDigests,
    disagreements,
    listed,
    requested,
    splits,
)

NOTHING = (
    "nothing in this state is known to be the same on several ranks: give the "
    "DistributedDataParallel module itself rather than its state dict, or name what all ranks of "
    'the group have, as in replicated=["model"]'
)

_encode = msgspec.msgpack.Encoder().encode
_digests = msgspec.msgpack.Decoder(TeamDigests)
_teams = msgspec.msgpack.Decoder(tuple[bytes, ...] | None)
_replicas = msgspec.msgpack.Decoder(list[Replica])


class _Found(msgspec.Struct, array_like=True):
    """The coordinator's answer: what differs, and of the first tensors the ranks by value."""

    differ: int = 0
    differing: tuple[Differing, ...] = ()
    groups: list[tuple[str, list[list[int]]]] = []


_found = msgspec.msgpack.Decoder(_Found)
_blocks = msgspec.msgpack.Decoder(dict[int, TensorBlocks])
_wanted = msgspec.msgpack.Decoder(list[tuple[int, list[int]]])
_bytes = msgspec.msgpack.Decoder(dict[int, list[bytes]])
_details = msgspec.msgpack.Decoder(tuple[FirstDifference, ...])


def compare_ranks(
    state: object,
    group: Any = None,
    *,
    replicated: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    detail: bool = False,
    timeout: Timeout = 60.0,
) -> Comparison:
    """All ranks call it together: find replicas that differ, by digests of all their bytes.

    Data-parallel ranks hold the same values. A processor that computes wrong numbers, or a rank
    that missed an update, shows in the bits of one rank long before it shows in the loss. Bytes are
    hashed where they lie, on the GPU or the host; digests travel, and nothing is copied.

    - `group`: the ranks that compare; by default all.
    - `replicated`: patterns of paths of plain tensors that all these ranks have, besides those that
      the state says are replicas.
    - `exclude`: patterns of paths that may differ.
    - `detail`: also say how the first 16 tensors differ: the first element that does, its values,
      and the number of elements.
    - `timeout` bounds the call.

    Replicas are what the state says to be held in common, and nothing else, so that no value that a
    rank has for itself is an alarm:

    - a DTensor along the `Replicate` dimensions of its mesh (HSDP, tensor parallelism);
    - parameters and buffers of a module in `DistributedDataParallel`, in its process group, but
      for `running_mean` and `running_var`, which each rank computes from its own batches;
    - the states that an optimizer in `state` has for these parameters;
    - what `replicated` names. Only tensors of one dtype and shape on all ranks are compared.

    With model = DistributedDataParallel(net) on three ranks, and a bit that flipped on rank 1:

        state = {"model": model, "optimizer": optimizer, "rng": rng, "errors": tensors}
        tr.compare_ranks(state)                             # model.fc.weight differs on rank 1
        tr.compare_ranks({"w": tensor}, replicated="w")     # compares a tensor of a plain dict

    "rng" and "errors" are not compared. The ranks named are the minority; where no value has the
    most ranks, as with two ranks, they are all. Raises `UsageError` if there is nothing to compare.
    """
    patterns = tuple(items_of("replicated", replicated, str, "a pattern"))
    left_out = tuple(items_of("exclude", exclude, str, "a pattern"))
    deadline = Deadline(timeout)
    ranks = Coordinator.of(group, "compare_ranks", "function")
    with ranks.measured("compare_ranks") as measured:
        begun = time.monotonic()
        call = ranks.call("compare_ranks")
        comparing = _Comparing(call, deadline, ranks.rank)
        comparing.begin(state, ReplicaSelection(patterns, left_out, ranks.members), ranks.world)
        found = comparing.find()
        details = comparing.details(found.groups) if detail and found.groups else ()
        common, spent = comparing.common, time.monotonic() - begun
        measured.end(Report(None, common.nbytes, {"compare": spent}, differing=found.differing))
        return Comparison(
            len(common.tensors), common.nbytes, spent, found.differ, found.differing, details
        )


class _Comparing:
    """One call on one rank, in rounds."""

    def __init__(self, call: Call, deadline: Deadline, rank: int) -> None:
        self._call, self._deadline, self._rank = call, deadline, rank
        self._split: dict[bytes, Split] = {}  # the coordinator's
        self._teams: tuple[bytes, ...] | None = None  # None: all replicas are equal
        self.common = CommonTensors.none()

    def begin(self, state: object, selection: ReplicaSelection, world: int) -> None:
        """The first round: which teams of ranks have different digests."""

        def mine() -> bytes:
            self.common = common_tensors(state, selection)
            return _encode(self.common.digests())

        def decide(sent: list[bytes]) -> list[bytes]:
            digests = [decoded(_digests, data, rank) for rank, data in enumerate(sent)]
            if world > 1 and not any(digests):
                raise UsageError(NOTHING)
            self._split = splits(digests)
            if not self._split:
                return [_encode(None)] * len(sent)
            return [_encode(requested(self._split, rank)) for rank in range(len(sent))]

        answer = self._call.round("compare", mine, decide, self._deadline)
        self._teams = decoded(_teams, answer, 0)

    def find(self) -> _Found:
        """The second round, where some do: which tensors differ."""
        if self._teams is None:
            return _Found()
        teams = self._teams

        def decide(sent: list[bytes]) -> list[bytes]:
            replicas = [decoded(_replicas, data, rank) for rank, data in enumerate(sent)]
            found = disagreements(self._split, replicas)
            differing, count = listed(found)
            groups = [(one.path, one.groups) for one in _first(found, differing)]
            return [_encode(_Found(count, differing, groups))] * len(sent)

        answer = self._call.round(
            "compare", lambda: _encode(self.common.replicas(teams)), decide, self._deadline
        )
        return decoded(_found, answer, 0)

    def details(self, groups: Sequence[tuple[str, list[list[int]]]]) -> tuple[FirstDifference, ...]:
        """Two rounds more: digests of blocks, and the bytes of some that differ. Tensors are known
        by their numbers in `groups`, and the lowest rank of each value speaks for the others."""
        speakers = [[ranks[0] for ranks in by_value] for _, by_value in groups]
        mine = {
            number: self.common.find(path)
            for number, (path, _) in enumerate(groups)
            if self._rank in speakers[number]
        }
        blocks: list[dict[int, TensorBlocks]] = []
        differ: list[list[int]] = []

        def look() -> bytes:
            return _encode({number: blocks_of(tensor) for number, tensor in mine.items()})

        def compare(sent: list[bytes]) -> list[bytes]:
            blocks.extend(decoded(_blocks, data, rank) for rank, data in enumerate(sent))
            layouts = [[blocks[rank][n] for rank in those] for n, those in enumerate(speakers)]
            differ.extend(map(differing_blocks, layouts))
            wanted = [
                (one[0].block, sent_blocks(those, one[0].block))
                for one, those in zip(layouts, differ, strict=True)
            ]
            return [_encode(wanted)] * len(sent)

        answer = self._call.round("compare", look, compare, self._deadline)
        wanted = decoded(_wanted, answer, 0)

        def read() -> bytes:
            found = {number: bytes_of(tensor, *wanted[number]) for number, tensor in mine.items()}
            return _encode(found)

        def describe(sent: list[bytes]) -> list[bytes]:
            data = [decoded(_bytes, one, rank) for rank, one in enumerate(sent)]
            found = []
            for number, ((path, _), (first, *others)) in enumerate(
                zip(groups, speakers, strict=True)
            ):
                numbers = wanted[number][1]
                for other in others:
                    pairs = zip(data[first][number], data[other][number], strict=True)
                    one = first_difference(
                        path,
                        (first, other),
                        blocks[other][number],
                        dict(zip(numbers, pairs, strict=True)),
                        counted=len(numbers) == len(differ[number]),
                    )
                    found += [] if one is None else [one]
            return [_encode(found)] * len(sent)

        answer = self._call.round("compare", read, describe, self._deadline)
        return decoded(_details, answer, 0)


def _first(found: Sequence[Disagreement], listed: Sequence[Differing]) -> list[Disagreement]:
    """The tensors that details are found for: the first of those listed."""
    by_value = {one.differing(): one for one in found}
    return [by_value[one] for one in listed[:DETAILED]]
