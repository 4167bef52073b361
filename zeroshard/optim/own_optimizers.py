"""zeroshard's own optimizers, which are built like torch's and passed to `shard` or `initialize`.

    optimizer = zeroshard.Lamb(model.parameters(), lr=1e-3)
    model, optimizer = zeroshard.shard(model, optimizer, plan=3)

They are torch optimizers, so groups, schedulers and `add_param_group` work before the model is sharded. They can't step
themselves; the optimizer that `shard` or `initialize` returns can.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zeroshard.errors import UsageError
from zeroshard.optim.adam.low_bit import KINDS, low_bit_source
from zeroshard.optim.dion.source import DION, dion_source
from zeroshard.optim.lamb import lamb_source
from zeroshard.optim.matrix_groups import ADAM_DEFAULTS, given_groups
from zeroshard.optim.muon.source import MUON, muon_source
from zeroshard.optim.onebit.source import FREEZE_STEP, onebit_source, zero_one_source
from zeroshard.optim.onebit.zero_one import Policy
from zeroshard.optim.rules import LION, Rule
from zeroshard.optim.sources import Source, rule_source

Parameters = Iterable[Any]


class UnshardedOptimizer(torch.optim.Optimizer):
    """An optimizer of zeroshard before it is sharded."""

    def source(self) -> Source:
        """The optimizer as a source for sharding."""
        raise UsageError(f"{type(self).__name__} has no sharded form")

    def step(self, closure: Any = None) -> Any:
        """Raises UsageError: the optimizer runs on sharded state only."""
        raise UsageError(
            f"{type(self).__name__}.step(): this optimizer is still unsharded; pass it to zeroshard.shard() or "
            "initialize() and step the optimizer that comes back"
        )


class _RuleOptimizer(UnshardedOptimizer):
    """An optimizer with an element-wise rule."""

    rule: Rule

    def source(self) -> Source:
        return rule_source(self.rule, (), self.defaults, self)


class Lion(_RuleOptimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675): the update is the sign of a momentum; it has one state tensor.

    Args:
        params: parameters or parameter groups.
        lr: usually 3 to 10 times smaller than AdamW's; `weight_decay` is then larger by the same factor.
    """

    rule = LION

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


class _LowBitAdam(UnshardedOptimizer):
    """Adam with moments in few bits, in torchao's format; see `zeroshard.optim.adam.low_bit`.

    Args:
        params: parameters or parameter groups.
        block_size: elements that share a scale. A parameter whose size it does not divide, or with fewer than 4096
            elements, keeps float32 moments.
    """

    kind: str

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        *,
        block_size: int | None = None,
    ) -> None:
        self._block_size = block_size
        decay = KINDS[self.kind].decay if weight_decay is None else weight_decay
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay})

    def source(self) -> Source:
        return low_bit_source(self.kind, self.param_groups, self.defaults, self._block_size, self)


class Adam8bit(_LowBitAdam):
    """Adam with coupled decay (0 by default) and 8-bit moments, as torchao.optim.Adam8bit."""

    kind = "Adam8bit"


class AdamW8bit(_LowBitAdam):
    """AdamW (decay 0.01 by default) with 8-bit moments, as torchao.optim.AdamW8bit."""

    kind = "AdamW8bit"


class Adam4bit(_LowBitAdam):
    """Adam with coupled decay (0 by default) and 4-bit moments, as torchao.optim.Adam4bit."""

    kind = "Adam4bit"


class AdamW4bit(_LowBitAdam):
    """AdamW (decay 0.01 by default) with 4-bit moments, as torchao.optim.AdamW4bit."""

    kind = "AdamW4bit"


