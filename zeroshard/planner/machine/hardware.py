"""GPUs and clusters by name: published peaks, and the shares of them that real kernels reach.

`data/gpus.tsv` has the figures of data sheets, each row with its source: dense peaks, memory bandwidth, link rates per
direction. `memory_gib` is the total that CUDA reports, a little less than the nominal size. The shares are separate
(`Efficiency`), because they are measured and a calibration may replace them.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

import torch

from zeroshard.errors import PlanError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A card by its data sheet: bytes, flops and bytes per s, links per direction; 0 flops if it lacks the dtype."""

    name: str
    memory: int
    bf16_flops: float
    fp16_flops: float
    fp32_flops: float
    hbm: float
    link: str
    link_rate: float
    pcie_rate: float
    nic_rate: float
    source: str
    fp8_flops: float = 0.0

    def peak(self, dtype: torch.dtype) -> float:
        """Dense peak of matrix products in `dtype`, in flops per second."""
        if dtype == torch.bfloat16:
            return self.bf16_flops or self.fp32_flops
        if dtype == torch.float16:
            return self.fp16_flops
        if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            return self.fp8_flops
        return self.fp32_flops

    @property
    def has_bf16(self) -> bool:
        return self.bf16_flops > 0


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peaks that kernels reach, and fixed costs.

    The defaults are from an H100 (torch 2.11). `products`, `attention` and `elementwise` are fitted to forward and
    backward alone of two models, without any engine; `update` and `norm` are measured rates of the optimizer's
    kernels; link and latency are fitted to all-gathers of 1 MiB to 512 MiB on two H100s. For other cards they are
    assumptions until `zeroshard doctor` has measured.
    """

    products: float = 0.676
    attention: float = 0.45
    elementwise: float = 0.65
    update: float = 0.87
    norm: float = 0.61
    link: float = 0.584
    """263 of 450 GB/s: the rate of large all-gathers on NVLink without multicast."""
    nic: float = 0.85
    pcie: float = 0.84
    """54 of 64 GB/s."""
    contention: float = 0.30
    """Share of a collective's time by which concurrent kernels become longer."""
    peer_contention: float = 0.21
    """The same of copies between peers: 0.075 ms where a collective costs 0.105."""
    kernel_latency: float = 2e-6
    collective_latency: float = 45e-6
    hop_latency: float = 1e-6
    network_hop_latency: float = 5e-6
    host_launch: float = 37e-6
    """Seconds in which the host issues one kernel of the model: forward, autograd and Python around it."""
    host_operation: float = 0.38e-3
    """Seconds of the engine's own Python for one gather or reduce; as `host_launch` of one machine, from which hosts
    differ by a third."""
    step_latency: float = 1e-3
    """Idle time between norm and update: the small all-reduce, its table of scalars, the first gather's start."""
    host_memory_rate: float = 180e9
    """Bytes per second of an optimizer step on the host: 151 to 172 GB/s with 32 threads alone, 190 in steps of 6.7e9
    parameters on two H200 (docs/decisions/0014 and 0015)."""
    disk_rate: float = 2.0e9


@dataclass(frozen=True)
class Cluster:
    """`count` GPUs in nodes of `per_node`.

    Attributes:
        nic: bytes per second and direction of the network, for each GPU.
        host_memory: bytes of one node's host memory.
    """

    gpu: Gpu
    count: int
    per_node: int
    nic: float
    host_memory: int
    efficiency: Efficiency = field(default_factory=Efficiency)
    price: float | None = None
    """USD per GPU and hour."""

    @property
    def nodes(self) -> int:
        return -(-self.count // self.per_node)

    @property
    def label(self) -> str:
        return f"{self.count}x{self.gpu.name}"


@cache
def gpus() -> tuple[Gpu, ...]:
    """The built-in profiles of GPUs."""
    return tuple(_gpu(row) for row in read_table("gpus.tsv"))


def find_gpu(name: str) -> Gpu:
    """The profile called `name`, in any case and with or without the memory's size.

    Raises:
        PlanError: there is none; the message names the nearest and all.
    """
    table = _names()
    wanted = _key(name)
    if wanted in table:
        return table[wanted]
    near = get_close_matches(wanted, table, n=1, cutoff=0.3)
    hint = f"; did you mean {table[near[0]].name!r}?" if near else "."
    raise PlanError(f"no GPU is called {name!r}{hint} Known: {', '.join(gpu.name for gpu in gpus())}")


def parse_cluster(
    text: str, *, per_node: int | None = None, host_memory_gb: float = 1000.0, disk_gbs: float = 2.0
) -> Cluster:
    """A cluster from text such as '8xA100-80GB' or '512xH100'.

    Args:
        per_node: GPUs in a node; 8, or all where there are fewer.
        host_memory_gb: host memory of a node, GB.
        disk_gbs: rate at which a node's disks read or write, GB/s.

    Raises:
        PlanError: no such GPU, or a number that makes no sense.
    """
    match = re.fullmatch(r"\s*(\d+)\s*[xX*]\s*(\S.*?)\s*", text)
    if match is None:
        raise PlanError(f"--cluster {text!r}: write COUNTxGPU, such as 8xA100-80GB")
    count, gpu = int(match[1]), find_gpu(match[2])
    if not 1 <= count <= 1_000_000:
        raise PlanError(f"--cluster {text!r}: {count} GPUs")
    node = min(count, 8 if per_node is None else per_node)
    if node < 1 or count % node:
        raise PlanError(f"--cluster {text!r}: {count} GPUs are not whole nodes of {node}; give --gpus-per-node")
    if not (0 < host_memory_gb < 1e6 and 0 < disk_gbs < 1e4):
        raise PlanError(f"--host-memory {host_memory_gb:g}, --disk {disk_gbs:g}: GB, and GB per second")
    shares = Efficiency(disk_rate=disk_gbs * 1e9)
    return Cluster(gpu, count, node, gpu.nic_rate, int(host_memory_gb * 1e9), shares)


def listed_price(gpu: Gpu) -> float | None:
    """USD per GPU and hour from `data/prices.tsv`; None if it has none for this GPU."""
    for row in read_table("prices.tsv"):
        if row["gpu"] == gpu.name:
            return float(row["usd_per_gpu_hour"])
    return None


def read_table(name: str) -> list[dict[str, str]]:
    """The rows of a data file of the planner, by column name."""
    text = (files("zeroshard.planner") / "data" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines(), delimiter="\t"))


def _gpu(row: dict[str, str]) -> Gpu:
    return Gpu(
        name=row["name"],
        memory=int(float(row["memory_gib"]) * GIB),
        bf16_flops=float(row["bf16_tflops"]) * 1e12,
        fp16_flops=float(row["fp16_tflops"]) * 1e12,
        fp32_flops=float(row["fp32_tflops"]) * 1e12,
        hbm=float(row["hbm_gbs"]) * 1e9,
        link=row["link"],
        link_rate=float(row["link_gbs"]) * 1e9,
        pcie_rate=float(row["pcie_gbs"]) * 1e9,
        nic_rate=float(row["nic_gbs"]) * 1e9,
        source=row["source"],
        fp8_flops=float(row["fp8_tflops"]) * 1e12,
    )


@cache
def _names() -> dict[str, Gpu]:
    by_name = {gpu.name: gpu for gpu in gpus()}
    found = {_key(name): gpu for name, gpu in by_name.items()}
    for row in read_table("gpus.tsv"):
        found.update({_key(alias): by_name[row["name"]] for alias in row["aliases"].split(",")})
    return found


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia")
