"""DeepSpeed JSON in, a frozen resolved `Config` out."""

from zeroshard.config.resolve import load_config
from zeroshard.config.resolved import (
    BatchConfig,
    Config,
    LossScaleConfig,
    OptimizerConfig,
    PrecisionConfig,
    ReductionConfig,
    SchedulerConfig,
    ZeroConfig,
)

__all__ = [
    "BatchConfig",
    "Config",
    "LossScaleConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "ReductionConfig",
    "SchedulerConfig",
    "ZeroConfig",
    "load_config",
]
