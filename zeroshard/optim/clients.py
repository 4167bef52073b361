"""Makes a source from the optimizer that the user built.

Optimizers of zeroshard give their source themselves. For some of torch's there is a rule that computes the same on flat
state. Any other optimizer is run on one slice per parameter, which needs an element-wise optimizer: each element's
update depends on that element alone. This is known of torch's; for others the user has to state it
(zero_allow_untested_optimizer), and a trial on a few numbers checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from zeroshard.arguments import need_kind
from zeroshard.errors import PlanError, UsageError
from zeroshard.optim.adam.low_bit import KINDS, low_bit_source
from zeroshard.optim.bitsandbytes import PACKAGE, bitsandbytes_source
from zeroshard.optim.muon.source import muon_source
from zeroshard.optim.own_optimizers import UnshardedOptimizer
from zeroshard.optim.rules import ADAGRAD, ADAM, ADAMW, PLAIN_SGD, SGD, Rule, rmsprop_rule
from zeroshard.optim.sources import Source, rule_source
from zeroshard.optim.trial import differs_on_slices, refuse_unlike
from zeroshard.optim.updates import TorchUpdate

ELEMENTWISE: Mapping[type[torch.optim.Optimizer], int] = {
    torch.optim.Adam: 2,
    torch.optim.AdamW: 2,
    torch.optim.SGD: 1,
    torch.optim.Adagrad: 1,
    torch.optim.Adadelta: 2,
    torch.optim.Adamax: 2,
    torch.optim.NAdam: 2,
    torch.optim.RAdam: 2,
    torch.optim.RMSprop: 1,
    torch.optim.Rprop: 2,
    torch.optim.ASGD: 1,
}
"""Torch optimizers whose update of an element depends on that element alone, and their state tensors per parameter."""

WHOLE: Mapping[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "its direction comes from products over all parameters",
    torch.optim.Adafactor: "it keeps sums over rows and columns of each matrix; use AdamW, or Lion for less state",
    torch.optim.SparseAdam: "it works on sparse gradients; use AdamW, and nn.Embedding with sparse=False",
}
"""Torch optimizers that can't run on slices of parameters, and why."""
Factory = Callable[[Iterable[Any]], torch.optim.Optimizer]


def client_source(
    client: torch.optim.Optimizer | Factory, parameters: Iterable[Any], *, allow_untested: bool
) -> Source:
    """A source from the user's optimizer, or from a callable that makes one from parameters or parameter groups.

    Raises:
        UsageError: it has stepped already, or the callable returned something else.
        PlanError: it can't run on shards, or is not known to; see `check_elementwise`.
    """
    made = isinstance(client, torch.optim.Optimizer)
    if not made and (isinstance(client, torch.nn.Module) or not callable(client)):
        needed = "a torch optimizer, or a callable from parameters to one,"
        need_kind(client, torch.optim.Optimizer, "optimizer", needed)
    built = client if made else client(parameters)
    if not isinstance(built, torch.optim.Optimizer):
        raise UsageError(
            f"the optimizer callable returned a {type(built).__name__}: it must return a torch.optim.Optimizer over "
            "the parameters that it is given"
        )
    if any(_stepped(state) for state in built.state.values()):
        raise UsageError(
            f"the {type(built).__name__} has stepped already and its state would be lost: shard before stepping"
        )
    if isinstance(built, UnshardedOptimizer):
        return built.source()
    return torch_source(built, allow_untested=allow_untested)


def torch_source(
    optimizer: torch.optim.Optimizer, *, allow_untested: bool, kind: type[torch.optim.Optimizer] | None = None
) -> Source:
    """A source from a torch optimizer; with a flat rule, if one computes the same.

    Args:
        kind: the class that it counts as, for an instance of a subclass that does not change steps.

    Raises:
        PlanError: it can't run on shards, or is not known to; see `check_elementwise`.
    """
    kind, groups = kind or type(optimizer), optimizer.param_groups
    rule = flat_rule(optimizer, kind)
    if rule is not None:
        return rule_source(rule, (), {}, optimizer)
    if isinstance(optimizer, torch.optim.Muon):
        for group in groups:
            group["use_muon"] = True
        return muon_source(groups, kind.__name__, optimizer)
    if kind.__module__.startswith("torchao."):
        return _torchao_source(optimizer)
    if kind.__module__.startswith(PACKAGE):
        return bitsandbytes_source(optimizer)
    moments = check_elementwise(optimizer, kind, allow_untested=allow_untested)
    defaults = optimizer.defaults
    return Source(
        kind.__name__,
        groups,
        defaults,
        moments,
        lambda context: TorchUpdate(kind, defaults, context.regions, groups),
        float64_exact=True,
        client=optimizer,
    )


