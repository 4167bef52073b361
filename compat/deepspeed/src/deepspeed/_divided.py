"""Models that transformers or accelerate divide over ranks, as far as `initialize` has to know.

accelerate keeps `ParallelismConfig(tp_size=...)` in its own state, and hands only the config of DeepSpeed on.

Trainer of transformers 5.24 gives a model that `from_pretrained` has divided (`tp_plan`, `DistributedConfig`) to
`Accelerator.prepare_model` instead of `prepare`, so `initialize` is never called, and its first backward fails with
"'NoneType' object has no attribute 'backward'". No hook of either library is reached with the model before that; the
one of torch that sees the forward of every module is, and there the reason is said instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from zeroshard.errors import PlanError, UsageError


def divided_at_load(model: nn.Module) -> bool:
    """Whether `from_pretrained` of transformers has divided the model, by itself or as the base of a PEFT model."""
    return bool(getattr(model, "is_distributed_loading_by_transformers", False))


def with_tensor_ranks(values: dict[str, Any], config: object) -> dict[str, Any]:
    """The config with accelerate's `tp_size` as its `autotp_size`.

    Args:
        values: a copy of `config` in the words of a user.
        config: as it was given; accelerate gives the one of its DeepSpeedPlugin, the same object.

    Raises:
        PlanError: the two sizes differ.
    """
    ranks = _tensor_ranks(config)
    section = values.get("tensor_parallel")
    section = dict(section) if isinstance(section, dict) else {}
    named = section.get("autotp_size")
    if ranks == 1:
        return values
    if isinstance(named, int) and named > 1 and named != ranks:
        raise PlanError(
            f"accelerate's ParallelismConfig has tp_size {ranks}, but tensor_parallel.autotp_size is {named}; "
            "change one of them"
        )
    return {**values, "tensor_parallel": {**section, "autotp_size": ranks}}


def begin_watch() -> Callable[[], None]:
    """From now on a model that Trainer trains without an engine is refused in its first forward.

    Returns:
        What ends this.
    """

    def look(module: nn.Module, arguments: Any) -> None:
        if torch.compiler.is_compiling():
            return  # the module around a compiled part has been seen
        if module.training and torch.is_grad_enabled() and divided_at_load(module) and _plugin() is not None:
            raise UsageError(_said_of(module))

    return register_module_forward_pre_hook(look).remove


def _said_of(model: nn.Module) -> str:
    ranks = getattr(model, "tp_size", None)
    instead = (
        f', and let zeroshard divide it: "tensor_parallel": {{"autotp_size": {ranks}}} in the config, or '
        f"TrainingArguments(parallelism_config=ParallelismConfig(tp_size={ranks}, ...))"
        if isinstance(ranks, int) and ranks > 1
        else ""
    )
    return (
        f"Trainer never hands a {type(model).__name__} that from_pretrained has divided (tp_plan, distributed_config) "
        f"to deepspeed.initialize, so nothing would train it: load it without that{instead}"
    )


def _tensor_ranks(config: object) -> int:
    """`tp_size` of the Accelerator whose plugin has this config; 1 for any other config."""
    plugin = _plugin()
    if plugin is None or plugin.deepspeed_config is not config:
        return 1
    axes = getattr(sys.modules["accelerate.state"].AcceleratorState(), "parallelism_config", None)
    return 1 if axes is None else int(axes.tp_size)


def _plugin() -> Any:
    """The DeepSpeedPlugin that accelerate runs with; None without an Accelerator, or with one without a plugin."""
    state = sys.modules.get("accelerate.state")
    return None if state is None or not state.is_initialized() else state.AcceleratorState().deepspeed_plugin