class Lamb(UnshardedOptimizer):
    """Lamb (You et al. 2020, arXiv:1904.00962); each parameter's ratio is that of the whole parameter.

    Args:
        params: parameters or parameter groups.
        eps_inside_sqrt: add eps to the second moment before the root, not after it.
        max_coeff, min_coeff: bounds of the ratio of a parameter's norm to that of its update.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)

    def source(self) -> Source:
        return lamb_source(self.param_groups, self.defaults, self)


class MuonAdamW(UnshardedOptimizer):
    """Muon for hidden matrices, AdamW for other parameters; if all are matrices torch.optim.Muon can be used, too.

    Args:
        params: `model.named_parameters()`, whose hidden matrices are found by shape and name; or groups that each have
            'use_muon': True or False.
        lr: rate of the matrices; `adam_lr` is that of other parameters. A group may have its own.
        adjust_lr_fn: 'original' (None) multiplies the rate by sqrt(max(1, rows/columns)), 'match_rms_adamw' by
            0.2 sqrt(max(rows, columns)) (arXiv:2502.16982).
        ns_method: 'standard' or 'gram', see `zeroshard.optim.muon.newton_schulz`.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        adam_lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        nesterov: bool = True,
        ns_method: str = "standard",
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        given = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        matrix = {
            **MUON.defaults,
            **given,
            "ns_method": ns_method,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        other = {**ADAM_DEFAULTS, "lr": adam_lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(given_groups(MUON, params, "MuonAdamW", matrix, other), {})

    def source(self) -> Source:
        return muon_source(self.param_groups, "MuonAdamW", self)


class Dion(UnshardedOptimizer):
    """Dion (Ahn et al. 2025, arXiv:2504.05295) for hidden matrices, AdamW for other parameters.

    A matrix' update is a product of two orthonormal factors, of which the ranks sum up what each has.

    Args:
        params: `model.named_parameters()`, whose hidden matrices are found by shape and name; or groups that each have
            'use_dion': True or False.
        lr: rate of the matrices, which is multiplied by sqrt(rows/columns); `adam_lr` is that of other parameters. A
            group may have its own.
        mu: what an update leaves of the part of the momentum that it has used.
        rank_fraction: rank of the factors, as a fraction of the lesser of rows and columns. A group may have its own.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.01,
        mu: float = 0.95,
        rank_fraction: float = 0.25,
        weight_decay: float = 0.01,
        adam_lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
    ) -> None:
        matrix = {"lr": lr, "mu": mu, "rank_fraction": rank_fraction, "weight_decay": weight_decay}
        other = {**ADAM_DEFAULTS, "lr": adam_lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(given_groups(DION, params, "Dion", matrix, other), {})

    def source(self) -> Source:
        return dion_source(self.param_groups, self)


class OneBitAdam(UnshardedOptimizer):
    """1-bit Adam (arXiv:2102.02888): after `freeze_step` steps ranks average momentum in one bit, not gradients.

    Works at stages 0 and 1, without clipping. There is no bias correction.

    Args:
        params: parameters or parameter groups.
        freeze_step: steps of Adam with averaged gradients; then the second moment is frozen.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        freeze_step: int = FREEZE_STEP,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        self._freeze_step = freeze_step
        given = {"lr": lr, "betas": betas, "eps": eps}
        super().__init__(params, {**given, "eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay})

    def source(self) -> Source:
        return onebit_source("OneBitAdam", self.param_groups, self.defaults, self._freeze_step, self)


class OneBitLamb(UnshardedOptimizer):
    """1-bit Lamb (arXiv:2104.06069): as OneBitAdam, with Lamb's ratios, which still change slowly after the freeze.

    Args:
        params: parameters or parameter groups.
        freeze_step: steps of Lamb with averaged gradients; then the second moment is frozen.
        max_coeff, min_coeff: bounds of the ratio in the warm-up.
        coeff_beta: decay of the running mean of that ratio.
        factor_max, factor_min: bounds of the factor of that mean after the warm-up.
        factor_threshold: how much the factor may change in one step, as a share of it.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        freeze_step: int = FREEZE_STEP,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        self._freeze_step = freeze_step
        given = {"lr": lr, "betas": betas, "eps": eps, "eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay}
        bounds = {"max_coeff": max_coeff, "min_coeff": min_coeff, "coeff_beta": coeff_beta}
        factors = {"factor_max": factor_max, "factor_min": factor_min, "factor_threshold": factor_threshold}
        super().__init__(params, {**given, **bounds, **factors})

    def source(self) -> Source:
        return onebit_source("OneBitLamb", self.param_groups, self.defaults, self._freeze_step, self)


class ZeroOneAdam(UnshardedOptimizer):
    """0/1 Adam (arXiv:2202.06009): averages gradients in one bit, but for variance steps, then takes local steps.

    Works at stage 0, and at stage 1 with `local_step_clipper` 1, which means no local steps. After a local step the
    ranks' parameters differ, until ranks average again.

    Args:
        params: parameters or parameter groups.
        var_freeze_step: steps until the second moment is frozen and local steps begin.
        var_update_scaler: after so many variance steps, each time, these become half as frequent.
        local_step_scaler: after so many steps, each time, ranks average half as often.
        local_step_clipper: ranks average at least every so many steps.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        var_freeze_step: int = FREEZE_STEP,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        self._policy = Policy(var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper)
        given = {"lr": lr, "betas": betas, "eps": eps}
        super().__init__(params, {**given, "eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay})

    def source(self) -> Source:
        return zero_one_source(self.param_groups, self.defaults, self._policy, self)
