"""What children of the fork server find imported. See `tests.support.forks`."""

import gc

import hypothesis  # noqa: F401
import numpy.lib.recfunctions  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo  # the first DTensor imports it
import torch.distributed._shard.sharded_tensor
import torch.distributed.checkpoint.state_dict
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.testing  # noqa: F401

import tests.support.faults
import tests.support.guarded_memory
import tests.support.loop
import tests.support.saver
import tests.support.ways  # noqa: F401

# A collection in a child does not look at all that torch has made, and copies none of it.
gc.collect()
gc.freeze()
