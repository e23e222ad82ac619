"""Holding a transfer at a phase of its life, and telling old weights from new ones."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import torchrelay as tr
from tests.support.ranks import reached
from torchrelay.transports.meeting.conversation import Conversation
from torchrelay.transports.protocol import sender as sender_module
from torchrelay.transports.protocol.receiver import Receiving
from torchrelay.transports.protocol.serving import Serving
from torchrelay.transports.routes.host.ring import RingFiller
from torchrelay.transports.routes.memory import MemoryFetch
from torchrelay.transports.routes.route import RouteFetch
from torchrelay.transports.routes.tcp import TcpFetch
from torchrelay.transports.streams.chunk_receiver import ChunkReceiver
from torchrelay.transports.streams.chunk_sender import ChunkSender
from torchrelay.transports.wire.messages import Accept, Done

CHUNK = 64 << 10
"""Bytes of a chunk, so that `weights` come in about twenty."""
GRACE = 1.0
"""Seconds past its deadline that a call may last."""


def weights(seed: int) -> dict[str, Any]:
    """A state of 1.2 MB whose every byte depends on the seed."""
    make = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(512, 512, generator=make),
        "h": torch.randn(333, 333, generator=make).to(torch.bfloat16),
        "small": [torch.randint(0, 99, (5,), generator=make) for _ in range(3)],
        "seed": seed,
    }


def same(one: Any, other: Any) -> bool:
    tensors = [(one["w"], other["w"]), (one["h"], other["h"])]
    tensors += zip(one["small"], other["small"], strict=True)
    return one["seed"] == other["seed"] and all(torch.equal(a, b) for a, b in tensors)


def verdict(live: Any, *seeds: int) -> int | str:
    """Which of the seeds the weights are those of, or "torn"."""
    return next((seed for seed in seeds if same(live, weights(seed))), "torn")


class Outcome(NamedTuple):
    """How a call ended, as the rank that made it tells it."""

    error: str | None
    text: str
    seconds: float
    weights: int | str | None = None
    failed: tuple[int, ...] = ()
    receivers: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()


def attempt(call: Callable[[], Any]) -> Outcome:
    """Call, time it, and keep a typed error as a result. Anything else is a bug."""
    begun = time.monotonic()
    try:
        result = call()
    except tr.errors.RelayError as fault:
        cause = f" <- {fault.__cause__}" if fault.__cause__ else ""
        return Outcome(type(fault).__name__, f"{fault}{cause}", time.monotonic() - begun)
    seconds = time.monotonic() - begun
    report = result if isinstance(result, tr.Report) else result.report
    unknown = tuple(report.unknown)
    return Outcome(None, "", seconds, None, tuple(report.failed), report.receivers, unknown)


def sent(relay: tr.Relay, seed: int, to: Any, timeout: float) -> Outcome:
    return attempt(lambda: relay.send(weights(seed), to, step=seed, timeout=timeout))


def received(
    relay: tr.Relay, source: int, live: Any, old: int, new: int, timeout: float, **options: Any
) -> Outcome:
    """Receive into live weights, which are `old` before and `old` or `new` after."""
    out = attempt(lambda: relay.recv(source, into=live, step=new, timeout=timeout, **options))
    return out._replace(weights=verdict(live, old, new))


class _Spot(NamedTuple):
    owner: Any
    name: str
    after: bool = False
    when: Callable[..., bool] = lambda *args: True
    nth: int = 1


def _says(kind: type) -> Callable[..., bool]:
    return lambda talk, message: isinstance(message, kind)


_SENDER = {
    "capture": _Spot(sender_module, "capture"),
    "joined": _Spot(Serving, "offer"),
    "go": _Spot(Serving, "go"),
    "confirm": _Spot(Serving, "confirm"),
    "confirmed": _Spot(Serving, "confirm", after=True),
    "end": _Spot(Serving, "close"),
}
SENDER = {
    "tcp": {**_SENDER, "data": _Spot(ChunkSender, "_send", nth=5)},
    "memory": {**_SENDER, "data": _Spot(Serving, "go", after=True)},
    "ring": {**_SENDER, "data": _Spot(RingFiller, "fill", nth=5)},
}
"""Where a sender can be held, by way and phase. Where it is read from, it has no part in `data`."""

_RECEIVER = {
    "call": _Spot(Conversation, "__init__"),
    "joined": _Spot(Receiving, "_fit"),
    "accepted": _Spot(Conversation, "send", after=True, when=_says(Accept)),
    "commit": _Spot(Receiving, "_commit"),
    "done": _Spot(Conversation, "send", when=_says(Done)),
}
_READER = {**_RECEIVER, "pass on": _Spot(RouteFetch, "finish")}
RECEIVER = {
    "tcp": {
        **_RECEIVER,
        "data": _Spot(ChunkReceiver, "_landed", after=True, nth=5),
        "pass on": _Spot(TcpFetch, "finish"),
    },
    "memory": {**_READER, "data": _Spot(MemoryFetch, "_read_batch", nth=5)},
    "ring": {**_READER, "data": _Spot(MemoryFetch, "_take_slot", nth=5)},
}
"""Where a receiver can be held. In `data` one of its threads is, and others continue."""


@contextlib.contextmanager
def held_at(spot: _Spot, phase: str) -> Iterator[None]:
    """Within: the first time this process comes to the spot, it reports `phase` and waits there."""
    original = getattr(spot.owner, spot.name)
    left, lock = spot.nth, threading.Lock()

    def hold() -> None:
        nonlocal left
        with lock:
            left -= 1
            mine = left == 0
        if mine:
            reached(phase, hold=True)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not spot.after and spot.when(*args[:2]):
            hold()
        result = original(*args, **kwargs)
        if spot.after and spot.when(*args[:2]):
            hold()
        return result

    setattr(spot.owner, spot.name, wrapper)
    try:
        yield
    finally:
        setattr(spot.owner, spot.name, original)
