"""The planner's predictions beside measurements, and beside published sizing rows; tables in Markdown.

    python -m benchmarks planner                    about a minute
    python -m benchmarks planner --published        published rows too: some minutes
    python -m benchmarks planner --measure          measure on this machine's GPUs: some minutes; --json FILE keeps all
    python -m benchmarks planner --measure --size tiny --length 64 --nproc 2         try that without a GPU

Measured rows are in `zeroshard/planner/data/measured.tsv`; a row that has not been measured says so. `--measure` starts
one group of processes for all rows. It predicts with the rates of an H100 unless `--calibration` gives those that
`zeroshard doctor --save FILE` measured, and ends with 1 where memory is off by more than 3 % or time by more than 10 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.llama import SIZES
from benchmarks.planner_cases import CASES, RECIPE, Case, case_of, floor_seconds, predict, workload
from benchmarks.planner_measure import Options, measure
from zeroshard.planner.choose.advice import impossible_memory, impossible_rate
from zeroshard.planner.machine.hardware import GIB, parse_cluster, read_table
from zeroshard.planner.predict.measured import MEASURED, Measured
from zeroshard.planner.predict.memory import CUBLAS_WORKSPACE, transient_nbytes
from zeroshard.planner.predict.rows import Row, Setting, make_row
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.sources import sized_source
from zeroshard.planner.trace.workload import Workload

CLUSTER = "2xH100-80GB"
LENGTH = 2048


def row(found: Measured) -> Row:
    """The planner's row of a measured one."""
    return predict(case_of(found), found.length, parse_cluster(CLUSTER))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", action="store_true", help="published sizing rows beside ours")
    parser.add_argument("--measure", action="store_true", help="measure on this machine, and predict beside")
    parser.add_argument("--size", choices=SIZES, help="of the model; without it 1b and then 7b")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=4, help="steps that are timed, between two syncs")
    parser.add_argument("--nproc", type=int, default=0, help="ranks; without it all GPUs")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds in all")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="what zeroshard doctor --save wrote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    args = parser.parse_args()
    if args.measure:
        return measure(
            Options(args.size, args.length, args.steps, args.nproc, args.budget, args.calibration, args.json)
        )
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
    seen = {case_of(found) for found in MEASURED if found.stage is not None}
    for case in CASES:
        if case not in seen:
            yield _unmeasured(case)


def _floor(found: Measured) -> str:
    made = row(found)
    allocated = ""
    if not found.checkpointing:  # with it whole gradients add up to more, which no engine holds
        work = workload(found.model, found.samples, found.length, found.checkpointing)
        peak = made.traced.peak + 2 * work.numel + CUBLAS_WORKSPACE
        allocated = _pair(peak / GIB, found.allocated_gib, 2)
    return f"| {found.label} (fitted) | {_pair(floor_seconds(made), found.seconds, 4)} | {allocated or ' | | '} | | | |"


def _engine(found: Measured) -> str:
    made = row(found)
    allocated = made.memory.peak.total
    cells = (
        _pair(made.time.seconds, found.seconds, 4),
        _pair(allocated / GIB, found.allocated_gib, 2),
        _pair((allocated + made.slack) / GIB, found.reserved_gib, 2),
    )
    return f"| {found.label} | {' | '.join(cells)} |"


def _unmeasured(case: Case) -> str:
    made = predict(case, LENGTH, parse_cluster(CLUSTER))
    allocated = made.memory.peak.total
    figures = ((made.time.seconds, 4), (allocated / GIB, 2), ((allocated + made.slack) / GIB, 2))
    return f"| {case.label(LENGTH)} | {' | '.join(_pair(value, None, digits) for value, digits in figures)} |"


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
