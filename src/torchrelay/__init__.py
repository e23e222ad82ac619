"""torchrelay moves the whole live state of a PyTorch job to the processes that need it."""

from torchrelay.errors import (
    DigestError,
    ManifestError,
    MismatchError,
    PeerAbortedError,
    PeerError,
    PeerLostError,
    PeerRefusedError,
    RelayError,
    RemoteProtocolError,
    StateError,
    StepMismatchError,
    TornStateError,
    TransferTimeoutError,
    UnsupportedLeafError,
    UsageError,
)
from torchrelay.relay import Progress, Received, Relay, Report
from torchrelay.state.registry import register

__version__ = "0.1.0"

__all__ = [
    "DigestError",
    "ManifestError",
    "MismatchError",
    "PeerAbortedError",
    "PeerError",
    "PeerLostError",
    "PeerRefusedError",
    "Progress",
    "Received",
    "Relay",
    "RelayError",
    "RemoteProtocolError",
    "Report",
    "StateError",
    "StepMismatchError",
    "TornStateError",
    "TransferTimeoutError",
    "UnsupportedLeafError",
    "UsageError",
    "register",
]
