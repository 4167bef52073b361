"""Measures all-gathers of several sizes over this machine's GPUs, one process each, and fits latency and rate."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MIB = 2**20
SIZES = (1, 8, 32, 128, 512)
REPEATS = 10


@dataclass(frozen=True)
class Fabric:
    """Speed of the links between the GPUs of this machine.

    Attributes:
        latency: seconds of a collective, however few its bytes.
        rate: bytes per second that a rank receives in large collectives.
        rates: bytes per second that a rank receives, by size in MiB.
    """

    latency: float
    rate: float
    rates: Mapping[int, float]


def measure_gathers(ranks: int, *, backend: str = "nccl", sizes: Sequence[int] = SIZES) -> Fabric:
    """Measure all-gathers of `sizes` MiB over `ranks` processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, args=(ranks, backend, tuple(sizes), folder), nprocs=ranks, start_method="spawn")
        text = (Path(folder) / "seconds").read_text(encoding="utf-8")
    seconds = [float(line) for line in text.split()]
    return fit(sizes, seconds, ranks)


def fit(sizes: Sequence[int], seconds: Sequence[float], ranks: int) -> Fabric:
    """Latency and rate from the straight line through the times of the smallest and the largest size.

    Args:
        sizes, seconds: outputs of the all-gathers in MiB, and their times.
    """
    wire = [size * MIB * (ranks - 1) / ranks for size in sizes]
    slope = (seconds[-1] - seconds[0]) / (wire[-1] - wire[0]) if len(sizes) > 1 else seconds[0] / wire[0]
    slope = max(slope, 1e-15)
    latency = max(1e-6, seconds[-1] - slope * wire[-1])
    rates = {size: received / took for size, received, took in zip(sizes, wire, seconds, strict=True)}
    return Fabric(latency, 1.0 / slope, rates)


def _rank(rank: int, ranks: int, backend: str, sizes: tuple[int, ...], folder: str) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        seconds = [gather_seconds(size * MIB, ranks, device) for size in sizes]
    finally:
        dist.destroy_process_group()
    if rank == 0:
        (Path(folder) / "seconds").write_text("\n".join(map(str, seconds)), encoding="utf-8")


def gather_seconds(nbytes: int, ranks: int, device: torch.device) -> float:
    """Seconds of one all-gather with an output of `nbytes`; called by all ranks of the default group."""
    shard = torch.zeros(nbytes // ranks, dtype=torch.uint8, device=device)
    whole = torch.zeros(shard.numel() * ranks, dtype=torch.uint8, device=device)
    for _ in range(3):
        dist.all_gather_into_tensor(whole, shard)
    _synchronize(device)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_gather_into_tensor(whole, shard)
    _synchronize(device)
    return (time.perf_counter() - began) / REPEATS


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
