"""What a transfer tells its caller when it is over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Report:
    """How a transfer went, as this rank saw it."""

    step: int | None
    bytes: int  # of the state itself
    wire_bytes: int  # that this rank sent (sender) or received (receiver) as data
    messages: int  # that carried data; on one machine, copies by the kernel
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    route: str = "group"  # "cuda_ipc", "host" or "group"; "mixed" where receivers differ
    routes: dict[int, str] = field(default_factory=dict)  # of each receiver that has the state
    instead: dict[str, str] = field(default_factory=dict)  # faster ways: why each was not taken
    verified: bool = True  # whether digests were compared
    receivers: tuple[int, ...] = ()  # that have the state
    failed: dict[int, str] = field(default_factory=dict)  # rank: why it has not
    unknown: dict[int, str] = field(default_factory=dict)  # rank: why it may have it or not
    settled: dict[int, bool] = field(default_factory=dict)  # unknown before: whether it had it
    rerouted: tuple[int, ...] = ()  # served directly after their upstream was lost
    missing: tuple[str, ...] = ()  # offered, not in the destination (strict=False)
    extra: tuple[str, ...] = ()  # in the destination, not offered (strict=False)
    handed_bytes: int = 0  # of `wire_bytes`, read from the receiver before this one in the chain
    connections: int = 0  # beside those of the group, that carried the data
    sources: dict[int, int] = field(default_factory=dict)  # bytes that each of several sent

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    def explain(self) -> str:
        """Bytes, seconds of each phase, the route, and why no faster one was taken.

        "call" is the time until the sender came.
        """
        rate = f", {self.bytes / self.total_seconds / 1e9:.2f} GB/s" if self.total_seconds else ""
        lines = [f"{self.bytes} bytes by route {self.route}{rate}"]
        if self.connections:
            lines.append(f"  over {self.connections} connections beside the group's")
        if self.handed_bytes:
            lines.append(f"  {self.handed_bytes} of them read from the receiver before this one")
        lines += [f"  not by {name}: {why}" for name, why in self.instead.items()]
        lines += [f"  {phase:10s} {spent:10.4f} seconds" for phase, spent in self.seconds.items()]
        lines.append(f"  {'total':10s} {self.total_seconds:10.4f} seconds")
        return "\n".join(lines)


class Received(NamedTuple):
    """What `recv` returns: the state, its step, and the report."""

    state: Any
    step: int | None
    report: Report
