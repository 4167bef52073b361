"""The engine of a PipelineModule, with what libraries ask of an engine."""

from __future__ import annotations

from deepspeed._exports import lazy
from deepspeed.runtime.engine import DeepSpeedEngine
from zeroshard.pipeline.engine import PipelineCalls
from zeroshard.pipeline.vertical_engine import VerticalCalls

__getattr__, __dir__ = lazy(__name__, {})


class PipelineEngine(PipelineCalls, DeepSpeedEngine):
    """Trains a pipeline: `train_batch` and `eval_batch` in place of forward, backward and step."""


class VerticalEngine(VerticalCalls, DeepSpeedEngine):
    """Trains a model of transformers in the vertical schedule: `train_batch` in place of backward and step."""
