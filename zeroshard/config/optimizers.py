"""Optimizers of a config: which types are built, and the parameters of each.

Parameter names and defaults are DeepSpeed's, and torch's where DeepSpeed takes torch's optimizer. Its `Adam` decays
weights decoupled (as AdamW does) unless `adam_w_mode` is false; this is kept, since a config means what it meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ValidationInfo, field_validator, model_validator

from zeroshard.config.fields import Count, Flag, NonNegative, exactly, one_of, real, refuse, whole_number
from zeroshard.config.models import Section

_Decay = Annotated[float, real(0, below=1)]


def _pair(value: Any) -> Any:
    if not isinstance(value, list) or len(value) != 2:
        raise refuse("a list of two numbers such as [0.9, 0.999]", value)
    return tuple(value)


def _zero(reason: str) -> BeforeValidator:
    """A number that has one value; `reason` says why."""

    def check(value: Any) -> float:
        if isinstance(value, bool) or value != 0:
            raise refuse(f"0 ({reason})", value)
        return 0.0

    return BeforeValidator(check)


Betas = Annotated[tuple[_Decay, _Decay], BeforeValidator(_pair)]
_NoAmsgrad = Annotated[bool, exactly(False, "amsgrad is not built yet")]


def _even(value: Any) -> Any:
    size = whole_number(2)(value)
    if size % 2:
        raise refuse("an even number", value)
    return size


_BlockSize = Annotated[int, BeforeValidator(_even)]


class AdamParams(Section):
    """Adam; with `adam_w_mode` (the default) the decay is decoupled, so that this is AdamW.

    `torch_adam` with decoupled decay has the default of torch.optim.AdamW: a `weight_decay` of 0.01.
    """

    lr: NonNegative = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    bias_correction: Flag = True
    adam_w_mode: Flag = True
    amsgrad: _NoAmsgrad = False
    torch_adam: Flag = False

    @model_validator(mode="before")
    @classmethod
    def _decay_of_torch(cls, values: Any) -> Any:
        """What is not written is left to the optimizer that DeepSpeed builds, and torch's AdamW decays by default."""
        if isinstance(values, dict) and values.get("torch_adam") is True and values.get("adam_w_mode", True) is True:
            return {"weight_decay": 0.01, **values}
        return values


class AdamWParams(AdamParams):
    """AdamW; the decay is always decoupled. `torch_adam` makes 0.01 the default of `weight_decay`, as it is torch's."""

    adam_w_mode: Annotated[
        bool, exactly(True, "AdamW always decouples the decay; for the other kind write type Adam")
    ] = True


class _LowBitParams(Section):
    """What Adam with moments in few bits has; by torchao (`pip install torchao`)."""

    lr: NonNegative = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    amsgrad: _NoAmsgrad = False
    block_size: _BlockSize = 256


class Adam8bitParams(_LowBitParams):
    """Adam with coupled decay and 8-bit moments, as torchao.optim.Adam8bit; `block_size` elements share a scale."""


class AdamW8bitParams(_LowBitParams):
    """AdamW with 8-bit moments, as torchao.optim.AdamW8bit; `block_size` elements share a scale."""

    weight_decay: NonNegative = 1e-2


class Adam4bitParams(_LowBitParams):
    """Adam with coupled decay and 4-bit moments, as torchao.optim.Adam4bit; `block_size` elements share a scale."""

    block_size: _BlockSize = 128


class AdamW4bitParams(_LowBitParams):
    """AdamW with 4-bit moments, as torchao.optim.AdamW4bit; `block_size` elements share a scale."""

    weight_decay: NonNegative = 1e-2
    block_size: _BlockSize = 128


class SgdParams(Section):
    """Stochastic gradient descent with momentum, as torch.optim.SGD."""

    lr: NonNegative = 1e-3
    momentum: NonNegative = 0.0
    dampening: Annotated[float, real()] = 0.0
    weight_decay: NonNegative = 0.0
    nesterov: Flag = False


class AdagradParams(Section):
    """Adagrad, as torch.optim.Adagrad."""

    lr: NonNegative = 1e-2
    lr_decay: NonNegative = 0.0
    weight_decay: NonNegative = 0.0
    initial_accumulator_value: NonNegative = 0.0
    eps: NonNegative = 1e-10


class LionParams(Section):
    """Lion: the sign of a momentum, one state tensor. The second beta is DeepSpeed's; `zeroshard.Lion` has 0.99."""

    lr: NonNegative = 1e-3
    betas: Betas = (0.9, 0.999)
    weight_decay: NonNegative = 0.0


class RmspropParams(Section):
    """RMSprop, as torch.optim.RMSprop."""

    lr: NonNegative = 1e-2
    alpha: NonNegative = 0.99
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    momentum: NonNegative = 0.0
    centered: Flag = False


class _RootOfMomentParams(Section):
    """What Lamb and the 1-bit optimizers share."""

    lr: NonNegative = 1e-3
    bias_correction: Flag = True
    betas: Betas = (0.9, 0.999)
    eps: NonNegative = 1e-8
    eps_inside_sqrt: Flag = False
    weight_decay: NonNegative = 0.0


