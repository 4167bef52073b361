"""Optimizers of bitsandbytes as sharded ones, recognized by their class names; the package itself is not imported.

    Adam, AdamW, Adam32bit, AdamW32bit, and Paged...      AdamW in float32: both decouple the decay there
    Adam8bit, AdamW8bit, and Paged...                     AdamW8bit (low_bit): codes by torchao, in blocks of 256
    Lion, Lion32bit, PagedLion, PagedLion32bit            Lion

bitsandbytes itself would see slices, not parameters, and its blocks would depend on the number of ranks; here blocks
depend on the parameter alone. Its paged optimizers move state to the host when device memory is full; here the plan
says where state rests. Rejected: to run them on slices, as other optimizers may: a slice of fewer than 4,096 elements
would get other states than its parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zeroshard.errors import PlanError
from zeroshard.optim.adam.low_bit import low_bit_source
from zeroshard.optim.rules import ADAMW, LION
from zeroshard.optim.sources import Source, rule_source
from zeroshard.plan.placement import MIN_BLOCKED_NUMEL

PACKAGE = "bitsandbytes."
_RULES = {"Adam": ADAMW, "AdamW": ADAMW, "Lion": LION}


def bitsandbytes_source(optimizer: torch.optim.Optimizer) -> Source:
    """A source that computes, on sharded state, what an optimizer of bitsandbytes computes.

    Raises:
        PlanError: there is no sharded form of the optimizer, its options or its bits; or torchao is missing.
    """
    name = type(optimizer).__name__
    family = name.removeprefix("Paged").removesuffix("8bit").removesuffix("32bit")
    rule, options = _RULES.get(family), vars(vars(optimizer)["args"])
    bits = options["optim_bits"]
    if rule is None or (bits, family) == (8, "Lion"):
        raise PlanError(
            f"optimizer {name} of bitsandbytes has no sharded form here; use its AdamW8bit, AdamW or Lion, or one of "
            "zeroshard"
        )
    if options["max_unorm"] or options["skip_zeros"] or options["min_8bit_size"] != MIN_BLOCKED_NUMEL:
        raise PlanError(
            f"{name}: max_unorm, skip_zeros and a min_8bit_size other than {MIN_BLOCKED_NUMEL} have no sharded form; "
            "leave them out, and clip with gradient_clipping"
        )
    _check_exceptions(name, optimizer)
    if bits == 8:
        return low_bit_source("AdamW8bit", optimizer.param_groups, {}, None, optimizer)
    return rule_source(rule, (), {}, optimizer)


def _check_exceptions(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Raises PlanError for hyper-parameters of single tensors, which would be ignored; bits only change memory."""
    for number, exception in _exceptions(optimizer):
        lost = sorted(exception.keys() - {"optim_bits"})
        if lost:
            raise PlanError(
                f"{name}: GlobalOptimManager gives a parameter of group {number} its own {', '.join(lost)}, which has "
                "no sharded form; give that parameter a parameter group of its own"
            )


def _exceptions(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Settings of single parameters in bitsandbytes' manager, registered by tensor or by module, with their group."""
    manager = vars(optimizer)["mng"]
    by_module = [(getattr(module, key), config) for module, key, config in manager.module_weight_config_triple]
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) in manager.pid2config:
                yield number, manager.pid2config[id(parameter)]
            yield from ((number, config) for owner, config in by_module if owner is parameter)
