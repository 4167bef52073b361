"""Every metric that is exported, in one table: rules, dashboard and tests are held to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]
COMMON = ("run", "rank")
"""Labels of every metric: which run of this node, and which of its ranks."""


@dataclass(frozen=True)
class Metric:
    """One metric; labels beside the common ones."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


METRICS = (
    Metric("zeroshard_info", "gauge", "1, with the version of torch and the number of ranks.", ("torch", "ranks")),
    Metric("zeroshard_last_step_timestamp_seconds", "gauge", "When the last step of the rank was complete."),
    Metric("zeroshard_steps_total", "counter", "Optimizer steps since the run began, as the engine counts them."),
    Metric("zeroshard_skipped_steps_total", "counter", "Steps that were not applied, for inf or NaN in gradients."),
    Metric("zeroshard_samples_total", "counter", "Samples of all ranks."),
    Metric("zeroshard_tokens_total", "counter", "Tokens of this rank since the process began."),
    Metric("zeroshard_loss", "gauge", "Mean loss of the rank's micro-batches in the last step."),
    Metric("zeroshard_gradient_norm", "gauge", "Global norm of the last step's gradients before clipping."),
    Metric("zeroshard_loss_scale", "gauge", "Loss scale of the last step, in fp16."),
    Metric("zeroshard_learning_rate", "gauge", "Rate of the first parameter group in the last step."),
    Metric("zeroshard_samples_per_second", "gauge", "Of all ranks, in the last step."),
    Metric("zeroshard_tokens_per_second", "gauge", "Of this rank, in the last step."),
    Metric("zeroshard_model_flops_per_second", "gauge", "Of this rank, once flops_profiler has counted a step."),
    Metric("zeroshard_mfu_ratio", "gauge", "FLOPs of the model per second over the peak of the GPU."),
    Metric("zeroshard_step_seconds", "histogram", "Seconds of a step, from the end of the one before."),
    Metric("zeroshard_part_seconds", "histogram", "Seconds of forward, backward and step.", ("part",)),
    Metric("zeroshard_wait_seconds_total", "counter", "Seconds that the host waited.", ("part", "what")),
    Metric("zeroshard_sent_bytes_total", "counter", "Payload of collectives.", ("collective", "axes")),
    Metric("zeroshard_sent_calls_total", "counter", "Collectives.", ("collective", "axes")),
    Metric("zeroshard_link_bytes_total", "counter", "Between device and host memory, as planned.", ("direction",)),
    Metric("zeroshard_memory_bytes", "gauge", "Memory in use: of the device, the process, the host.", ("kind",)),
    Metric("zeroshard_planned_memory_bytes", "gauge", "What the plan put into memory, by kind of state.", ("kind",)),
    Metric("zeroshard_checkpoint_seconds", "gauge", "Seconds that the last checkpoint kept training.", ("action",)),
    Metric("zeroshard_checkpoint_timestamp_seconds", "gauge", "When the last checkpoint was saved."),
)
BY_NAME = {metric.name: metric for metric in METRICS}


def series_names() -> set[str]:
    """The names of all series that Prometheus sees."""
    found: set[str] = set()
    for metric in METRICS:
        parts = ("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",)
        found |= {metric.name + part for part in parts}
    return found
