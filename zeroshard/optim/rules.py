"""Element-wise update rules on flat pieces of parameters, operation by operation as torch.optim computes them.

A rule gets one contiguous run of float32 or float64 parameters with gradients and state; it does not depend on how
these are sharded. The operations and their order are those of torch's single-tensor implementations, so results are
equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from zeroshard.errors import PlanError, UsageError

Update = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], Mapping[str, Any], int], None]
"""(parameters, gradients, state, hyper-parameters, step counted from 1): updates parameters and state, all (n,), in
place; gradients may be overwritten."""


@dataclass(frozen=True)
class Rule:
    """An element-wise optimizer.

    Attributes:
        name: its name in configs.
        state: names of its state tensors, each with one value per parameter element.
        defaults: hyper-parameters and their defaults, as in torch.optim.
        check: raises PlanError for hyper-parameters out of range.
        initial: the hyper-parameter with whose value the state starts; None starts with 0.
    """

    name: str
    state: tuple[str, ...]
    defaults: Mapping[str, Any]
    update: Update
    check: Callable[[Mapping[str, Any]], None]
    initial: str | None = None


def _adam(
    param: torch.Tensor, grad: torch.Tensor, state: Sequence[torch.Tensor], hyper: Mapping[str, Any], step: int
) -> None:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980, algorithm 1) with coupled or decoupled decay (arXiv:1711.05101)."""
    first, second = state
    beta1, beta2 = hyper["betas"]
    lr, decay = float(hyper["lr"]), hyper["weight_decay"]
    if decay and hyper["decoupled"]:
        param.mul_(1 - lr * decay)
    elif decay:
        grad = grad.add_(param, alpha=decay)
    first.lerp_(grad, 1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if hyper["bias_correction"] else (1.0, 1.0)
    denominator = (second.sqrt() / math.sqrt(correction2)).add_(hyper["eps"])
    param.addcdiv_(first, denominator, value=-(lr / correction1))


def _sgd(
    param: torch.Tensor, grad: torch.Tensor, state: Sequence[torch.Tensor], hyper: Mapping[str, Any], step: int
) -> None:
    """Stochastic gradient descent with momentum as torch.optim.SGD defines it (the first step takes the gradient)."""
    if hyper["weight_decay"]:
        grad = grad.add_(param, alpha=hyper["weight_decay"])
    momentum = hyper["momentum"]
    if momentum and not state:
        raise UsageError("SGD momentum was 0 in all groups when the model was sharded, so there is no momentum buffer")
    if momentum:
        buffer = state[0]
        if step == 1:
            buffer.copy_(grad)
        else:
            buffer.mul_(momentum).add_(grad, alpha=1 - hyper["dampening"])
        grad = grad.add_(buffer, alpha=momentum) if hyper["nesterov"] else buffer
    param.add_(grad, alpha=-float(hyper["lr"]))


def _adagrad(
    param: torch.Tensor, grad: torch.Tensor, state: Sequence[torch.Tensor], hyper: Mapping[str, Any], step: int
) -> None:
    """Adagrad (Duchi, Hazan and Singer 2011, section 1) with torch.optim.Adagrad's decay of the rate."""
    if hyper["weight_decay"]:
        grad = grad.add_(param, alpha=hyper["weight_decay"])
    rate = float(hyper["lr"]) / (1 + (step - 1) * hyper["lr_decay"])
    total = state[0]
    total.addcmul_(grad, grad, value=1)
    param.addcdiv_(grad, total.sqrt().add_(hyper["eps"]), value=-rate)


def _lion(
    param: torch.Tensor, grad: torch.Tensor, state: Sequence[torch.Tensor], hyper: Mapping[str, Any], step: int
) -> None:
    """Lion (Chen et al. 2023, arXiv:2302.06675, program 1): the update is the sign of an average of gradients."""
    average = state[0]
    beta1, beta2 = hyper["betas"]
    lr = float(hyper["lr"])
    if hyper["weight_decay"]:
        param.mul_(1 - lr * hyper["weight_decay"])
    param.add_(average.mul(beta1).add_(grad, alpha=1 - beta1).sign_(), alpha=-lr)
    average.mul_(beta2).add_(grad, alpha=1 - beta2)


def rmsprop_rule(*, momentum: bool, centered: bool) -> Rule:
    """RMSprop (Tieleman and Hinton 2012; centered: Graves 2013, arXiv:1308.0850, section 2) as torch.optim has it.

    Args:
        momentum, centered: whether any group uses it; if none does, its state tensor does not exist.
    """
    names = ("square_avg", *(("momentum_buffer",) if momentum else ()), *(("grad_avg",) if centered else ()))

    def update(
        param: torch.Tensor, grad: torch.Tensor, state: Sequence[torch.Tensor], hyper: Mapping[str, Any], step: int
    ) -> None:
        by_name = dict(zip(names, state, strict=True))
        _rmsprop(param, grad, by_name, hyper)

    return Rule("RMSprop", names, _RMSPROP, update, _check_rmsprop)


def _rmsprop(
    param: torch.Tensor, grad: torch.Tensor, state: Mapping[str, torch.Tensor], hyper: Mapping[str, Any]
) -> None:
    missing = [key for key, name in _RMSPROP_STATE.items() if hyper[key] and name not in state]
    if missing:
        raise UsageError(
            f"RMSprop {missing[0]} was off in all groups when the model was sharded, so it has no state; set it before"
        )
    if hyper["weight_decay"]:
        grad = grad.add_(param, alpha=hyper["weight_decay"])
    squares, alpha, lr = state["square_avg"], hyper["alpha"], float(hyper["lr"])
    squares.mul_(alpha).addcmul_(grad, grad, value=1 - alpha)
    if hyper["centered"]:
        mean = state["grad_avg"]
        mean.lerp_(grad, 1 - alpha)
        root = squares.addcmul(mean, mean, value=-1).sqrt_()
    else:
        root = squares.sqrt()
    root.add_(hyper["eps"])
    if hyper["momentum"] > 0:
        buffer = state["momentum_buffer"]
        buffer.mul_(hyper["momentum"]).addcdiv_(grad, root)
        param.add_(buffer, alpha=-lr)
    else:
        param.addcdiv_(grad, root, value=-lr)


def _check_adam(hyper: Mapping[str, Any]) -> None:
    check_common(hyper)
    check_betas(hyper)
    _not_negative(hyper, "eps")


def _check_adagrad(hyper: Mapping[str, Any]) -> None:
    check_common(hyper)
    _not_negative(hyper, "lr_decay", "initial_accumulator_value", "eps")


def _check_lion(hyper: Mapping[str, Any]) -> None:
    check_common(hyper)
    check_betas(hyper)


def _check_rmsprop(hyper: Mapping[str, Any]) -> None:
    check_common(hyper)
    _not_negative(hyper, "momentum", "alpha", "eps")


def _check_sgd(hyper: Mapping[str, Any]) -> None:
    check_common(hyper)
    _not_negative(hyper, "momentum")
    if hyper["nesterov"] and (hyper["momentum"] <= 0 or hyper["dampening"] != 0):
        raise PlanError("optimizer nesterov needs a momentum above 0 and dampening 0")


def check_common(hyper: Mapping[str, Any]) -> None:
    """Raises PlanError for a negative rate or decay."""
    _not_negative(hyper, "lr", "weight_decay")


def check_betas(hyper: Mapping[str, Any]) -> None:
    """Raises PlanError where `betas` are not two numbers in [0, 1)."""
    betas = hyper["betas"]
    if not _are_two_numbers(betas) or not all(0.0 <= beta < 1.0 for beta in betas):
        raise PlanError(f"optimizer betas {betas!r}: two numbers in [0, 1) are needed")


def _are_two_numbers(betas: object) -> bool:
    return isinstance(betas, (tuple, list)) and len(betas) == 2 and all(map(_is_number, betas))


def _is_number(value: object) -> bool:
    """Whether a value is a number, or a tensor with one element, which torch accepts as a rate, too."""
    return isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _not_negative(hyper: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if not _is_number(hyper[name]):
            raise PlanError(f"optimizer {name} {hyper[name]!r} must be a number")
        if not float(hyper[name]) >= 0.0:
            raise PlanError(f"optimizer {name} {hyper[name]!r} must not be negative")


_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True}
ADAMW = Rule("AdamW", ("exp_avg", "exp_avg_sq"), {**_ADAM, "weight_decay": 1e-2, "decoupled": True}, _adam, _check_adam)
ADAM = Rule("Adam", ("exp_avg", "exp_avg_sq"), {**_ADAM, "weight_decay": 0.0, "decoupled": False}, _adam, _check_adam)
_SGD = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
SGD = Rule("SGD", ("momentum_buffer",), _SGD, _sgd, _check_sgd)
PLAIN_SGD = Rule("SGD", (), _SGD, _sgd, _check_sgd)
"""SGD whose groups all have momentum 0: no state."""
_ADAGRAD = {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}
ADAGRAD = Rule("Adagrad", ("sum",), _ADAGRAD, _adagrad, _check_adagrad, initial="initial_accumulator_value")
_LION = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0}
LION = Rule("Lion", ("exp_avg",), _LION, _lion, _check_lion)
_RMSPROP = {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False}
_RMSPROP_STATE = {"momentum": "momentum_buffer", "centered": "grad_avg"}
