"""Memory estimates for stage 2, answered from zeroshard's plans."""

from __future__ import annotations

from deepspeed._exports import lazy

_HOME = "zeroshard.planner.predict.estimates"

__getattr__, __dir__ = lazy(
    __name__,
    {
        "estimate_zero2_model_states_mem_needs_all_live": f"{_HOME}:estimate_zero2_model_states_mem_needs_all_live",
        "estimate_zero2_model_states_mem_needs_all_cold": f"{_HOME}:estimate_zero2_model_states_mem_needs_all_cold",
        "DeepSpeedZeroOptimizer": "deepspeed.runtime.base_optimizer:DeepSpeedOptimizer",
    },
)
