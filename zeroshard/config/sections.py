"""Parts of a resolved config that follow from single sections."""

from __future__ import annotations

from zeroshard.config.models import ObeyedSections
from zeroshard.config.resolved import ActivationConfig, LossScaleConfig


def activations(sections: ObeyedSections) -> ActivationConfig:
    """What is checkpointed, and how."""
    asked = sections.activation_checkpointing
    return ActivationConfig(
        asked.policy,
        asked.number_checkpoints,
        asked.cpu_checkpointing,
        asked.synchronize_checkpoint_boundary,
        asked.profile,
    )


def loss_scale(sections: ObeyedSections) -> LossScaleConfig | None:
    """How the loss is scaled; None where nothing computes in float16."""
    fp16 = sections.fp16
    autocast = sections.torch_autocast
    if not fp16.enabled and not (autocast.enabled and autocast.dtype == "fp16"):
        return None
    dynamic = fp16.loss_scale == 0
    return LossScaleConfig(
        dynamic=dynamic,
        initial=float(2**fp16.initial_scale_power) if dynamic else fp16.loss_scale,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )
