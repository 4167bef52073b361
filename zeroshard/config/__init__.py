"""DeepSpeed JSON in, a frozen resolved `Config` out."""

from zeroshard.config.resolve import load_config
from zeroshard.config.resolved import (
    BatchConfig,
    Config,
    LeafModules,
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
    "LeafModules",
    "LossScaleConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "ReductionConfig",
    "SchedulerConfig",
    "ZeroConfig",
    "load_config",
]
