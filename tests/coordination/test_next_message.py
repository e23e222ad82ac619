"""A rank that gives up at the worst moment: the coordinator has read its message, and its next one
is under the same key before the coordinator decides."""

from __future__ import annotations

from typing import Any

import msgspec
import torch.distributed as dist

from torchrelay.coordination.coordinator import Coordinator
from torchrelay.coordination.group_store import GroupStore
from torchrelay.coordination.messages import CallName, RankMessage, RoundAnswer, RoundMessage
from torchrelay.deadlines import Deadline


def message(step: int) -> bytes:
    """What rank 1 leaves in the first round of a save."""
    name, answer = CallName("save", step), f"answer {step}"
    return msgspec.msgpack.encode(RoundMessage(name, 1, answer, 30.0, RankMessage(b"%d" % step)))


class Overtaking:
    """A store in which rank 1 leaves its next message as soon as the first one was read."""

    def __init__(self) -> None:
        self.store: Any = dist.HashStore()  # type: ignore[attr-defined, unused-ignore]
        self.values = GroupStore(self.store, "torchrelay/test/")
        self.reads = 0

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found: bytes = self.store.compare_set(key, expected, desired)
        if key.endswith("/first/1") and b"answer 1" in bytes(found):
            self.reads += 1
            if self.reads == 1:
                self.values.drop(key.removeprefix("torchrelay/test/"))
                self.values.put(key.removeprefix("torchrelay/test/"), message(2))
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


class Rank0:
    def __init__(self, store: Overtaking) -> None:
        self._store = store

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def get_group_store(self) -> Any:
        return self._store


def test_the_next_message_of_a_rank_is_not_lost_with_the_one_before() -> None:
    store = Overtaking()
    ranks = Coordinator(Rank0(store), "test")
    assert ranks.channel is not None
    store.values.put(f"{ranks.channel.key}/first/1", message(1))
    for step in (1, 2):
        call = ranks.call("save", step)
        answer = call.round("begin", lambda: b"0", lambda got: [b"+".join(got)] * 2, Deadline(20))
        assert answer == b"0+%d" % step
        data = store.values.read(f"answer {step}")
        assert data is not None
        theirs = msgspec.msgpack.decode(data, type=RoundAnswer)
        assert theirs.message.value() == answer
    assert store.reads == 1
