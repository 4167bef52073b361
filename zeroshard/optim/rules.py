"""Element-wise update rules on flat pieces of parameters, operation by operation as torch.optim computes them.

A rule sees one contiguous run of float32 parameters with its gradients and state; it knows nothing of sharding. The
operations and their order are those of torch's single-tensor implementations, so results are equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.errors import PlanError, UsageError

Update = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], Mapping[str, Any], int], None]
"""(parameters, gradients, state, hyper-parameters, step counted from 1); gradients may be overwritten."""


@dataclass(frozen=True)
class Rule:
    """An element-wise optimizer.

    Attributes:
        name: as configs name it.
        state: names of its state tensors, one value per parameter element each.
        defaults: hyper-parameters and their defaults, as in torch.optim.
        check: raises PlanError for hyper-parameters without meaning.
    """

    name: str
    state: tuple[str, ...]
    defaults: Mapping[str, Any]
    update: Update
    check: Callable[[Mapping[str, Any]], None]


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


def _check_adam(hyper: Mapping[str, Any]) -> None:
    _check_common(hyper)
    betas = hyper["betas"]
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise PlanError(f"optimizer betas {betas!r}: two numbers in [0, 1) are needed")
    if not hyper["eps"] >= 0.0:
        raise PlanError(f"optimizer eps {hyper['eps']!r} must not be negative")


def _check_sgd(hyper: Mapping[str, Any]) -> None:
    _check_common(hyper)
    if not hyper["momentum"] >= 0.0:
        raise PlanError(f"optimizer momentum {hyper['momentum']!r} must not be negative")
    if hyper["nesterov"] and (hyper["momentum"] <= 0 or hyper["dampening"] != 0):
        raise PlanError("optimizer nesterov needs a momentum above 0 and dampening 0")


def _check_common(hyper: Mapping[str, Any]) -> None:
    if not float(hyper["lr"]) >= 0.0:
        raise PlanError(f"optimizer lr {hyper['lr']!r} must not be negative")
    if not hyper["weight_decay"] >= 0.0:
        raise PlanError(f"optimizer weight_decay {hyper['weight_decay']!r} must not be negative")


_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True}
ADAMW = Rule("AdamW", ("exp_avg", "exp_avg_sq"), {**_ADAM, "weight_decay": 1e-2, "decoupled": True}, _adam, _check_adam)
ADAM = Rule("Adam", ("exp_avg", "exp_avg_sq"), {**_ADAM, "weight_decay": 0.0, "decoupled": False}, _adam, _check_adam)
_SGD = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
SGD = Rule("SGD", ("momentum_buffer",), _SGD, _sgd, _check_sgd)
PLAIN_SGD = Rule("SGD", (), _SGD, _sgd, _check_sgd)
"""SGD whose groups all have momentum 0: no state."""
