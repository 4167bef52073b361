"""Models as lists of layers, for pipelines; the topology of ranks is in deepspeed.runtime.pipe.topology."""

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
