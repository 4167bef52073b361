"""Checkpoints of given tensors, written as several ranks would, without ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from zeroshard.checkpoint.draft import begin, write_manifest
from zeroshard.checkpoint.encryption import new_encryption
from zeroshard.checkpoint.keys import KeyService
from zeroshard.checkpoint.manifest import TensorInfo, TensorKind
from zeroshard.checkpoint.writer import Piece, join_tables, write_pieces


def reads(tensor: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
    flat = tensor.reshape(-1)
    return lambda low, high: flat[low:high].contiguous()


def info_of(name: str, tensor: torch.Tensor) -> TensorInfo:
    if name.startswith("state."):
        of, _, key = name.removeprefix("state.").rpartition(".")
        return TensorInfo(name, TensorKind.OPTIMIZER, tensor.dtype, tuple(tensor.shape), of=of, key=key)
    return TensorInfo(name, TensorKind.PARAMETER, tensor.dtype, tuple(tensor.shape))


def save_tensors(
    base: Path,
    tag: str,
    tensors: Mapping[str, torch.Tensor],
    ranks: int,
    aliases: Mapping[str, str] | None = None,
    *,
    service: KeyService | None = None,
) -> Path:
    """A checkpoint in which each tensor is divided evenly over `ranks`."""
    draft = begin(base, tag)
    encryption = None if service is None else new_encryption(service)
    for rank in range(ranks):
        pieces = []
        for name, tensor in tensors.items():
            numel = tensor.numel()
            start, stop = rank * numel // ranks, (rank + 1) * numel // ranks
            if start < stop or (rank == 0 and not numel):
                pieces.append(Piece(info_of(name, tensor), start, stop, reads(tensor)))
        write_pieces(draft.folder, rank, pieces, {"rank": rank}, encryption)
    write_manifest(draft, join_tables(draft.folder, ranks, aliases or {}, {"step": 7}, encryption))
    folder = draft.publish(latest=True)
    draft.close()
    return folder
