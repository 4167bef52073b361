"""Opens a checkpoint of any known format as `Contents`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.foreign import deepspeed
from zeroshard.checkpoint.foreign.contents import Contents
from zeroshard.checkpoint.foreign.dcp import is_dcp, open_dcp
from zeroshard.checkpoint.native import find_native, open_native
from zeroshard.errors import CheckpointError


def open_checkpoint(
    directory: str | os.PathLike[str], tag: str | None = None, cuts: Mapping[str, Any] | None = None
) -> Contents:
    """The contents of a checkpoint of zeroshard, DeepSpeed or torch.distributed.checkpoint.

    Args:
        directory: a directory of checkpoints, or one checkpoint.
        tag: the checkpoint in it; None for the newest.
        cuts: how tensor-parallel ranks of DeepSpeed were cut, in place of the checkpoint's `universal_checkpoint_info`.

    Raises:
        CheckpointError: there is none, or it is damaged or malicious.
    """
    base = Path(directory)
    if not base.is_dir():
        raise CheckpointError(f"there is no folder {base}")
    own = find_native(base, tag)
    if own is not None:
        return open_native(own)
    try:
        found = deepspeed.find(base, tag)
        if found is not None:
            return deepspeed.open_deepspeed(found, cuts)
        folder = base if tag is None else base / deepspeed.check_tag(tag, base)
        if is_dcp(folder):
            return open_dcp(folder)
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # values of unexpected types
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{base} is damaged: {type(error).__name__} {error}") from error
    raise CheckpointError(
        f"{folder} holds no checkpoint of zeroshard, DeepSpeed (ZeRO 1 to 3 or universal) or "
        "torch.distributed.checkpoint"
    )