class LambParams(_RootOfMomentParams):
    """Lamb: each parameter's rate follows its own norm, taken over all ranks."""

    max_grad_norm: Annotated[float, _zero("clip by the top-level key gradient_clipping")] = 0.0
    max_coeff: NonNegative = 10.0
    min_coeff: NonNegative = 0.01
    amsgrad: Annotated[bool, exactly(False, "Lamb has no amsgrad")] = False

    @field_validator("min_coeff")
    @classmethod
    def _in_order(cls, value: float, info: ValidationInfo) -> float:
        if value > info.data.get("max_coeff", value):
            raise refuse(f"at most max_coeff, which is {info.data['max_coeff']:g}", value)
        return value


class MuonParams(Section):
    """Muon for hidden matrices (two dims or more, no "embed" or "lm_head" in the name), Adam for the rest.

    `muon_lr` and `adam_lr` go before `lr`; where none is given, matrices have 0.02 and the rest 3e-4. Decay is
    decoupled.
    """

    lr: NonNegative | None = None
    momentum: Annotated[float, real(0)] = 0.95
    weight_decay: NonNegative = 0.0
    muon_lr: NonNegative | None = None
    adam_lr: NonNegative | None = None
    betas: Betas = (0.9, 0.95)
    eps: NonNegative = 1e-10
    ns_method: Annotated[Literal["gram", "standard"], one_of("gram", "standard")] = "gram"


def _fraction(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise refuse("a number above 0, and at most 1", value)
    return float(value)


class DionParams(Section):
    """Dion for hidden matrices (as Muon's), Adam for the rest, which has `adam_lr`. Decay is decoupled.

    `rank_fraction` is the rank of the factors of an update, as a fraction of the lesser of rows and columns. A key of
    zeroshard.
    """

    lr: NonNegative = 0.01
    mu: Annotated[float, real(0)] = 0.95
    rank_fraction: Annotated[float, BeforeValidator(_fraction)] = 0.25
    weight_decay: NonNegative = 0.01
    adam_lr: NonNegative = 3e-4
    betas: Betas = (0.9, 0.95)
    eps: NonNegative = 1e-10


class _OneBitParams(_RootOfMomentParams):
    """What 1-bit optimizers share. `cuda_aware` and `comm_backend_name` have no effect: the process group is used."""

    max_grad_norm: Annotated[float, _zero("averaged gradients are not there to be clipped")] = 0.0
    amsgrad: _NoAmsgrad = False
    cuda_aware: Flag = False
    comm_backend_name: str = "nccl"


class OneBitAdamParams(_OneBitParams):
    """1-bit Adam, at stages 0 and 1: Adam for `freeze_step` steps, then ranks average one bit per parameter.

    `bias_correction` has no effect, as in DeepSpeed: neither phase corrects bias.
    """

    freeze_step: Count = 100_000


class OneBitLambParams(_OneBitParams):
    """1-bit Lamb, at stages 0 and 1: Lamb for `freeze_step` steps, then ranks average one bit per parameter."""

    freeze_step: Count = 100_000
    max_coeff: NonNegative = 10.0
    min_coeff: NonNegative = 0.01
    coeff_beta: Annotated[float, real(0, below=1)] = 0.9
    factor_max: NonNegative = 4.0
    factor_min: NonNegative = 0.5
    factor_threshold: NonNegative = 0.1


class ZeroOneAdamParams(_OneBitParams):
    """0/1 Adam, at stage 0: one bit per parameter but for ever fewer variance steps, then local steps.

    At stage 1 with `local_step_clipper` 1. `bias_correction` has no effect, as in DeepSpeed.
    """

    var_freeze_step: Count = 100_000
    var_update_scaler: Count = 16
    local_step_scaler: Count = 32_678
    local_step_clipper: Count = 16


OPTIMIZERS: Mapping[str, type[Section]] = {
    "Adam": AdamParams,
    "AdamW": AdamWParams,
    "SGD": SgdParams,
    "Adagrad": AdagradParams,
    "Lion": LionParams,
    "RMSprop": RmspropParams,
    "Lamb": LambParams,
    "Muon": MuonParams,
    "Dion": DionParams,
    "OneBitAdam": OneBitAdamParams,
    "OneBitLamb": OneBitLambParams,
    "ZeroOneAdam": ZeroOneAdamParams,
    "Adam8bit": Adam8bitParams,
    "AdamW8bit": AdamW8bitParams,
    "Adam4bit": Adam4bitParams,
    "AdamW4bit": AdamW4bitParams,
}
LOW_BIT: Mapping[str, int] = {"Adam8bit": 8, "AdamW8bit": 8, "Adam4bit": 4, "AdamW4bit": 4}
"""Those that keep moments in few bits, and how many."""
ONE_BIT = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
"""Those that never average gradients after their warm-up: each rank keeps them whole, and nothing clips them."""
OPTIMIZER_ALIASES: Mapping[str, str] = {
    "DeepSpeedCPUAdam": "Adam",
    "FusedAdam": "Adam",
    "DeepSpeedCPUAdagrad": "Adagrad",
    "DeepSpeedCPULion": "Lion",
    "FusedLion": "Lion",
    "FusedLamb": "Lamb",
    "MuonAdamW": "Muon",
}
"""Names that fail or are unusual in DeepSpeed but say clearly what is meant."""

UNBUILT_OPTIMIZERS = (
    *("MuAdam", "MuAdamW", "MuSGD", "Adadelta", "Adafactor", "Adamax", "ASGD", "LBFGS", "NAdam", "RAdam", "Rprop"),
    "SparseAdam",
)
