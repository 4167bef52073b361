"""The class of the optimizer that `initialize` returns, for isinstance."""

from __future__ import annotations

from deepspeed._exports import lazy
from zeroshard.optim.optimizer import ShardedOptimizer

DeepSpeedOptimizer = ShardedOptimizer
ZeROOptimizer = ShardedOptimizer

__getattr__, __dir__ = lazy(__name__, {})
