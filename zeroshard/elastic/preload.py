"""What a rank of an elastic job does before it waits at its node's gate, since other ranks wait for it from then on.

torch loads its compiler and DTensor when the first model is built, and makes a GPU's context at the first operation
there: seconds each, which a fresh process would take in the middle of a round.
"""

import torch
import torch._dynamo
import torch.distributed.tensor

import zeroshard.engine.engine
import zeroshard.from_config  # noqa: F401


def start_device(local_rank: int) -> None:
    """Make the context of this rank's GPU and load its library of products; nothing without a GPU."""
    count = torch.cuda.device_count()
    if count == 0 or local_rank >= count > 1:
        return  # more ranks than GPUs are refused when they join
    ones = torch.ones(16, 16, device=torch.device("cuda", local_rank if count > 1 else 0))
    (ones @ ones).sum().item()
