"""A model with a micro-batch: its units, and traces of one forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zeroshard.errors import PlanError
from zeroshard.fp8.convert import convert
from zeroshard.fp8.recipe import Products
from zeroshard.mesh import Mesh
from zeroshard.plan.builder import Recipe, build_plan, reordered
from zeroshard.plan.dtypes import torch_dtype
from zeroshard.plan.plan import Plan
from zeroshard.plan.products import with_products
from zeroshard.planner.trace.checkpointing import Checkpointing, enable
from zeroshard.planner.trace.divided import WHOLE, Parts, divide_on_meta, with_cuts
from zeroshard.planner.trace.exchanges import ExchangePoint, Exchanges
from zeroshard.planner.trace.model_trace import Divided, Trace, trace
from zeroshard.planner.trace.sources import ModelSource
from zeroshard.planner.trace.substitutes import DividedSequence
from zeroshard.sharding.units import UnitSpec, find_units

MAX_LENGTH = 10_000_000


@dataclass
class Workload:
    """A model and its micro-batch; one trace is made for each set of dtypes and each kind of checkpointing.

    Attributes:
        samples, length: the micro-batch on one GPU: sequences and tokens in each.
        autocast: name of the dtype of torch.autocast around the forward, None for none.
        parts: how many ranks divide the model along each axis; units and traces are those of one rank.
    """

    source: ModelSource
    samples: int
    length: int
    autocast: str | None = None
    parts: Parts = WHOLE
    units: list[UnitSpec] = field(init=False)
    _module: nn.Module = field(init=False)
    _traces: dict[tuple[str, Checkpointing], Trace] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.samples < 1 or not 1 <= self.length <= MAX_LENGTH:
            raise PlanError(
                f"a micro-batch of {self.samples} sequences of {self.length} tokens: there must be 1 sequence or more, "
                f"of 1 to {MAX_LENGTH:,} tokens (--micro-batch, --seq)"
            )
        module = self._module = self.source.module()
        cuts = divide_on_meta(module, self.parts, Exchanges())
        self.units = with_cuts(find_units(module), cuts)
        _check_positions(module, self.source, self.length)

    @property
    def numel(self) -> int:
        """Elements of all parameters, shared ones counted once."""
        return sum(torch.Size(p.shape).numel() for unit in self.units for p in unit.parameters)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch; its samples if they are no sequences of tokens."""
        return self.samples * self.length if self.source.tokens else self.samples

    def trace(self, plan: Plan, how: Checkpointing) -> Trace:
        """The trace of forward and backward in the dtypes of `plan`, with this checkpointing."""
        dtypes = _parameter_dtypes(plan)
        cast = plan.policy.cast_inputs
        products = plan.policy.products
        key = (f"{sorted(set(dtypes.values()))} {cast} {products}", how)
        if key not in self._traces:
            self._traces[key] = self._run(dtypes, cast, how, products)
        return self._traces[key]

    def plan(self, recipe: Recipe, mesh: Mesh, how: Checkpointing) -> tuple[Plan, Trace]:
        """The plan as the engine runs it after its first step, in the model's order of units, and its trace."""
        recipe, _ = with_products(recipe, self._module)
        plan = build_plan(self.units, recipe, mesh)
        traced = self.trace(plan, how)
        return reordered(plan, (0, *traced.order)), traced

    def _run(
        self, dtypes: Mapping[str, str], cast: str | None, how: Checkpointing, products: Products | None = None
    ) -> Trace:
        module, exchanges = self.source.module(), Exchanges()
        divide_on_meta(module, self.parts, exchanges)
        for name, parameter in module.named_parameters():
            parameter.data = parameter.data.to(torch_dtype(dtypes[name]))
        if products is not None:
            convert(module, products)
        enable(module, self.units, how)
        low = None if self.autocast is None else torch_dtype(self.autocast)
        with torch.device("meta"):
            batch = self.source.batch(module, self.samples, -(-self.length // self.parts.sequence))
        return trace(
            module,
            self.units,
            (),
            _cast(batch, cast),
            loss=loss_of,
            tokens=self.tokens,
            autocast=low,
            divided=Divided(exchanges, self._sequence(exchanges)),
        )

    def _sequence(self, exchanges: Exchanges) -> DividedSequence | None:
        ranks = self.parts.sequence
        exchange = ExchangePoint(exchanges, "sp", forward="all-to-all", backward="all-to-all", moved=True)
        return DividedSequence(ranks, exchange) if ranks > 1 else None


def loss_of(output: Any) -> torch.Tensor:
    """The loss in a forward's result: the result itself, its `loss`, or the mean square of its first tensor.

    Raises PlanError for a result without a tensor.
    """
    found = getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    if isinstance(output, Mapping) and isinstance(output.get("loss"), torch.Tensor):
        return output["loss"]
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(first, torch.Tensor):
        raise PlanError(f"the forward gives a {type(output).__name__}; a loss, or something with .loss, is needed")
    return first if first.dim() == 0 else first.float().square().mean()


def _parameter_dtypes(plan: Plan) -> dict[str, str]:
    return {segment.name: group.shown_dtype for _, group in plan.groups() for segment in group.layout.segments}


def _cast(batch: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    if dtype is None:
        return dict(batch)
    return {
        name: value.to(torch_dtype(dtype)) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def _check_positions(module: nn.Module, source: ModelSource, length: int) -> None:
    """Refuse sequences that are longer than a learned table of positions; for rotary positions there is only advice."""
    limit = source.positions
    if limit is None or length <= limit or not source.tokens:
        return
    tables = [m for m in module.modules() if isinstance(m, nn.Embedding) and m.num_embeddings == limit]
    if tables:
        raise PlanError(f"--seq {length}: {source.name} has learned positions for {limit} tokens only")
