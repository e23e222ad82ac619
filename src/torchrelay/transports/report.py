"""What a transfer tells its caller when it is over."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    instead: dict[str, str] = field(default_factory=dict)  # faster routes: why each was not taken
    verified: bool = True  # whether digests were compared
    receivers: tuple[int, ...] = ()  # that have the state
    failed: dict[int, str] = field(default_factory=dict)  # rank: why it has not
    rerouted: tuple[int, ...] = ()  # served directly after their upstream was lost
    missing: tuple[str, ...] = ()  # offered, not in the destination (strict=False)
    extra: tuple[str, ...] = ()  # in the destination, not offered (strict=False)

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())
