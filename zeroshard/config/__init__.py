"""DeepSpeed JSON in, a frozen resolved `Config` out."""

from zeroshard.config.resolve import activation_section, load_config
from zeroshard.config.resolved import (
    ActivationConfig,
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
    "ActivationConfig",
    "BatchConfig",
    "Config",
    "LeafModules",
    "LossScaleConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "ReductionConfig",
    "SchedulerConfig",
    "ZeroConfig",
    "activation_section",
    "load_config",
]
