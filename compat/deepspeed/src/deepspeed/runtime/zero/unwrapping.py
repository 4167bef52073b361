"""Generation inside of training: the whole model, gathered once for all of its forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from deepspeed._exports import lazy
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import ParameterOffload
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

__getattr__, __dir__ = lazy(__name__, {})


@contextmanager
def unwrap_model_for_generation(model: DeepSpeedEngine) -> Iterator[nn.Module]:
    """The engine's model with all parameters there, whose forwards gather nothing; called by all ranks."""
    offload = getattr(model.optimizer, "parameter_offload", None)
    with GatheredParameters(model.module.parameters()):
        if isinstance(offload, ParameterOffload):
            offload.take_off()
        try:
            yield model.module
        finally:
            if isinstance(offload, ParameterOffload):
                offload._register_deepspeed_module(offload.module)
