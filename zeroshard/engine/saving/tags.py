"""Agrees on the name of a checkpoint if the ranks give different ones (`checkpoint.tag_validation`).

A checkpoint is one folder that all ranks write, so there can be one name only: rank 0's. Rejected: a folder of each
rank's own name, of which none could be loaded.
"""

from __future__ import annotations

import warnings
from typing import Literal

from zeroshard.checkpoint.error_barrier import CollectiveBarrier
from zeroshard.errors import UsageError, ZeroShardWarning

TagValidation = Literal["Ignore", "Warn", "Fail"]


def agreed_tag(barrier: CollectiveBarrier, tag: str, validation: TagValidation) -> str:
    """The name of the checkpoint on all ranks; called by all ranks.

    Raises:
        UsageError: the ranks' names differ, and `validation` is "Fail".
    """
    if barrier.all_equal(str(tag)):
        return tag
    first = barrier.broadcast_text(str(tag), 0)
    if validation == "Fail":
        raise UsageError(
            f"save_checkpoint: the ranks give different tags (rank 0: {first!r}, this rank: {tag!r}), which "
            'checkpoint.tag_validation "Fail" forbids; give all the same'
        )
    if validation == "Warn":
        warnings.warn(
            f"save_checkpoint: the ranks give different tags (rank 0: {first!r}, this rank: {tag!r}); the checkpoint "
            "gets that of rank 0. Give all the same",
            ZeroShardWarning,
            stacklevel=4,
        )
    return first
