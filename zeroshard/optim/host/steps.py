"""Rules computed by host kernels: what `Rule.update` does to a piece of a region, with cast and unscaling in one pass.

coefficient, hyper-parameters, step --> scalars --> kernel(master, gradient, state, parameter)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.optim.host.kernel import HostKernel
from zeroshard.optim.host.scalars import adagrad_scalars, adam_scalars, lion_scalars
from zeroshard.optim.rules import ADAGRAD, ADAM, ADAMW, LION, Rule


@dataclass(frozen=True)
class Piece:
    """Consecutive elements that have the same hyper-parameters and step.

    Attributes:
        master: float32 (n,), updated.
        param: (n,) in compute dtype, overwritten with the new master; None if there is none.
        grad: bfloat16, float16 or float32 (n,); not changed.
        state: the rule's state tensors in its order, each (n,) in float32 or bfloat16.
    """

    master: torch.Tensor
    param: torch.Tensor | None
    grad: torch.Tensor
    state: Sequence[torch.Tensor]


Step = Callable[[HostKernel, Piece, Mapping[str, Any], int, float], None]
"""(kernel, piece, hyper-parameters, step counted from 1, coefficient of the gradient)."""


def host_step(rule: Rule) -> Step | None:
    """A function that does a step of `rule` with a host kernel; None if there is no kernel for it."""
    return _STEPS.get(rule.name) if rule in (ADAM, ADAMW, LION, ADAGRAD) else None


def _adam(kernel: HostKernel, piece: Piece, hyper: Mapping[str, Any], step: int, coefficient: float) -> None:
    scalars = adam_scalars(hyper, step, coefficient)
    kernel.adam(scalars, piece.master, piece.grad, piece.state[0], piece.state[1], piece.param)


def _lion(kernel: HostKernel, piece: Piece, hyper: Mapping[str, Any], step: int, coefficient: float) -> None:
    kernel.lion(lion_scalars(hyper, coefficient), piece.master, piece.grad, piece.state[0], piece.param)


def _adagrad(kernel: HostKernel, piece: Piece, hyper: Mapping[str, Any], step: int, coefficient: float) -> None:
    scalars = adagrad_scalars(hyper, step, coefficient)
    kernel.adagrad(scalars, piece.master, piece.grad, piece.state[0], piece.param)


_STEPS: Mapping[str, Step] = {ADAM.name: _adam, ADAMW.name: _adam, LION.name: _lion, ADAGRAD.name: _adagrad}
