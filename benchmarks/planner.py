"""The planner's predictions beside measurements, and beside published sizing rows; tables in Markdown.

    python -m benchmarks planner                    about a minute
    python -m benchmarks planner --published        published rows too: some minutes

Measured rows are in `zeroshard/planner/data/measured.tsv`; a row that has not been measured says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from benchmarks.llama import SIZES, Llama
from zeroshard.plan.builder import Precision, Recipe
from zeroshard.plan.plan import ExecutionPolicy
from zeroshard.planner.advice import impossible_memory, impossible_rate
from zeroshard.planner.checkpointing import Checkpointing
from zeroshard.planner.cost import kernels_seconds
from zeroshard.planner.hardware import GIB, parse_cluster, read_table
from zeroshard.planner.measured import MEASURED, Measured
from zeroshard.planner.memory import CUBLAS_WORKSPACE, transient_nbytes
from zeroshard.planner.rows import Row, Setting, make_row
from zeroshard.planner.sources import ModelSource, sized_source
from zeroshard.planner.tiers import Offload
from zeroshard.planner.trace import total_kernels
from zeroshard.planner.workload import Workload

CLUSTER = "2xH100-80GB"
ALL_MEMORY = 2**60
RECIPE = Recipe(
    precision=Precision("bfloat16"),
    policy=ExecutionPolicy(clip_norm=1.0, overlap_step=True, prefetch=1, cast_inputs="bfloat16"),
)
"""As the benchmarks train: bf16, AdamW, clipped."""


def source(size: str, *, checkpointing: bool) -> ModelSource:
    """The benchmarks' model, with its own checkpointing."""

    def batch(_: nn.Module, samples: int, length: int) -> dict[str, torch.Tensor]:
        return {name: torch.empty(samples, length, dtype=torch.int64) for name in ("ids", "targets")}

    return ModelSource(size, lambda: Llama(SIZES[size], checkpointing=checkpointing), batch)


@cache
def workload(size: str, samples: int, length: int, checkpointing: bool) -> Workload:
    return Workload(source(size, checkpointing=checkpointing), samples, length)


def row(found: Measured) -> Row:
    """The planner's row of a measured one."""
    work = workload(found.model, found.samples, found.length, found.checkpointing)
    policy = replace(RECIPE.policy, spare_nbytes=ALL_MEMORY if found.tuned else 0)
    recipe, stage = replace(RECIPE, policy=policy), found.stage or 0
    return make_row(work, recipe, Setting(stage, Offload.NONE, Checkpointing.OFF), parse_cluster(CLUSTER))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", action="store_true", help="published sizing rows beside ours")
    args = parser.parse_args()
    print("\n".join(measured_table()))
    if args.published:
        print()
        print("\n".join(published_table()))
    return 0


def measured_table() -> Iterator[str]:
    """Predicted and measured step and memory; configurations without a measurement at the end."""
    headings = [f"{what}: predicted | measured | " for what in ("s/step", "GiB", "reserved")]
    yield f"| configuration | {' | '.join(headings)} |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for found in MEASURED:
        yield _floor(found) if found.stage is None else _engine(found)
    seen = {(m.model, m.stage, m.samples, m.checkpointing) for m in MEASURED}
    for size in ("1b", "7b"):
        for stage in (1, 2, 3):
            for samples in (1, 4):
                for checkpointing in (False, True):
                    if (size, stage, samples, checkpointing) not in seen:
                        yield _engine(
                            Measured(size, stage, samples, 2048, checkpointing, False, None, None, None, "", "")
                        )


def _floor(found: Measured) -> str:
    made = row(found)
    kernels = total_kernels(made.traced.segments)
    issuing = kernels.total() * made.cluster.efficiency.host_launch
    seconds = max(kernels_seconds(made.cluster, kernels), issuing)
    allocated = ""
    if not found.checkpointing:  # with it whole gradients add up to more, which no engine holds
        work = workload(found.model, found.samples, found.length, found.checkpointing)
        peak = made.traced.peak + 2 * work.numel + CUBLAS_WORKSPACE
        allocated = _pair(peak / GIB, found.allocated_gib, 2)
    return f"| {found.label} (fitted) | {_pair(seconds, found.seconds, 4)} | {allocated or ' | | '} | | | |"


def _engine(found: Measured) -> str:
    made = row(found)
    allocated = made.memory.peak.total
    cells = (
        _pair(made.time.seconds, found.seconds, 4),
        _pair(allocated / GIB, found.allocated_gib, 2),
        _pair((allocated + made.slack) / GIB, found.reserved_gib, 2),
    )
    return f"| {found.label} | {' | '.join(cells)} |"


def _pair(predicted: float, measured: float | None, digits: int) -> str:
    if measured is None:
        return f"{predicted:.{digits}f} | not measured | "
    return f"{predicted:.{digits}f} | {measured:.{digits}f} | {predicted / measured - 1:+.1%}"


def published_table() -> Iterator[str]:
    """Published sizing rows (4096 tokens, checkpointing), what the plan says, and what can't be."""
    yield "| model, cluster, setting | GB: published | planned | tokens/s per GPU: published | planned | remark |"
    yield "| --- | ---: | ---: | ---: | ---: | --- |"
    for found in read_table("published.tsv"):
        yield _published(found)


def _published(found: dict[str, str]) -> str:
    parameters, memory, rate = (float(found[key]) for key in ("params", "memory_gb", "tokens_per_second"))
    # The published NVMe row has eight disks side by side; what one GPU server was measured with has one of 2 GB/s.
    cluster = parse_cluster(found["cluster"], host_memory_gb=4000, disk_gbs=50)
    work = Workload(sized_source(parameters, int(found["layers"]), int(found["hidden"])), 1, 4096)
    setting = Setting(int(found["stage"]), Offload(found["offload"]), Checkpointing.ON)
    made = make_row(work, RECIPE, setting, cluster)
    plan = made.plan
    state = sum(made.memory.tiers.device.values()) + sum(
        transient_nbytes(plan, unit) for unit in range(len(plan.units))
    )
    reasons = [
        impossible_rate(parameters, rate, cluster.gpu.bf16_flops),
        impossible_memory(state, memory * 1e9),
    ]
    remark = "; ".join(f"impossible: {reason}" for reason in reasons if reason) or "possible"
    label = f"{found['name']}, {found['cluster']}, {setting.label}"
    rates = f"{rate:,.0f} | {made.tokens_per_second:,.0f}"
    return f"| {label} | {memory:.0f} | {made.total / 1e9:.1f} | {rates} | {remark} |"


if __name__ == "__main__":
    sys.exit(main())
