"""What the server of ranks imports once, so that a rank finds it in memory; see distributed.py.

`zeroshard` imports a name when it is first used, which suits a command line; without this module each rank would spend
most of its time on the same imports. Naming the modules one by one was rejected: the list would soon lack new ones.
"""

from __future__ import annotations

import gc
from importlib import import_module

import torch._dynamo
import torch.distributed.pipelining
import torch.distributed.tensor.parallel  # noqa: F401

import zeroshard

for _name in zeroshard.__all__:
    getattr(zeroshard, _name)
_MODULES = ("distributed", "models", "training", "references", "zoo", "offload", "onebit", "saved", "measure")
for _module in (*_MODULES, "parallel_model", "pipeline_model"):
    import_module(f"tests.support.{_module}")

# What is shared with the server stays shared: a collection would otherwise visit, and so copy, all that was imported.
gc.collect()
gc.freeze()
