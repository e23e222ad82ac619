"""torchrelay moves the whole live state of a PyTorch job to the processes that need it."""

from torchrelay.errors import RelayError
from torchrelay.state.registry import register

__all__ = ["RelayError", "register"]
