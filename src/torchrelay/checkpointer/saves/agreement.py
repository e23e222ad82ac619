"""How the ranks of a save agree on its plan: in as many rounds as the planning asks for."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from torchrelay.deadlines import Deadline
from torchrelay.plan.outline import outline
from torchrelay.stores.shares import plan_limits
from torchrelay.stores.shares.planning import Planning
from torchrelay.transports.group.assembly import COORDINATOR, Call


class _Saying(msgspec.Struct, array_like=True):
    """What a rank says of its state, and the seconds that it has left."""

    plan: bytes
    left: float


class Answer(msgspec.Struct, array_like=True):
    """The coordinator's answer to a rank. The final one has a token."""

    plan: bytes
    token: str = ""  # of the draft
    mark: str = ""  # of the draft, by which a rank knows the step that it has become
    left: float = 0.0  # the least of all ranks: who gives up first would not hear how it ended


_word = msgspec.msgpack.Decoder(_Saying)
_answer = msgspec.msgpack.Decoder(Answer)


def agree(
    planning: Planning,
    call: Call,
    deadline: Deadline,
    state: object,
    begin: Callable[[], tuple[str, str]],
) -> Answer:
    """The final answer to what this rank has of a state. On the coordinator `begin` is called once
    there is a plan, and returns token and mark of the draft."""
    heard: Answer | None = None

    def mine() -> bytes:
        if heard is None:
            plan = planning.begin(outline(state))
        else:
            plan = planning.reply(heard.plan)
        return msgspec.msgpack.encode(_Saying(plan, deadline.left()))

    def decide(said: list[bytes]) -> list[bytes]:
        words = [plan_limits.read(_word, data, rank) for rank, data in enumerate(said)]
        deadline.hasten(min(word.left for word in words))
        plans, final = planning.decide([word.plan for word in words])
        token, mark = begin() if final else ("", "")
        left = deadline.left()
        return [msgspec.msgpack.encode(Answer(plan, token, mark, left)) for plan in plans]

    while heard is None or not heard.token:
        data = call.round("plan", mine, decide, deadline)
        heard = plan_limits.read(_answer, data, COORDINATOR)
        deadline.hasten(heard.left)
    return heard
