"""Gives advice on the chosen row. Each rule is a function of the situation that returns a sentence or "".

The thresholds are those that large runs commonly use: a million tokens per step, tensor and pipeline parallelism from
about 70B parameters on many nodes, fp16 on cards before Ampere, which lack bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zeroshard.plan.report import human_bytes
from zeroshard.planner.predict.rows import SAFE_SHARE, Row
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.trace.checkpointing import Checkpointing

LARGE_RUN_GPUS = 32
TOKENS_PER_STEP = 1_000_000
LARGE_MODEL, MANY_NODES = 60e9, 8
WAITING = 0.15
"""Share of a step that the GPU waits, from which on it is mentioned."""


@dataclass(frozen=True)
class Situation:
    """What the rules read: the chosen row and all rows.

    Attributes:
        length: tokens in a sequence.
        positions: tokens in the longest sequence that the model takes; None if that is not known.
    """

    row: Row
    rows: Sequence[Row]
    length: int
    positions: int | None


def advice(situation: Situation) -> list[str]:
    """Sentences for `situation`, the most important ones first."""
    found = (rule(situation) for rule in RULES)
    return [sentence for sentence in found if sentence]


def _single(s: Situation) -> str:
    if s.row.cluster.count > 1 or s.row.setting.stage == 0:
        return ""
    return (
        f"There is one data-parallel rank: stage {s.row.setting.stage} divides nothing and saves nothing; take stage 0."
    )


def _no_bf16(s: Situation) -> str:
    gpu = s.row.cluster.gpu
    if gpu.has_bf16:
        return ""
    return f"{gpu.name} is older than Ampere and has no bf16: train in fp16 with a dynamic loss scale."


def _small_batch(s: Situation) -> str:
    row = s.row
    tokens = row.tokens * row.micro_batches * row.plan.dp
    if row.cluster.count < LARGE_RUN_GPUS or tokens >= TOKENS_PER_STEP:
        return ""
    more = -(-TOKENS_PER_STEP // tokens)
    return (
        f"A step has {tokens / 1e6:.2g} million tokens; large runs use 1 to 4 million: accumulate {more} times as many "
        "micro-batches, or take fewer GPUs."
    )


def _waiting(s: Situation) -> str:
    row = s.row
    share = row.time.exposed / row.time.seconds
    if share < WAITING:
        return ""
    names = {
        "host": "the host, which issues kernels slower than the GPU runs them",
        "gather": "all-gathers",
        "reduce": "reduce-scatters",
        "copies": "copies over PCIe",
        "cpu": "the optimizer on the host",
        "windows": "the optimizer's state on disk",
    }
    slowest = max(names, key=lambda stream: row.time.busy[stream])
    return f"The GPU waits in {share:.0%} of the step, mostly for {names[slowest]}: a larger micro-batch hides more."


def _offload(s: Situation) -> str:
    if s.row.setting.offload is Offload.NONE:
        return ""
    better = [r for r in s.rows if r.fits and r.runs and r.setting.offload is Offload.NONE]
    quickest = min(better, key=lambda r: r.time.seconds, default=None)
    if quickest is None or quickest.time.seconds >= s.row.time.seconds:
        return ""
    gain = s.row.time.seconds / quickest.time.seconds - 1
    return f"Offload costs {gain:.0%} here; {quickest.setting.label} fits without it."


def _checkpointing(s: Situation) -> str:
    if s.row.setting.checkpointing is Checkpointing.OFF:
        return ""
    without = [
        r
        for r in s.rows
        if r.fits and r.runs and r.setting.checkpointing is Checkpointing.OFF and r.time.seconds < s.row.time.seconds
    ]
    if not without:
        return (
            "Switch checkpointing on, in the model (gradient_checkpointing_enable()) or for zeroshard in the config "
            '("activation_checkpointing": {"policy": "full"}, which --write writes).'
        )
    return f"Checkpointing is not needed: {without[0].setting.label} fits and is faster."


def _three_dimensions(s: Situation) -> str:
    if s.row.plan.parameter_numel < LARGE_MODEL or s.row.cluster.nodes < MANY_NODES:
        return ""
    return (
        "At this size on this many nodes compare with ZeRO-1 beside tensor and pipeline parallelism, and with sharding "
        "inside the node (HSDP, hpZ): --scale predicts them, --meshes all layouts of this cluster."
    )


def _positions(s: Situation) -> str:
    if s.positions is None or s.length <= s.positions:
        return ""
    return f"Sequences of {s.length} tokens are longer than the {s.positions} of the model's config."


def _tight(s: Situation) -> str:
    row = s.row
    if not row.fits or row.total < SAFE_SHARE * row.cluster.gpu.memory:
        return ""
    return f"Only {human_bytes(row.cluster.gpu.memory - row.total)} stay free: fragmentation may still end the run."


def _unused(s: Situation) -> str:
    row = s.row
    if row.total > 0.5 * row.cluster.gpu.memory or row.tokens * row.micro_batches <= 0 or not row.fits:
        return ""
    return f"Only {row.total / row.cluster.gpu.memory:.0%} of the memory is used: try a larger micro-batch."


RULES: tuple[Callable[[Situation], str], ...] = (
    _no_bf16,
    _single,
    _tight,
    _waiting,
    _small_batch,
    _offload,
    _checkpointing,
    _three_dimensions,
    _positions,
    _unused,
)


def impossible_rate(
    parameters: float, tokens_per_second: float, peak_flops: float, *, recompute: bool = True
) -> str | None:
    """Why a published rate per GPU is impossible: training needs 6 flops per parameter and token, 8 with recomputation.

    Returns:
        The reason; None for a rate that the peak allows.
    """
    per_token = (8 if recompute else 6) * parameters
    limit = peak_flops / per_token
    if tokens_per_second <= limit:
        return None
    return (
        f"{tokens_per_second:,.0f} tokens/s need {tokens_per_second * per_token / 1e12:,.0f} TFLOP/s; the card's dense "
        f"peak is {peak_flops / 1e12:,.0f}, which allows {limit:,.0f}"
    )


def impossible_memory(state: float, published: float) -> str | None:
    """Why a published memory figure is impossible: the state alone takes more. None if not; bytes of one rank."""
    if state <= published:
        return None
    return f"the state alone takes {human_bytes(int(state))}, without activations"
