"""torchrelay moves the whole live state of a PyTorch job to the processes that need it, and keeps
durable copies.

A name is imported when it is first used, so that programs which need little of this start fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from torchrelay import errors as errors
from torchrelay import options as options
from torchrelay.pause import gc_paused
from torchrelay.version import __version__ as __version__

if TYPE_CHECKING:
    from torchrelay.checkpointer.front import Checkpointer
    from torchrelay.checkpointer.keep import KeepBest, KeepEvery, KeepLast
    from torchrelay.checkpointer.mirror import Mirror
    from torchrelay.coordination.groups import init_process_group
    from torchrelay.endpoint.front import serve
    from torchrelay.endpoint.pull import pull
    from torchrelay.keeper.front import Keeper
    from torchrelay.pending import Pending
    from torchrelay.recovery.front import recover
    from torchrelay.relay import Relay
    from torchrelay.replicas.front import compare_ranks
    from torchrelay.results import Loaded, Report
    from torchrelay.sources.access import Access
    from torchrelay.state.registry import register
    from torchrelay.weights.subscription import subscribe

__all__ = [
    "Access",
    "Checkpointer",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "Keeper",
    "Loaded",
    "Mirror",
    "Pending",
    "Relay",
    "Report",
    "compare_ranks",
    "errors",
    "init_process_group",
    "options",
    "pull",
    "recover",
    "register",
    "serve",
    "subscribe",
]

_MODULES = {
    "torchrelay.checkpointer.front": ("Checkpointer",),
    "torchrelay.checkpointer.keep": ("KeepBest", "KeepEvery", "KeepLast"),
    "torchrelay.checkpointer.mirror": ("Mirror",),
    "torchrelay.coordination.groups": ("init_process_group",),
    "torchrelay.endpoint.front": ("serve",),
    "torchrelay.endpoint.pull": ("pull",),
    "torchrelay.keeper.front": ("Keeper",),
    "torchrelay.pending": ("Pending",),
    "torchrelay.recovery.front": ("recover",),
    "torchrelay.relay": ("Relay",),
    "torchrelay.replicas.front": ("compare_ranks",),
    "torchrelay.results": ("Loaded", "Report"),
    "torchrelay.sources.access": ("Access",),
    "torchrelay.state.registry": ("register",),
    "torchrelay.weights.subscription": ("subscribe",),
}
_MODULE = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE:
        raise AttributeError(f"module 'torchrelay' has no attribute {name!r}")
    # Collections while modules are made would walk all of torch's objects, for half of the time.
    with gc_paused():
        value: object = getattr(import_module(_MODULE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
