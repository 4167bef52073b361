"""Makes one rank's part of a model that tensor, sequence and expert parallelism divide, on the meta device.

    parameters      what the rank has of each, by the model's own plan (`tp_plan`) and its modules of experts
    forward         the model's own, with these parameters; the collectives between ranks are noted (see `exchanges`)

A trace of this part has a rank's own kernels, activations and collectives. Rejected: dividing the trace of the whole
model; it does not show which operations every rank repeats (norms, residuals, the router).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroshard.errors import PlanError
from zeroshard.experts.fused import fused_experts, send_by
from zeroshard.mesh import EXPERT, TENSOR
from zeroshard.model_plan import check_heads, expanded, own_plan
from zeroshard.planner.trace.exchanges import ExchangePoint, Exchanges
from zeroshard.sharding.cut import Cut
from zeroshard.sharding.units import UnitSpec

_COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep", "embedding_colwise")
_ROWS = ("rowwise", "rowwise_rep", "rowwise_split_input")
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "sequence_parallel", "all_reduce", "local_params")
_EXPERTS = "moe_tp_experts"
_PACKED = 2
"""Blocks of a packed weight of a gated feed-forward: the gate's weight and the up-projection's."""


@dataclass(frozen=True)
class Parts:
    """The number of ranks that divide a model along each axis."""

    tensor: int = 1
    sequence: int = 1
    experts: int = 1


WHOLE = Parts()


def divide_on_meta(model: nn.Module, parts: Parts, exchanges: Exchanges) -> dict[str, Cut]:
    """Make `model`, which is on the meta device, one rank's part of it, in place.

    Returns:
        How each divided parameter is cut, by name.

    Raises:
        PlanError: the model can't be divided so; the message is the engine's own.
    """
    cuts: dict[str, Cut] = {}
    if parts.experts > 1:
        cuts |= _divide_experts(model, parts, exchanges)
    if parts.tensor > 1:
        cuts |= _divide_tensors(model, parts.tensor, cuts, exchanges)
    if parts.sequence > 1:
        _check_sequences(model, parts)
    return cuts


def with_cuts(units: list[UnitSpec], cuts: Mapping[str, Cut]) -> list[UnitSpec]:
    """The units, with how their parameters are cut."""
    return [
        replace(unit, parameters=tuple(replace(one, cut=cuts.get(one.name)) for one in unit.parameters))
        for unit in units
    ]


def heads_of(model: nn.Module) -> int | None:
    """The number of query heads by the model's config; None if it has none."""
    config: Any = getattr(model, "config", None)
    text_of = getattr(config, "get_text_config", None)
    heads = getattr(text_of() if callable(text_of) else config, "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


def _check_sequences(model: nn.Module, parts: Parts) -> None:
    heads = heads_of(model)
    if heads is None:
        raise PlanError(
            f"sequence_parallel_size {parts.sequence}: {type(model).__name__} has no config with num_attention_heads; "
            "attention of transformers' models is divided"
        )
    own = heads // parts.tensor
    if own % parts.sequence:
        beside = f" on each of {parts.tensor} ranks of 'tp'" if parts.tensor > 1 else ""
        raise PlanError(
            f"sequence_parallel_size {parts.sequence}: the model has {own} heads of queries{beside}, which "
            f"{parts.sequence} ranks do not divide"
        )


# Tensor parallelism.


def _divide_tensors(model: nn.Module, ranks: int, others: Mapping[str, Cut], exchanges: Exchanges) -> dict[str, Cut]:
    check_heads(model, ranks)
    styles = expanded(model, own_plan(model))
    cuts: dict[str, Cut] = {}
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            whole = f"{path}.{name}" if path else name
            if id(parameter) in made:  # another name of one that is divided already
                module._parameters[name] = made[id(parameter)]
                continue
            cut = None if whole in others else _cut(whole, parameter, styles.get(whole), ranks)
            if cut is not None:
                cuts[whole] = cut
                module._parameters[name] = made[id(parameter)] = _narrowed(parameter, cut)
        style = styles.get(path)
        if style == _EXPERTS and any(name.startswith(f"{path}.") for name in others):
            style = None  # every rank of `tp` has its experts whole
        if style is not None:
            _hook(module, style, ranks, exchanges)
    return cuts


def _cut(name: str, parameter: torch.Tensor, style: str | None, ranks: int) -> Cut | None:
    dims = parameter.ndim
    if style is None or style in _WHOLE or (style in _ROWS and name.endswith("bias")):
        return None
    column, blocks = max(0, dims - 2), 1
    if style in _COLUMNS:
        dim = dims - 1 if style == "embedding_colwise" else column
    elif style in _ROWS:
        dim = dims - 1
    elif style == "embedding_rowwise":
        dim = 0
    elif style in ("packed_colwise", "packed_rowwise"):
        dim, blocks = (column if style == "packed_colwise" else dims - 1), _PACKED
    else:
        raise PlanError(f"parameter {name!r}: the model's plan divides it as {style!r}, of which no prediction is made")
    size = parameter.shape[dim]
    if size % (ranks * blocks):
        raise PlanError(
            f"parameter {name!r}: dim {dim} of {size} elements does not divide by the {ranks} ranks of axis {TENSOR!r}"
        )
    return Cut(TENSOR, dim, ranks, blocks)


def _narrowed(parameter: nn.Parameter, cut: Cut) -> nn.Parameter:
    shape = [size // cut.ranks if dim == cut.dim else size for dim, size in enumerate(parameter.shape)]
    value = torch.empty(shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def _hook(module: nn.Module, style: str, ranks: int, exchanges: Exchanges) -> None:
    point = partial(ExchangePoint, exchanges, TENSOR)
    if style in (*_COLUMNS, "packed_colwise", _EXPERTS) and style != "embedding_colwise":
        entry = point(backward="all-reduce")
        module.register_forward_pre_hook(lambda _, args: (entry.apply(args[0]), *args[1:]) if args else None)
    end: ExchangePoint | None = None
    if style in (*_ROWS, "packed_rowwise", "embedding_rowwise", "all_reduce", _EXPERTS):
        end = point(forward="all-reduce")
    elif style in ("colwise_gather_output", "colwise_rep", "embedding_colwise"):
        end = point(forward="all-gather", parts=ranks)
    if end is not None:
        module.register_forward_hook(lambda _, __, output, end=end: end.apply(output))


# Experts.


@dataclass(frozen=True)
class _Evenly:
    """Sends rows to the ranks of their experts, assuming that all experts get equally many: as many arrive as are sent.

    Its methods are those of `experts.dispatch`, by which modules of experts send.
    """

    pairs: torch.Tensor
    exchange: ExchangePoint

    @property
    def order(self) -> torch.Tensor:
        return torch.empty_like(self.pairs)

    @property
    def experts(self) -> torch.Tensor:
        return torch.empty_like(self.pairs)

    @property
    def received(self) -> list[int]:
        return [self.pairs.numel()]

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        return self.exchange.apply(rows)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        return self.exchange.apply(rows)[torch.empty_like(self.pairs)]


def _divide_experts(model: nn.Module, parts: Parts, exchanges: Exchanges) -> dict[str, Cut]:
    found = list(fused_experts(model))
    if not found:
        raise PlanError(
            f"axis {EXPERT!r} of {parts.experts} ranks: {type(model).__name__} has no experts that are divided over "
            "ranks"
        )
    cuts: dict[str, Cut] = {}
    exchange = ExchangePoint(exchanges, EXPERT, forward="all-to-all", backward="all-to-all", moved=True)
    for path, module, experts in found:
        if experts % parts.experts:
            raise PlanError(
                f"{path} has {experts} experts, which {parts.experts} ranks of axis {EXPERT!r} do not divide"
            )
        for name, parameter in list(module.named_parameters(recurse=False)):
            cuts[f"{path}.{name}"] = cut = Cut(EXPERT, 0, parts.experts)
            module._parameters[name] = _narrowed(parameter, cut)
        send_by(module, experts // parts.experts, lambda pairs: _Evenly(pairs, exchange))
    return cuts
