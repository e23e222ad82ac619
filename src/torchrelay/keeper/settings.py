"""How a keeper is set up by the first who joins it. No torch."""

from __future__ import annotations

from torchrelay.endpoint.address import Address
from torchrelay.endpoint.server.messages import Listen
from torchrelay.errors import UsageError
from torchrelay.keeper.server.messages import JoinKeeper
from torchrelay.sources.access import Access

LEASE_SECONDS = 60.0
RATE = 200e6  # bytes a second at which copies are fetched
STEPS = 2  # the newest one, and the one that is being staged
MIN_MEMORY = 1 << 20


def join_request(
    address: Address,
    access: Access,
    memory: int | None = None,
    steps: int = STEPS,
    copies: int = 1,
    rate: float = RATE,
    lease: float = LEASE_SECONDS,
    *,
    begins: bool = False,
) -> JoinKeeper:
    """The first request to a keeper; `UsageError` where it makes no sense."""
    token = access.secret()
    if address.port:
        raise UsageError(f"a keeper listens at a free port: give {address.host}:0")
    if token is not None:
        address.check(token)
    if memory is not None and memory < MIN_MEMORY:
        raise UsageError(f"memory must be at least {MIN_MEMORY} bytes or None, not {memory!r}")
    if type(steps) is not int or steps < STEPS:
        raise UsageError(f"steps must be a number from {STEPS}, not {steps!r}")
    if type(copies) is not int or copies < 0:
        raise UsageError(f"copies must be a number from 0, not {copies!r}")
    if not rate > 0:
        raise UsageError(f"rate must be a number of bytes a second, not {rate!r}")
    if not 0 < lease < 1e8:
        raise UsageError(f"lease must be a number of seconds, not {lease!r}")
    bounds = (memory or 0, steps, rate, copies, lease)
    return JoinKeeper(Listen.at(address.host, 0, access), *bounds, begins)
