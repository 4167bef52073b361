"""The scalar arguments of a host kernel: a few numbers per step, each rounded to float32 once.

They are the numbers in the table of `kernels.adam` on a GPU, so that both compute the same. Rejected: to pass the
hyper-parameters themselves, which would leave rounding and bias correction to each kernel.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AdamScalars:
    """One step of Adam or AdamW.

    Attributes:
        coefficient: factor of the gradient, which unscales, averages and clips it.
        decay: if decoupled 1 - lr * weight_decay, a factor of the parameter; else weight_decay itself.
        step_size: lr / (1 - beta1 ** step).
        correction: 1 / sqrt(1 - beta2 ** step), a factor of the root of the second moment.
    """

    coefficient: float
    decay: float
    step_size: float
    correction: float
    eps: float
    one_beta1: float
    beta2: float
    one_beta2: float
    decoupled: bool

    @property
    def values(self) -> tuple[float, ...]:
        """In the order of `csrc/job.hpp`."""
        moments = self.one_beta1, self.beta2, self.one_beta2
        return (self.coefficient, self.decay, self.step_size, self.correction, self.eps, *moments, self.decoupled)


@dataclass(frozen=True)
class LionScalars:
    """One step of Lion; `decay` is 1 - lr * weight_decay."""

    coefficient: float
    decay: float
    lr: float
    beta1: float
    one_beta1: float
    beta2: float
    one_beta2: float

    @property
    def values(self) -> tuple[float, ...]:
        """In the order of `csrc/job.hpp`."""
        return (self.coefficient, self.decay, self.lr, self.beta1, self.one_beta1, self.beta2, self.one_beta2)


@dataclass(frozen=True)
class AdagradScalars:
    """One step of Adagrad; `rate` is lr / (1 + (step - 1) * lr_decay), `decay` is added to the gradient."""

    coefficient: float
    decay: float
    rate: float
    eps: float

    @property
    def values(self) -> tuple[float, ...]:
        """In the order of `csrc/job.hpp`."""
        return (self.coefficient, self.decay, self.rate, self.eps)


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


def lion_scalars(hyper: Mapping[str, Any], coefficient: float = 1.0) -> LionScalars:
    """Lion's numbers from hyper-parameters by the names of `rules.LION`."""
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
