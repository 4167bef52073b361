"""A small model whose blocks multiply in fp8, and its training in one process with codes of the float32 truth."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

import zeroshard
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.memory.scaled_group import ScaledGroup
from zeroshard.fp8.arithmetic import cast_weight
from zeroshard.fp8.cast import decode
from zeroshard.fp8.convert import convert
from zeroshard.fp8.recipe import BLOCK, Fp8, Products, Scaling
from zeroshard.plan.builder import Precision, Recipe
from zeroshard.plan.placement import STAGES
from zeroshard.plan.policy import ExecutionPolicy

WIDTH = 32
FP8 = Fp8(names=("blocks",))
BY_BLOCK = Fp8(names=("blocks",), scaling=Scaling.BLOCKWISE)
LAYERS = tuple(f"blocks.{block}.{layer}" for block in range(2) for layer in ("up", "down"))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """An input layer, two blocks and a head; only the blocks are to multiply in fp8."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, micro: int, rank: int, rows: int = 5) -> torch.Tensor:
    """Rows of this micro-batch of a rank; no multiple of 16."""
    generator = torch.Generator().manual_seed(step * 100 + micro * 10 + rank)
    return torch.randn(rows, 8, generator=generator).bfloat16()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Mean square, in float32."""
    return model(x).float().square().mean()


def build(fp8: Fp8 | None = None) -> Stack:
    """The model with the weights that every training starts from, in float32; wider for scales by block."""
    torch.manual_seed(11)
    return Stack(BLOCK if fp8 is not None and fp8.scaling is Scaling.BLOCKWISE else WIDTH)


def graphs_of_blocks(model: nn.Module) -> list[torch.fx.GraphModule]:
    """Compile each block; the list fills with the graphs that are made: one for all that are alike, if none breaks."""
    found: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., object]:
        found.append(graph)
        return graph.forward

    for block in model.get_submodule("blocks").children():
        block.compile(backend=backend)
    return found


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)  # pyright: ignore[reportArgumentType]


def recipe(stage: int, *, fp8: Fp8 | None = FP8, accumulate: bool = False) -> Recipe:
    """A stage in bf16, its blocks in fp8."""
    return Recipe(
        sharding=STAGES[stage],
        precision=Precision(param="bfloat16", matmul=fp8),
        policy=ExecutionPolicy(accumulate=accumulate, cast_inputs="bfloat16"),
    )


def train(
    rank: int,
    stage: int,
    steps: int,
    micro: int = 1,
    *,
    fp8: Fp8 | None = FP8,
    wrap: Callable[[nn.Module], None] | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final float32 weights of a sharded training; called by all ranks."""
    model = build(fp8)
    if wrap is not None:
        wrap(model)
    model, optimizer = zeroshard.shard(
        model, adamw(model.parameters()), plan=recipe(stage, fp8=fp8, accumulate=micro > 1)
    )
    assert optimizer is not None
    losses: list[float] = []
    for step in range(steps):
        for number in range(micro):
            loss = loss_of(model, batch(step, number, rank))
            (loss / micro).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    found = {name: value.clone() for name, value in zeroshard.iterate_full_parameters(model)}
    zeroshard.close(model)
    return losses, found


def train_alone(steps: int, fp8: Fp8 = FP8) -> tuple[list[float], dict[str, torch.Tensor]]:
    """`Stack` in one process by plain torch."""
    truth = build(fp8)
    model = copy.deepcopy(truth).bfloat16()
    convert(model, Products(fp8.scaling, LAYERS))
    return trained_in_codes(truth, model, steps, lambda step: loss_of(model, batch(step, 0, 0)), LAYERS, fp8)


def trained_in_codes(
    truth: nn.Module,
    model: nn.Module,
    steps: int,
    loss_of_step: Callable[[int], torch.Tensor],
    coded: Sequence[str],
    fp8: Fp8 = FP8,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights by plain torch: a step computes with what the codes of the float32 truth stand for.

    Args:
        truth: float32 weights; updated.
        model: of the same parameters, computes the losses in bf16.
        coded: the layers whose weights are codes; the others are rounded to bf16.
    """
    optimizer, losses = adamw(truth.parameters()), list[float]()
    by_block = fp8.scaling is Scaling.BLOCKWISE
    for step in range(steps):
        for (name, ours), theirs in zip(model.named_parameters(), truth.parameters(), strict=True):
            in_codes, value = name.removesuffix(".weight") in coded, theirs.detach()
            ours.data = decode(*cast_weight(value, by_block=by_block), torch.bfloat16) if in_codes else value.bfloat16()
            ours.grad = None
        loss = loss_of_step(step)
        loss.backward()
        losses.append(float(loss.detach()))
        for ours, theirs in zip(model.parameters(), truth.parameters(), strict=True):
            assert ours.grad is not None
            theirs.grad = ours.grad.float()
        optimizer.step()
    return losses, {name: value.detach().clone() for name, value in truth.named_parameters()}


def codes_are_those_of_whole_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """The gathered codes have the bits of the whole float32 weights cast at once."""
    runtime = handle_of(model).runtime
    for unit in runtime.units:
        runtime.parameters.use(unit.index)
        for group in unit.groups:
            if not isinstance(group, ScaledGroup):
                continue
            for record in group.codes:
                whole = weights[record.name].to(record.codes.device)
                codes, unscale = cast_weight(whole, by_block=bool(group.plan.scale_block))
                assert torch.equal(record.unscale, unscale)
                assert torch.equal(record.codes.view(torch.uint8), codes.view(torch.uint8))
        runtime.parameters.release(unit.index)
