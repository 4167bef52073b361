"""Makes a source from the optimizer that a DeepSpeed config names, with parameters that zeroshard.config resolved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from zeroshard.optim.adam.low_bit import KINDS, low_bit_source
from zeroshard.optim.dion.source import DION, dion_source
from zeroshard.optim.lamb import lamb_source
from zeroshard.optim.matrix_groups import split_groups
from zeroshard.optim.muon.source import MUON, muon_source
from zeroshard.optim.onebit.source import onebit_source, zero_one_source
from zeroshard.optim.onebit.zero_one import Policy
from zeroshard.optim.rules import ADAGRAD, ADAM, ADAMW, LION, PLAIN_SGD, SGD, Rule, rmsprop_rule
from zeroshard.optim.sources import Source, as_groups, rule_source

_ONE_BIT_INERT = ("bias_correction", "max_grad_norm", "amsgrad", "cuda_aware", "comm_backend_name")
_POLICY = tuple(field.name for field in fields(Policy))


def configured_source(
    kind: str, params: Mapping[str, Any], parameters: Sequence[Any], names: Mapping[int, str]
) -> Source:
    """The source for a config's optimizer.

    Args:
        kind: the resolved type.
        params: every parameter of that type.
        parameters: parameters or parameter groups to train.
        names: the model's parameter names by id.

    Raises:
        PlanError: there is nothing to train, or a hyper-parameter of a group is out of range.
    """
    if kind == "Lamb":
        return lamb_source(as_groups(parameters), _without(params, "max_grad_norm", "amsgrad"))
    if kind in ("OneBitAdam", "OneBitLamb"):
        hyper = _without(params, "freeze_step", *_ONE_BIT_INERT)
        return onebit_source(kind, as_groups(parameters), hyper, params["freeze_step"])
    if kind == "ZeroOneAdam":
        policy = Policy(**{name: params[name] for name in _POLICY})
        return zero_one_source(as_groups(parameters), _without(params, *_POLICY, *_ONE_BIT_INERT), policy)
    if kind in KINDS:
        return low_bit_source(
            kind, as_groups(parameters), _without(params, "block_size", "amsgrad"), params["block_size"]
        )
    if kind == "Muon":
        return _muon(params, parameters, names)
    if kind == "Dion":
        matrix = {key: params[key] for key in DION.defaults}
        other = {key: params[key] for key in ("betas", "eps", "weight_decay")} | {"lr": params["adam_lr"]}
        return dion_source(split_groups(DION, as_groups(parameters), names, matrix, other))
    return rule_source(_rule(kind, params), parameters, _without(params, "adam_w_mode", "torch_adam", "amsgrad"))


def _rule(kind: str, params: Mapping[str, Any]) -> Rule:
    """The element-wise rule of a type; DeepSpeed's Adam decouples the decay unless adam_w_mode is false."""
    if kind in ("Adam", "AdamW"):
        return ADAMW if params.get("adam_w_mode", True) else ADAM
    if kind == "SGD":
        return SGD if params["momentum"] else PLAIN_SGD
    if kind == "RMSprop":
        return rmsprop_rule(momentum=params["momentum"] > 0, centered=params["centered"])
    return {"Adagrad": ADAGRAD, "Lion": LION}[kind]


def _muon(params: Mapping[str, Any], parameters: Sequence[Any], names: Mapping[int, str]) -> Source:
    """Muon; `muon_lr` and `adam_lr` have precedence over `lr`, and without any each kind has its default rate."""
    matrix = {key: params[key] for key in ("momentum", "weight_decay", "ns_method")}
    other = {key: params[key] for key in ("betas", "eps", "weight_decay")}
    for options, own in ((matrix, "muon_lr"), (other, "adam_lr")):
        rate = params[own] if params[own] is not None else params["lr"]
        if rate is not None:
            options["lr"] = rate
    return muon_source(split_groups(MUON, as_groups(parameters), names, matrix, other), "Muon")


def _without(params: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key not in names}
