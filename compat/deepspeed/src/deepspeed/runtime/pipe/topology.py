"""Ranks as named axes, and a rank's place among them."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(
    __name__,
    {
        "PipeDataParallelTopology": "zeroshard.pipeline.topology:PipeDataParallelTopology",
        "PipeModelDataParallelTopology": "zeroshard.pipeline.topology:PipeModelDataParallelTopology",
        "PipelineParallelGrid": "zeroshard.pipeline.topology:PipelineParallelGrid",
        "ProcessTopology": "zeroshard.pipeline.topology:ProcessTopology",
    },
)
