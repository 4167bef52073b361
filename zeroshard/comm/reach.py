"""Tests whether the GPUs of all ranks can access each other's memory: one host, peer access between each pair."""

from __future__ import annotations

import socket
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def gpus_reachable(device: torch.device) -> bool:
    """Whether the GPUs of all ranks can read each other's memory: one host, peer access. Called by all ranks."""
    if device.type != "cuda" or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    host = _host() if _sees_peers(device) else 0
    answers = torch.tensor([host, -host], dtype=torch.int64, device=device)
    dist.all_reduce(answers, op=dist.ReduceOp.MIN)
    low, high = answers.tolist()
    return low == -high and low > 0


def _sees_peers(device: torch.device) -> bool:
    count = torch.cuda.device_count()
    others = (index for index in range(count) if index != device.index)
    return dist.get_world_size() <= count and all(torch.cuda.can_device_access_peer(device, other) for other in others)


def _host() -> int:
    """A number above 0 that names this host and its boot."""
    boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
    return 1 + zlib.crc32(f"{socket.gethostname()} {boot}".encode())
