"""Every error that torchrelay raises on purpose, in one tree.

    RelayError
    ├── StateError                 ours: what the caller handed in
    │   ├── UnsupportedLeafError       a leaf that cannot travel exactly
    │   └── MismatchError              `into=` does not fit what is offered
    ├── UsageError                 ours: invalid arguments, or a closed object
    ├── ResourceError              this machine lacks descriptors, threads or memory (an OSError)
    ├── UnsupportedSystemError     this call needs Linux
    ├── UnsupportedTorchError      this torch has moved a name that the call needs (an ImportError)
    ├── ReplicaError               ranks that hold the same tensors have other values
    ├── RouteError                 the route that was asked for cannot be taken
    ├── StepMismatchError          the offered step is not the one asked for
    ├── ManifestError              bytes that are not a valid manifest
    ├── DigestError                received bytes differ from the sent ones
    ├── RemoteProtocolError        the peer broke the protocol, or speaks another one
    ├── PeerError                  the peer's: it reported a failure, or it is gone
    │   ├── PeerRefusedError           a receiver turned the state down
    │   ├── PeerAbortedError           a sender gave up and sent its reason
    │   └── PeerLostError              the connection to a rank broke
    ├── EndpointError              an endpoint cannot be opened, or does not answer as one
    ├── CheckpointError            a step could not be written or read; `file` says where
    │   ├── StepExistsError            the step is committed already, and is never overwritten
    │   ├── StepOrderError             the step is below the newest one: roll back first
    │   ├── StepNotFoundError          no such step, or none that verifies
    │   ├── RecoveryError              steps exist, and none can be used
    │   ├── DamagedError               stored bytes differ from the written ones
    │   ├── FormatError                a step of a format that is newer than this version
    │   ├── StorageTimeoutError        the storage did not answer in time (also a TimeoutError)
    │   └── CommitUnknownError         the step may have been committed: look again
    ├── TransferTimeoutError       a deadline passed (also a TimeoutError)
    └── TornStateError             part old, part new: `atomic=False` stopped midway; receive again

Each carries what is known of `rank`, `step`, `phase` and `path`, and shows it in its message.
"""

from __future__ import annotations

from typing import Any


class RelayError(Exception):
    """Base of all torchrelay errors. Unknown context is `None`. If a `send` ended with the error,
    `report` has the outcome of each receiver."""

    report: Any = None

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        step: int | None = None,
        phase: str | None = None,
        path: str | None = None,
    ) -> None:
        super().__init__(message)  # first: an `ImportError` clears its own `path`
        self.message = message
        self.rank = rank
        self.step = step
        self.phase = phase
        self.path = path

    def __str__(self) -> str:
        known = (("rank", self.rank), ("step", self.step), ("phase", self.phase))
        facts = [f"{name} {value}" for name, value in known if value is not None]
        if self.path is not None:
            facts.append(f"at {self.path}")
        return f"{self.message} ({', '.join(facts)})" if facts else self.message


class StateError(RelayError):
    """The state or the destination handed in by the caller is at fault."""


class UnsupportedLeafError(StateError):
    """A leaf or container that cannot travel exactly; `path` says which. Nothing was sent."""


class MismatchError(StateError):
    """The destination does not fit the offered state. Nothing was written."""


class UsageError(RelayError, ValueError):
    """Invalid arguments, or a closed object: a rank outside of the group, a closed relay."""


class ResourceError(RelayError, OSError):
    """This process or machine has no file descriptor, thread or memory left for the call, and no
    peer, no endpoint and no store is at fault. The message says which limit it was."""


class UnsupportedSystemError(RelayError, NotImplementedError):
    """The call needs Linux: macOS and Windows read steps. Nothing was done."""


class UnsupportedTorchError(RelayError, ImportError):
    """The call needs a private name of torch that this release of it does not have. The message
    says which. Nothing was done."""


class ReplicaError(RelayError):
    """Replicas that should be equal differ: a processor computed wrong numbers, or a rank drifted.
    `differing` has paths and ranks. A step that was being saved is not committed."""

    def __init__(self, message: str, *, differing: tuple[Any, ...] = (), **context: Any) -> None:
        super().__init__(message, **context)
        self.differing = differing


class RouteError(RelayError):
    """The route that `route=` names, here or at the peer, cannot be taken. Nothing was written."""


class StepMismatchError(RelayError):
    """The step offered and the step asked for differ. Nothing was written."""


class ManifestError(RelayError):
    """The bytes are not a valid manifest. Nothing was allocated for it."""


class DigestError(RelayError):
    """Received bytes differ from the sent ones, also after asking for them again."""


class RemoteProtocolError(RelayError):
    """The peer sent something the protocol does not allow, or another version of it."""


class PeerError(RelayError):
    """The fault is on the other side; `rank` names it."""


class PeerRefusedError(PeerError):
    """A receiver turned the state down."""


class PeerAbortedError(PeerError):
    """The sender gave up; the message has its reason."""


class PeerLostError(PeerError):
    """The connection to the peer broke: it died, or its process group was closed."""


class EndpointError(RelayError):
    """An endpoint cannot be opened, or a URL does not answer as one: a wrong token, an invalid
    certificate, another program. The message names the URL."""


class CheckpointError(RelayError):
    """A step could not be written or read; `file`, where known, is the file or object. Earlier
    steps are as they were."""

    def __init__(self, message: str, *, file: str | None = None, **context: Any) -> None:
        super().__init__(message, **context)
        self.file = file

    def __str__(self) -> str:
        return super().__str__() + (f" [{self.file}]" if self.file else "")


class StepExistsError(CheckpointError, FileExistsError):
    """The step is committed already. Save under another step, or pass `overwrite=True`."""


class StepOrderError(CheckpointError):
    """The step is below the newest one, which a restart would load. Call `rollback` first."""


class StepNotFoundError(CheckpointError, FileNotFoundError):
    """The step does not exist, or no existing step verifies."""


class RecoveryError(CheckpointError):
    """Steps exist, or may exist, and none can be used: damaged, too old, of another format, or
    unreachable. The message has the reason for each. Do not start from step 0."""


class DamagedError(CheckpointError):
    """Stored bytes differ from those written, at `file`, `path` (the leaf) and `offset`."""

    def __init__(self, message: str, *, offset: int | None = None, **context: Any) -> None:
        super().__init__(message, **context)
        self.offset = offset


class FormatError(CheckpointError, ManifestError):
    """A newer version of torchrelay wrote the step. It may be intact, so no older step is loaded
    instead. Read it with the version that wrote it."""


class StorageTimeoutError(CheckpointError, TimeoutError):
    """The storage did not answer by the deadline. A step that was being saved is not committed and
    will not be; `CommitUnknownError` is raised if it may be."""


class CommitUnknownError(CheckpointError):
    """The outcome of a commit is unknown: check `step in checkpointer.steps()`. Every other failure
    of a save means that the step was not committed."""


class TransferTimeoutError(RelayError, TimeoutError):
    """A deadline passed. The message names the peer, the phase and the bytes done."""


class TornStateError(RelayError):
    """A receive or load with `atomic=False` stopped midway, or an object that the message names
    rejected its state and could not be restored. Receive again; `__cause__` has the reason."""
