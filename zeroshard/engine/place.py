"""What scripts ask the engine about the place of its process: rank, rank on the node, number of ranks.

They are those of the process group and of the launcher's environment, not of one axis of a mesh: scripts choose with
them who prints and which device a batch goes to, as with DeepSpeed's engine.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from zeroshard.comm.mesh import world_size


class AnswersPlace:
    """Answers which of how many ranks this process is."""

    @property
    def global_rank(self) -> int:
        """This process's rank among all; 0 where there is no process group."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    @property
    def local_rank(self) -> int:
        """This process's rank on its node, as the launcher says in LOCAL_RANK; 0 without one."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def world_size(self) -> int:
        """Ranks of the whole job, also where a mesh gives the data-parallel axis fewer."""
        return world_size()
