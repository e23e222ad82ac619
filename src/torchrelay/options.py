"""The rare options of a call, as records: `tr.options`. Each call takes its own by `options=`.

`verify` means the same in every call that has it. True, the default, compares the digests of all
bytes that cross a wire or rest on a medium. "all" also compares those of memory that the kernel
copies or maps on one host. False compares none.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torchrelay.arguments import items_of
from torchrelay.errors import UsageError
from torchrelay.progress import ProgressCallback

if TYPE_CHECKING:
    import torch

FILE_BYTES = 1 << 30
Verify: TypeAlias = bool | Literal["all"]


@dataclass(frozen=True, kw_only=True)
class CheckpointerOptions:
    """Options of `Checkpointer`.

    - `file_bytes`: the size at which tensors go to another data file; None: any size.
    - `stage_on`: where `save_async` copies a state to while the caller waits. "device": GPU tensors
      to a copy in GPU memory, which stays there for the next save; "host": to host memory; "auto":
      to the device if the copy fits next to what training has used at its peak.
    - `memory_budget`: most bytes of the staged copy of `save_async`; None: one copy of the state.
    - `signals`: the signals that `reached_preemption` reacts to.
    - `read_only`: clean nothing up at the start, and refuse to save or delete.
    - `reuse`: take data files that did not change from the step before, in place of writing them
      again: as hard links, or as copies that a bucket's service makes. A damaged one is damaged in
      every step that has it.
    - `full_every`: write everything in every so many saves.
    - `replicated`: patterns of paths of plain tensors that all ranks should have the same values
      of, besides those that the state says are replicas: see `compare_ranks`.
    """

    file_bytes: int | None = FILE_BYTES
    stage_on: Literal["auto", "host", "device"] = "auto"
    memory_budget: int | None = None
    signals: Sequence[signal.Signals] = (signal.SIGTERM,)
    read_only: bool = False
    reuse: bool = True
    full_every: int | None = None
    replicated: str | Iterable[str] = ()

    def __post_init__(self) -> None:
        patterns = items_of("replicated", self.replicated, str, "a pattern")
        object.__setattr__(self, "replicated", tuple(patterns))
        _check_numbers(self, int, "file_bytes", "memory_budget", "full_every", optional=True)
        if not isinstance(self.signals, Iterable):
            raise UsageError(f"signals is a list of signals, not {self.signals!r}")


@dataclass(frozen=True, kw_only=True)
class PullOptions:
    """Options of `pull`. The options that `load` has, too, mean the same there.

    - `strict`: refuse a state that has missing or unexpected paths.
    - `verify`: see `torchrelay.options`.
    - `atomic`: nothing of `into` is written before every digest was compared. False writes as bytes
      arrive, and raises `TornStateError` if it cannot finish.
    - `device`: where new tensors are made, without `into`.
    - `progress`: a function that receives a `Progress`.
    - `same_host`: whether memory of an endpoint of this host and this user is mapped in place of
      reading it over TCP.
    - `reshare`: serve what has arrived while the rest does, and take from others who do so too. The
      whole step is read, into memory of its own, which new tensors keep; `seed` of the result
      serves it afterwards. From https it needs `Access(certfile=, keyfile=)`: a certificate that
      names the address of this host, and that others trust.
    - `newer_than`: wait for a step above this one.
    """

    strict: bool = True
    verify: Verify = True
    atomic: bool = True
    device: torch.device | str | None = None
    progress: ProgressCallback | None = None
    same_host: bool = True
    reshare: bool = False
    newer_than: int | None = None


@dataclass(frozen=True, kw_only=True)
class RecoverOptions:
    """Options of `recover`. `strict`, `verify`, `atomic`, `device`, `progress` and `same_host` are
    as for `PullOptions`.

    - `reshare`: ranks that take a step from an endpoint or a peer at the same time also feed each
      other, so that the source sends about one copy. Each rank reads the whole step into additional
      memory, and serves the others until all have it.
    - `max_age_seconds`: refuse steps that are older.
    """

    strict: bool = True
    verify: Verify = True
    atomic: bool = True
    device: torch.device | str | None = None
    progress: ProgressCallback | None = None
    same_host: bool = True
    reshare: bool = False
    max_age_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of `serve`.

    - `hold_seconds`: how long a step that is no longer the newest is kept for its readers.
    - `stall_seconds`: a reader that takes no bytes, or sends no request, for so long is dropped.
    - `connections`: how many may be open at once.
    """

    hold_seconds: float = 60.0
    stall_seconds: float = 10.0
    connections: int = 256

    def __post_init__(self) -> None:
        _check_numbers(self, (int, float), "hold_seconds", "stall_seconds")
        _check_numbers(self, int, "connections")


@dataclass(frozen=True, kw_only=True)
class KeeperOptions:
    """Options of `Keeper`.

    - `memory_budget`: most bytes that a keeper may use; None: unlimited. `stage` raises
      `UsageError` unless two steps and, with copies, two copies fit.
    - `steps`: most steps of its workers that a keeper holds. With 2, a step that is staged while
      its predecessor is copied is skipped, and `Pending.skipped` has the reason; with 4, none is.
    - `copies`: number of other hosts that hold a copy of each host's part of a step.
    - `copy_bytes_per_second`: the most at which a keeper fetches copies.
    - `lease_seconds`: how long a keeper stays alive without a worker.
    """

    memory_budget: int | None = None
    steps: int = 2
    copies: int = 1
    copy_bytes_per_second: float = 200e6
    lease_seconds: float = 60.0

    def __post_init__(self) -> None:
        _check_numbers(self, int, "memory_budget", optional=True)
        _check_numbers(self, int, "steps", "copies")
        _check_numbers(self, (int, float), "copy_bytes_per_second", "lease_seconds")


def _check_numbers(
    record: object, kind: type | tuple[type, ...], *names: str, optional: bool = False
) -> None:
    """`UsageError` for a field that is not a number. Its range is checked by the call."""
    for name in names:
        value = getattr(record, name)
        if optional and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kind):
            word = "a whole number" if kind is int else "a number"
            raise UsageError(f"{name} is {word}{' or None' * optional}, not {value!r}")


def checked_verify(verify: object) -> Verify:
    """`UsageError` for another value than True, False and "all"."""
    if verify is True or verify is False or verify == "all":
        return verify
    raise UsageError(f'verify is True, False or "all", not {verify!r}')


def checked_options(options: object, kind: type[Any]) -> Any:
    """The options of a call, or its defaults; `UsageError` for those of another call."""
    if options is None:
        return kind()
    if not isinstance(options, kind):
        raise UsageError(f"options is a tr.options.{kind.__name__}, not {options!r}")
    return options
