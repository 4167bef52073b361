"""Compares ZeRO-3, HSDP and ZeRO-1 with tensor and pipeline parallelism by prediction, from 8 to 16,384 GPUs.

    ZeRO-3         parameters, gradients and states over all ranks; every gather crosses the network
    HSDP           parameters, gradients and states within a node, gradients summed between nodes
    hpZ            as ZeRO-3, with a second copy of the parameters in each node (arXiv:2306.10209, section 4.2)
    hpZ, qwZ, qgZ  the same, with quantized traffic between nodes (sections 4.1 and 4.3)
    ZeRO-1 + 3D    tensor parallel within a node, pipeline stages over nodes, the rest data parallel with ZeRO-1

The first four are simulated like every other row; zeroshard executes them. 3D is a formula over the traced model: 1/(tp
x pp) of its kernels, four all-reduces of each block's output, and a bubble of (pp - 1) / (micro-batches + pp - 1)
(Narayanan et al. 2021, arXiv:2104.04473). It shows from which size on it is faster; `--meshes` simulates such layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zeroshard.errors import PlanError
from zeroshard.mesh import NESTED, SHARD
from zeroshard.plan.builder import Recipe
from zeroshard.plan.hops import GradientCodes
from zeroshard.plan.placement import GATHER_CODES, STAGES
from zeroshard.planner.machine.hardware import Cluster
from zeroshard.planner.predict.collectives import Ranks, collective_seconds
from zeroshard.planner.predict.cost import kernels_seconds
from zeroshard.planner.predict.rows import Row, Setting, make_row
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.model_trace import total_kernels
from zeroshard.planner.trace.workload import Workload

BYTES_PER_PARAMETER = 16


@dataclass(frozen=True)
class Strategy:
    """One strategy to use a cluster, and what it takes.

    Attributes:
        seconds: of one step.
        memory: bytes per GPU, with the reserve.
        tokens_per_second: per GPU.
        executed: whether zeroshard executes it as predicted.
    """

    name: str
    gpus: int
    seconds: float
    memory: int
    tokens_per_second: float
    executed: bool
    fits: bool
    remark: str = ""


def compare(work: Workload, recipe: Recipe, cluster: Cluster, sizes: list[int], how: Checkpointing) -> list[Strategy]:
    """All strategies on clusters of `sizes` GPUs of the same kind, with the same micro-batch per GPU.

    Raises:
        PlanError: a size is not a multiple of the GPUs of a node.
    """
    return [strategy for size in sizes for strategy in _strategies(work, recipe, _resized(cluster, size), how)]


def parse_sizes(text: str) -> list[int]:
    """Numbers of GPUs from text such as '8,64,512'. Raises PlanError for other text."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise PlanError(f"--scale {text}: write numbers of GPUs, such as 8,64,512,4096,16384") from error
    if any(not 1 <= size <= 1_000_000 for size in sizes):
        raise PlanError(f"--scale {text}: numbers of GPUs are between 1 and a million")
    return list(dict.fromkeys(sizes))


def _resized(cluster: Cluster, size: int) -> Cluster:
    per_node = min(size, cluster.per_node)
    if size % per_node:
        raise PlanError(f"--scale: {size} GPUs are not whole nodes of {per_node}; give --gpus-per-node")
    return replace(cluster, count=size, per_node=per_node)


def _strategies(work: Workload, recipe: Recipe, cluster: Cluster, how: Checkpointing) -> Iterator[Strategy]:
    setting = Setting(3, Offload.NONE, how)
    whole = make_row(work, recipe, setting, cluster)
    yield _strategy("ZeRO-3", whole, executed=True)
    if cluster.nodes == 1:
        return
    yield _strategy(
        "ZeRO-3, two-level collectives", make_row(work, recipe, setting, cluster, two_levels=True), executed=False
    )
    inside = replace(recipe, sharding=replace(STAGES[3], axes=(SHARD,)))
    yield _strategy("HSDP", make_row(work, inside, setting, cluster, shard=cluster.per_node), executed=True)
    if cluster.per_node > 1:
        copied = replace(recipe, sharding=replace(STAGES[3], axes=NESTED))
        copies = make_row(work, copied, setting, cluster, shard=cluster.per_node)
        yield _strategy("hpZ", copies, executed=True, remark=f"a second copy in each node of {cluster.per_node}")
        coded = replace(copied, codes=GATHER_CODES, frozen_codes=GATHER_CODES, gradient_codes=GradientCodes())
        codes = make_row(work, coded, setting, cluster, shard=cluster.per_node)
        lost = codes.time.seconds >= copies.time.seconds
        remark = "slower with codes here: encoding takes longer than they save" if lost else "8 bits, 4 between nodes"
        yield _strategy("hpZ, qwZ, qgZ", codes, executed=True, remark=remark)
    yield _three_dimensions(work, whole, cluster)


def _strategy(name: str, row: Row, *, executed: bool, remark: str = "") -> Strategy:
    return Strategy(
        name,
        row.cluster.count,
        row.time.seconds,
        row.total,
        row.tokens_per_second,
        executed,
        row.total <= row.cluster.gpu.memory,
        remark,
    )


def bubble(stages: int, micro_batches: int) -> float:
    """Share of a pipeline's time in which a stage waits."""
    return (stages - 1) / (micro_batches + stages - 1)


def _three_dimensions(work: Workload, whole: Row, cluster: Cluster) -> Strategy:
    """ZeRO-1 with tensor parallelism within a node and as many pipeline stages as the state needs."""
    tp = cluster.per_node
    capacity = cluster.gpu.memory
    # In the steady state a stage holds activations of as many micro-batches as there are stages, each of 1/stages of
    # the model.
    kinds = ("activations", "logits and loss", "backward")
    activations = sum(whole.memory.peak.nbytes.get(kind, 0) for kind in kinds) // tp
    state, stages, ranks = 0.0, 1, cluster.nodes
    while True:
        ranks = max(1, cluster.nodes // stages)
        per_gpu = work.numel / (tp * stages)
        state = per_gpu * (4 + (BYTES_PER_PARAMETER - 4) / ranks)
        if state + activations + whole.reserve <= 0.9 * capacity or stages * 2 > cluster.nodes:
            break
        stages *= 2
    # The micro-batches that tp x pp GPUs would have with ZeRO-3 go through the pipeline one after the other.
    count = tp * stages
    compute = kernels_seconds(cluster, total_kernels(whole.traced.segments)) / (tp * stages)
    inside = Ranks(tp, tp)
    output = _block_output(work)
    blocks = sum(1 for _ in whole.traced.order)
    tensor = 4 * blocks / stages * collective_seconds(cluster, "all-reduce", output, inside)
    gradients = collective_seconds(cluster, "reduce-scatter", int(2 * work.numel / (tp * stages)), Ranks(ranks, 1))
    seconds = count * (compute + tensor) / (1 - bubble(stages, count)) + 2 * gradients
    tokens = count * work.tokens / (tp * stages)
    total = int(state) + activations + whole.reserve
    return Strategy(
        "ZeRO-1 + tensor + pipeline",
        cluster.count,
        seconds,
        total,
        tokens / seconds,
        False,
        total <= capacity,
        f"tp {tp}, pp {stages}, dp {ranks}, {count} micro-batches",
    )


def _block_output(work: Workload) -> int:
    """Bytes of a block's output in 16 bits: tokens times the most frequent size of one-dimensional parameters."""
    widths = [p.shape[0] for unit in work.units for p in unit.parameters if len(p.shape) == 1]
    width = max(set(widths), key=widths.count) if widths else 1
    return 2 * work.tokens * width
