"""torch's own `PGTransport`, for what compares itself with it: the demo and the benchmarks."""

from torch.distributed.checkpoint._pg_transport import PGTransport

__all__ = ["PGTransport"]
