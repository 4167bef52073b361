"""The scalar arguments of a host kernel: a few numbers per step, each rounded to float32 once.

They are the numbers in the table of `kernels.adam` on a GPU, so that both compute the same. Rejected: to pass the
hyper-parameters themselves, which would leave rounding and bias correction to each kernel.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from zeroshard.optim.rules import ADAGRAD, ADAM, ADAMW, LION, Rule


@dataclass(frozen=True)
class Scalars:
    """The numbers of one step of a rule, its fields in the order of `csrc/job.hpp`.

    Attributes:
        state: names of the rule's state tensors.
        coefficient: factor of the gradient, which unscales, averages and clips it.
        decay: if decoupled 1 - lr * weight_decay, a factor of the parameter; else weight_decay itself.
    """

    state: ClassVar[tuple[str, ...]]
    coefficient: float
    decay: float

    @property
    def values(self) -> tuple[float, ...]:
        """All fields in their order."""
        return tuple(vars(self).values())


@dataclass(frozen=True)
class AdamScalars(Scalars):
    """One step of Adam or AdamW.

    Attributes:
        step_size: lr / (1 - beta1 ** step).
        correction: 1 / sqrt(1 - beta2 ** step), a factor of the root of the second moment.
    """

    state = ("exp_avg", "exp_avg_sq")
    step_size: float
    correction: float
    eps: float
    one_beta1: float
    beta2: float
    one_beta2: float
    decoupled: bool


@dataclass(frozen=True)
class LionScalars(Scalars):
    """One step of Lion, whose decay is decoupled."""

    state = ("exp_avg",)
    lr: float
    beta1: float
    one_beta1: float
    beta2: float
    one_beta2: float


@dataclass(frozen=True)
class AdagradScalars(Scalars):
    """One step of Adagrad; `rate` is lr / (1 + (step - 1) * lr_decay), and the decay is coupled."""

    state = ("sum",)
    rate: float
    eps: float


def adam_scalars(hyper: Mapping[str, Any], step: int, coefficient: float = 1.0) -> AdamScalars:
    """Adam's numbers for update `step`, counted from 1, from hyper-parameters by the names of `rules.ADAM`."""
    (beta1, beta2), lr, decay = hyper["betas"], float(hyper["lr"]), float(hyper["weight_decay"])
    decoupled = bool(hyper["decoupled"])
    step_size, correction = lr, 1.0
    if hyper["bias_correction"]:
        step_size, correction = lr / (1.0 - beta1**step), 1.0 / math.sqrt(1.0 - beta2**step)
    return AdamScalars(
        single(coefficient),
        single(1.0 - lr * decay if decoupled else decay),
        single(step_size),
        single(correction),
        single(hyper["eps"]),
        single(1.0 - beta1),
        single(beta2),
        single(1.0 - beta2),
        decoupled,
    )


def lion_scalars(hyper: Mapping[str, Any], _step: int, coefficient: float = 1.0) -> LionScalars:
    """Lion's numbers, which don't depend on the step, from hyper-parameters by the names of `rules.LION`."""
    (beta1, beta2), lr = hyper["betas"], float(hyper["lr"])
    decay = 1.0 - lr * hyper["weight_decay"]
    values = (coefficient, decay, lr, beta1, 1.0 - beta1, beta2, 1.0 - beta2)
    return LionScalars(*(single(value) for value in values))


def adagrad_scalars(hyper: Mapping[str, Any], step: int, coefficient: float = 1.0) -> AdagradScalars:
    """Adagrad's numbers for update `step`, counted from 1, from hyper-parameters by the names of `rules.ADAGRAD`."""
    rate = float(hyper["lr"]) / (1 + (step - 1) * hyper["lr_decay"])
    return AdagradScalars(*(single(value) for value in (coefficient, hyper["weight_decay"], rate, hyper["eps"])))


def single(value: float) -> float:
    """The float32 number nearest to `value`."""
    return ctypes.c_float(float(value)).value


def scalars_of(rule: Rule) -> Callable[[Mapping[str, Any], int, float], Scalars] | None:
    """What makes the scalars of a rule from (hyper-parameters, step counted from 1, coefficient of the gradient).

    None if no host kernel computes the rule.
    """
    made = {ADAM.name: adam_scalars, ADAMW.name: adam_scalars, LION.name: lion_scalars, ADAGRAD.name: adagrad_scalars}
    return made[rule.name] if rule in (ADAM, ADAMW, LION, ADAGRAD) else None
