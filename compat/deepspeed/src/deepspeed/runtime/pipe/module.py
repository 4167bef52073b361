"""Models as lists of layers, of which each rank builds those of its stage."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(
    __name__,
    {
        "LayerSpec": "zeroshard.pipeline.layers:LayerSpec",
        "PipelineModule": "zeroshard.pipeline.module:PipelineModule",
        "TiedLayerSpec": "zeroshard.pipeline.layers:TiedLayerSpec",
    },
)
