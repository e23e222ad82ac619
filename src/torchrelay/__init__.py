"""torchrelay moves the whole live state of a PyTorch job to the processes that need it, and keeps
durable copies.

A name is imported when it is first used, so that programs which need little of this start fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from torchrelay.record.pause import gc_paused
from torchrelay.version import __version__ as __version__

if TYPE_CHECKING:
    from torchrelay.checkpointer import (
        Checkpointer,
        KeepAll,
        KeepEvery,
        KeepLast,
        Loaded,
        LoadReport,
        Pending,
        Saved,
    )
    from torchrelay.coordination.groups import init_process_group
    from torchrelay.endpoint.front import Endpoint, serve
    from torchrelay.endpoint.publishing import Published
    from torchrelay.endpoint.pull import PullReport, PullResult, pull
    from torchrelay.errors import (
        CheckpointError,
        CommitUnknownError,
        DamagedError,
        DigestError,
        EndpointError,
        FormatError,
        ManifestError,
        MismatchError,
        NothingToRecoverError,
        PeerAbortedError,
        PeerError,
        PeerLostError,
        PeerRefusedError,
        RecoveryError,
        RelayError,
        RemoteProtocolError,
        RouteError,
        StateError,
        StepExistsError,
        StepMismatchError,
        StepNotFoundError,
        StepOrderError,
        StorageTimeoutError,
        TornStateError,
        TransferTimeoutError,
        UnsupportedLeafError,
        UsageError,
    )
    from torchrelay.keeper.front import Keeper
    from torchrelay.recovery.front import recover
    from torchrelay.recovery.report import Recovered, RecoveryReport
    from torchrelay.relay import Progress, Received, Relay, Report
    from torchrelay.sources.access import Access
    from torchrelay.state.registry import register


__all__ = [
    "Access",
    "CheckpointError",
    "Checkpointer",
    "CommitUnknownError",
    "DamagedError",
    "DigestError",
    "Endpoint",
    "EndpointError",
    "FormatError",
    "KeepAll",
    "KeepEvery",
    "KeepLast",
    "Keeper",
    "LoadReport",
    "Loaded",
    "ManifestError",
    "MismatchError",
    "NothingToRecoverError",
    "PeerAbortedError",
    "PeerError",
    "PeerLostError",
    "PeerRefusedError",
    "Pending",
    "Progress",
    "PullReport",
    "Published",
    "PullResult",
    "Received",
    "Recovered",
    "RecoveryError",
    "RecoveryReport",
    "Relay",
    "RelayError",
    "RemoteProtocolError",
    "Report",
    "Saved",
    "RouteError",
    "StateError",
    "StepExistsError",
    "StepMismatchError",
    "StepNotFoundError",
    "StepOrderError",
    "StorageTimeoutError",
    "TornStateError",
    "TransferTimeoutError",
    "UnsupportedLeafError",
    "UsageError",
    "init_process_group",
    "pull",
    "recover",
    "register",
    "serve",
]

_HOMES = {
    "torchrelay.checkpointer": (
        *(
            "Checkpointer",
            "KeepAll",
            "KeepEvery",
            "KeepLast",
            "Loaded",
            "LoadReport",
            "Pending",
            "Saved",
        ),
    ),
    "torchrelay.coordination.groups": ("init_process_group",),
    "torchrelay.endpoint.front": ("Endpoint", "serve"),
    "torchrelay.endpoint.publishing": ("Published",),
    "torchrelay.endpoint.pull": ("PullReport", "PullResult", "pull"),
    "torchrelay.keeper.front": ("Keeper",),
    "torchrelay.recovery.front": ("recover",),
    "torchrelay.recovery.report": ("Recovered", "RecoveryReport"),
    "torchrelay.relay": ("Progress", "Received", "Relay", "Report"),
    "torchrelay.sources.access": ("Access",),
    "torchrelay.state.registry": ("register",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'torchrelay' has no attribute {name!r}")
    # Collections while modules are made would walk all of torch's objects, for half of the time.
    with gc_paused():
        value: object = getattr(import_module(_HOME.get(name, "torchrelay.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
