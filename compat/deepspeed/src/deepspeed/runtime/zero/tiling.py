"""Linear layers in tiles."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(
    __name__,
    {
        "TiledLinear": "zeroshard:TiledLinear",
        "TiledLinearReturnBias": "zeroshard.sharding.tiled:TiledLinearReturnBias",
    },
)
