"""A batch as a message between ranks: numbers as they lie in memory, and a JSON text that says what they are.

    ranks send the lengths of both, then bytes filled up to the longest

Rejected: torch's all_gather_object, which unpickles what others send.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.errors import UsageError


def gather_batches(own: Any, group: dist.ProcessGroup) -> list[dict[str, Any] | None]:
    """The batches of all ranks of `group`, in their order; None is sent by a rank that has none left.

    Raises:
        UsageError: a batch is no mapping of tensors and plain values.
    """
    device = _device_of(group)
    head, body = _encoded(own)
    lengths = _gathered(torch.tensor([len(head), body.numel()], dtype=torch.int64, device=device), group)
    sizes = [(int(row[0]), int(row[1])) for row in lengths]
    message = torch.zeros(max(sum(size) for size in sizes), dtype=torch.uint8, device=device)
    message[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8).to(device)
    message[len(head) : len(head) + body.numel()] = body.to(device)
    return [_decoded(row.cpu(), size) for row, size in zip(_gathered(message, group), sizes, strict=True)]


def _gathered(own: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return parts


def _device_of(group: dist.ProcessGroup) -> torch.device:
    kinds = {device.type for device in group._device_types}
    return torch.device("cpu" if "cpu" in kinds else next(iter(kinds)))


def _encoded(batch: Any) -> tuple[bytes, torch.Tensor]:
    """The text, which is never empty, and the bytes of all tensors one after the other."""
    if batch is None:
        return b"null", torch.empty(0, dtype=torch.uint8)
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"a batch of divided sequences is a mapping with input_ids, not a {type(batch).__name__}; let the loader's "
            "collate_fn make one"
        )
    entries: list[Any] = []
    tensors: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)]
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            entries.append([name, str(value.dtype).removeprefix("torch."), list(value.shape)])
            tensors.append(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8))
        else:
            entries.append([name, None, value])
    try:
        text = json.dumps(entries)
    except TypeError as error:
        raise UsageError(
            f"a batch of divided sequences has a value that ranks can't send each other ({error}): give tensors, "
            "numbers and text, and drop the others in the collate_fn"
        ) from error
    return text.encode(), torch.cat(tensors)


def _decoded(message: torch.Tensor, size: tuple[int, int]) -> dict[str, Any] | None:
    entries = json.loads(bytes(message[: size[0]].tolist()))
    if entries is None:
        return None
    batch: dict[str, Any] = {}
    at = size[0]
    for name, dtype, value in entries:
        if dtype is None:
            batch[name] = value
            continue
        kind: torch.dtype = getattr(torch, dtype)
        count = torch.Size(value).numel() * kind.itemsize
        batch[name] = message[at : at + count].clone().view(kind).reshape(value)
        at += count
    return batch
