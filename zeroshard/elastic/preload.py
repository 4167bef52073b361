"""What a rank of an elastic job imports before it comes to its node's gate, where others may be waiting for it.

torch loads its compiler and DTensor when the first model is built, which takes seconds.
"""

import torch._dynamo
import torch.distributed.tensor  # noqa: F401

import zeroshard.engine.engine
import zeroshard.from_config  # noqa: F401
