"""What the planner says of weak scaling on GPUs that are not here: steps, memory, and what is kept of one GPU's floor.

    floor    the kernels of forward and backward, on one GPU, or the host that issues them where that takes longer
    rows     the plan that zeroshard would run on so many of these GPUs in one host, simulated

Rejected: a prediction per row of `scaling` on the machine that measures; it has the plan that ran, and this has no run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.llama import SIZES
from benchmarks.planner_cases import RECIPE, floor_seconds, workload
from benchmarks.report import number, percent
from zeroshard.planner.machine.hardware import GIB, Cluster, parse_cluster
from zeroshard.planner.predict.memory import step_memory
from zeroshard.planner.predict.rows import Row, Setting, make_row
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.predict.timeline import step_time
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.compiled import compiled

BATCH, LENGTH = 4, 2048
COLUMNS = ("engine", "setting", "GPUs", "s/step", "tokens/s/GPU", "of one GPU's floor", "GiB")


def predicted(
    sizes: Sequence[str], gpus: Sequence[int], card: str, checkpointed: float, large: float
) -> Iterator[list[str]]:
    """Rows of a table, in the order of COLUMNS.

    Args:
        card: as `zeroshard plan --cluster` names it.
        checkpointed, large: parameters from which on a model recomputes, and from which on it is stage 3 alone, eager.

    Raises:
        PlanError: no such card.
    """
    for size in sizes:
        recomputes, many = SIZES[size].numel > checkpointed, SIZES[size].numel > large
        for as_compiled in (False,) if many else (False, True):
            floor = floor_seconds(_row(size, 3, parse_cluster(f"1x{card}", per_node=1), recomputes, as_compiled))
            marks = [*(["checkpointing"] if recomputes else []), "compiled" if as_compiled else "eager"]
            kind = ", ".join([size, f"{BATCH} x {LENGTH}", *marks])
            yield ["floor", kind, "1", number(floor, 4), number(BATCH * LENGTH / floor, 0), percent(1.0), ""]
            for stage in (3,) if many or as_compiled else (3, 2, 1):
                for count in sorted(gpus, reverse=True):
                    if count == 1 and stage < 3:
                        continue  # one GPU has but one stage
                    cluster = parse_cluster(f"{count}x{card}", per_node=count)
                    row = _row(size, stage, cluster, recomputes, as_compiled)
                    yield [f"zeroshard{stage}", kind, str(count), *_figures(row, floor)]


def _row(size: str, stage: int, cluster: Cluster, checkpointing: bool, as_compiled: bool) -> Row:
    work = workload(size, BATCH, LENGTH, checkpointing)
    row = make_row(work, RECIPE, Setting(stage, Offload.NONE, Checkpointing.OFF), cluster)
    if not as_compiled:
        return row
    traced = compiled(row.traced, keeps_inputs_only=checkpointing)  # the model checkpoints by itself
    memory, time = step_memory(row.plan, traced), step_time(row.plan, traced, cluster)
    return replace(row, traced=traced, memory=memory, time=time)


def _figures(row: Row, floor: float) -> list[str]:
    if not row.fits:
        return ["", "", "", f"{row.memory.peak.total / GIB:.2f}: too much"]
    seconds, tokens = row.time.seconds, BATCH * LENGTH / row.time.seconds
    return [number(seconds, 4), number(tokens, 0), percent(floor / seconds), number(row.memory.peak.total / GIB, 2)]
