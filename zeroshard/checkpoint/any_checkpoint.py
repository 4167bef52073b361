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
    directory: str | os.PathLike[str],
    tag: str | None = None,
    cuts: Mapping[str, Any] | None = None,
    *,
    masters_differ: bool = False,
) -> Contents:
    """The contents of a checkpoint of zeroshard, DeepSpeed or torch.distributed.checkpoint.

    Args:
        directory: a directory of checkpoints, or one checkpoint.
        tag: the checkpoint in it; None for the newest.
        cuts: how tensor-parallel ranks of DeepSpeed were cut, in place of the checkpoint's `universal_checkpoint_info`.
        masters_differ: take master weights of DeepSpeed though they do not round to the weights of its model files.

    Raises:
        CheckpointError: there is none, or it is damaged or malicious.
    """
    base = Path(directory)
    try:
        return _open(base, tag, cuts, masters_differ)
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # values of unexpected types
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{base} is damaged: {type(error).__name__} {error}") from error
    except OSError as error:
        raise CheckpointError(f"{error.filename or base} can't be read: {error.strerror}") from error


def _open(base: Path, tag: str | None, cuts: Mapping[str, Any] | None, masters_differ: bool) -> Contents:
    if not base.is_dir():
        raise CheckpointError(f"there is no folder {base}")
    own = find_native(base, tag)
    if own is not None:
        return open_native(own)
    found = deepspeed.find(base, tag)
    if found is not None:
        return deepspeed.open_deepspeed(found, cuts, masters_differ=masters_differ)
    folder = base if tag is None else base / deepspeed.check_tag(tag, base)
    if is_dcp(folder):
        return open_dcp(folder)
    raise CheckpointError(
        f"{folder} holds no checkpoint of zeroshard, DeepSpeed (ZeRO 1 to 3 or universal) or "
        f"torch.distributed.checkpoint{_hint(folder)}"
    )


def _hint(folder: Path) -> str:
    """Which tag to give, if the folder has some but no file that names the newest."""
    there = sorted(one.name for one in folder.iterdir() if deepspeed.find(one) == one) if folder.is_dir() else []
    return f", and no file `latest`, but {', '.join(there[:5])}: give --tag" if there else ""