def _torchao_source(optimizer: torch.optim.Optimizer) -> Source:
    """A source for one of torchao's optimizers. Raises PlanError for what has no sharded form."""
    name, options = type(optimizer).__name__, vars(optimizer)
    if name not in KINDS:
        raise PlanError(
            f"optimizer {name} of torchao has no sharded form here; use {', '.join(KINDS)}, of torchao or of zeroshard"
        )
    if options["bf16_stochastic_round"]:
        raise PlanError(
            f"{name}(bf16_stochastic_round=True): stochastic rounding replaces master weights, which a sharded model "
            "in bfloat16 has; leave it out"
        )
    return low_bit_source(name, optimizer.param_groups, {}, int(options["block_size"]), optimizer)


def _stepped(state: Mapping[str, Any]) -> bool:
    """Whether a step has made a parameter's state; Adagrad's constructor makes one with step 0."""
    return bool(state) and float(state.get("step", 1)) > 0


def flat_rule(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer] | None = None) -> Rule | None:
    """The rule that computes the same as a torch optimizer; None if there is none. `kind` as in `torch_source`."""
    groups, kind = optimizer.param_groups, kind or type(optimizer)
    if any("lr" not in group for group in groups):
        return None
    if any(group.get("maximize") or group.get("differentiable") or group.get("amsgrad") for group in groups):
        return None
    if any(_holds_tensors(group) for group in groups):
        return None
    if kind is torch.optim.AdamW:
        return ADAMW
    if kind is torch.optim.Adam:
        return ADAMW if all(group.get("decoupled_weight_decay") for group in groups) else ADAM
    if kind is torch.optim.SGD:
        return SGD if any(group["momentum"] for group in groups) else PLAIN_SGD
    if kind is torch.optim.Adagrad:
        return ADAGRAD
    if kind is torch.optim.RMSprop:
        return rmsprop_rule(
            momentum=any(group["momentum"] > 0 for group in groups), centered=any(group["centered"] for group in groups)
        )
    return None


def _holds_tensors(group: Mapping[str, Any]) -> bool:
    """Whether a hyper-parameter is a tensor; torch then computes in that tensor's precision."""
    values = [value for key, value in group.items() if key != "params"]
    flat = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    return any(isinstance(item, torch.Tensor) for item in flat)


def check_elementwise(
    optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer] | None = None, *, allow_untested: bool
) -> int:
    """State tensors per parameter of a torch optimizer that may run on slices of parameters.

    Raises:
        PlanError: the optimizer is not element-wise, or not known to be and `allow_untested` is False.
    """
    kind = kind or type(optimizer)
    known = ELEMENTWISE.get(kind)
    if known is not None:
        return known + (1 if any(group.get("amsgrad") for group in optimizer.param_groups) else 0)
    for base, reason in WHOLE.items():
        if isinstance(optimizer, base):
            raise PlanError(f"optimizer {kind.__name__} can't run on sharded state: {reason}")
    if not allow_untested:
        names = ", ".join(sorted(known.__name__ for known in ELEMENTWISE))
        raise PlanError(
            f"optimizer {kind.__name__} is not known to be element-wise, so it can't run on sharded state. "
            f"Known: {names}. If each element's update depends on that element alone, allow it with "
            "zero_allow_untested_optimizer (config) or allow_untested=True (shard)"
        )
    refuse_unlike(optimizer)
    if differs_on_slices(optimizer):
        raise PlanError(
            f"optimizer {kind.__name__} was allowed as untested, but a trial on a few numbers gave other values for a "
            "matrix than for the same numbers in two slices: its update of an element depends on other elements, and "
            "on sharded state it would compute something else than unsharded. Use plain torch without zeroshard, or an "
            "optimizer of zeroshard that works on whole parameters (Lamb, MuonAdamW, Dion)"
        )
    return 2
