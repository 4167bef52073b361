"""Pipelines; see deepspeed.pipe."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(
    __name__,
    {
        "LayerSpec": "zeroshard.pipeline.layers:LayerSpec",
        "PipelineModule": "zeroshard.pipeline.module:PipelineModule",
        "ProcessTopology": "zeroshard.pipeline.topology:ProcessTopology",
        "TiedLayerSpec": "zeroshard.pipeline.layers:TiedLayerSpec",
        "engine": "deepspeed.runtime.pipe.engine",
        "module": "deepspeed.runtime.pipe.module",
        "topology": "deepspeed.runtime.pipe.topology",
    },
)
