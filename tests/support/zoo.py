"""Models whose structure is a trap for sharding: shared, skipped, frozen, repeated, empty and oddly shaped parts."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.models import TIED_TRANSFORMER, WIDTH, Batch, Task, Transformer, language_loss, square_loss


class Mlp(nn.Module):
    """A residual block of two Linears with a width that no world size divides."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks in a row between two Linears. `select` picks the blocks that a forward runs, in which order."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Mlp() for _ in range(depth)])
        self.outer = nn.Linear(WIDTH, WIDTH)

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """The blocks alone."""
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor, select: tuple[int, ...] | None = None) -> torch.Tensor:
        x = self.inner(x)
        if select is None:
            x = self.run_blocks(x)
        else:
            for index in select:
                x = self.blocks[index](x)
        return self.outer(x)


class Checkpointed(Stack):
    """Recomputes `segment` blocks at a time in the backward."""

    def __init__(self, reentrant: bool, segment: int) -> None:
        super().__init__()
        self.reentrant, self.segment = reentrant, segment

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for start in range(0, len(self.blocks), self.segment):
            part = nn.Sequential(*self.blocks[start : start + self.segment])
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


class SharedAcrossBlocks(Stack):
    """Two blocks share a Linear, so it belongs to neither."""

    def __init__(self) -> None:
        super().__init__()
        first, last = self.blocks[0], self.blocks[3]
        assert isinstance(first, Mlp)
        assert isinstance(last, Mlp)
        last.up = first.up


class DropsBlocks(Stack):
    """Blocks that are dropped inside of their own forward: they return their input, and change with the step."""

    def __init__(self) -> None:
        super().__init__(depth=6)
        self.blocks = nn.ModuleList([Dropped() for _ in range(6)])

    def forward(self, x: torch.Tensor, select: tuple[int, ...] | None = None) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Dropped)
            block.drops = select is not None and index not in select
        return self.outer(self.run_blocks(self.inner(x)))


class Dropped(Mlp):
    """Returns its input when it is dropped."""

    drops = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.drops else super().forward(x)


class Rounds(Stack):
    """ALBERT's idea: the same blocks several times over."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = super().run_blocks(x)
        return x


class OneBlockRepeated(nn.Module):
    """One block called again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.block(x)
        return x


class Degenerate(nn.Module):
    """Parameters with no element, with one, and with no dim."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.one = nn.Parameter(torch.full((1,), 0.5))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Linear(WIDTH, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.one + self.scalar * x.square() + self.empty.sum() + self.nothing(x).sum()


class MixedDtypes(nn.Module):
    """bf16 Linears with a float32 norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x).bfloat16()).float()


class Lora(nn.Module):
    """A frozen Linear with a trainable low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x)) + self.b(self.a(x))


class Swin(nn.Module):
    """Repeated stages, each with repeated blocks of its own width."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([self._stage(WIDTH), self._stage(2 * WIDTH)])
        self.merge = nn.Linear(WIDTH, 2 * WIDTH)

    @staticmethod
    def _stage(width: int) -> nn.Module:
        return nn.ModuleDict({"blocks": nn.ModuleList([Mlp(width), Mlp(width)]), "norm": nn.LayerNorm(width)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, stage in enumerate(self.stages):
            assert isinstance(stage, nn.ModuleDict)
            blocks = stage["blocks"]
            assert isinstance(blocks, nn.ModuleList)
            for block in blocks:
                x = block(x)
            x = stage["norm"](x)
            x = self.merge(x) if index == 0 else x
        return x


class UnusedHead(Stack):
    """A head that no forward uses: no rank ever has a gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, 3)


@dataclasses.dataclass
class Pair:
    """A dataclass that a block returns."""

    hidden: torch.Tensor
    extra: list[torch.Tensor]


class ReturnsStructure(nn.Module):
    """A block that returns what `wrap` makes of its result, inside of a structure."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.mlp, self.wrap = Mlp(), wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.mlp(x))


class Structured(nn.Module):
    """Blocks whose outputs are dataclasses, dicts and nested tuples, and so is the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                ReturnsStructure(lambda x: Pair(x.tanh(), [x])),
                ReturnsStructure(lambda x: {"hidden": x, "deep": ([x.tanh()], 3)}),
                ReturnsStructure(lambda x: OrderedDict(hidden=x, note="text")),
            ]
        )

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        first = self.blocks[0](x)
        second = self.blocks[1](first.hidden + first.extra[0])
        third = self.blocks[2](second["hidden"] + second["deep"][0][0])
        return {"result": Pair(third["hidden"], [])}


class ChangedInPlace(nn.Module):
    """Linears over sequences, whose outputs are views, and a view of several; their caller changes each in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.last = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1).repeat(1, 2, 1)
        first = self.linears[0](x)
        first[..., :2] += x[..., :2]
        second = torch.relu_(self.linears[1](first))
        third = self.linears[2](second)
        third.view(-1).mul_(2)
        fourth = self.linears[3](third)
        fourth += third
        return self.last(fourth).tanh_()


def _frozen_first() -> nn.Module:
    model = Stack()
    for module in (model.inner, model.blocks[0], model.blocks[1]):
        module.requires_grad_(False)
    return model


def _frozen_middle() -> nn.Module:
    model = Stack()
    model.blocks[1].requires_grad_(False)
    return model


def _sequence(*blocks: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(block() for block in blocks))


def _skips(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Rank 1 skips block 1 in even steps, everybody skips block 2 in odd ones."""
    skipped = {1} if batch.rank == 1 and batch.step % 2 == 0 else {2} if batch.step % 2 else set()
    select = tuple(index for index in range(4) if index not in skipped)
    return model(batch.normal(3, WIDTH), select).square().mean()


def _drops(model: nn.Module, batch: Batch) -> torch.Tensor:
    """All drop three blocks in a row, other ones in each step, rank 1 one more."""
    dropped = {(batch.step + index) % 6 for index in range(4 if batch.rank == 1 else 3)}
    return model(batch.normal(3, WIDTH), tuple(index for index in range(6) if index not in dropped)).square().mean()


def _structured_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch.normal(3, WIDTH))["result"].hidden.square().mean()


def _checkpointed(reentrant: bool, segment: int) -> Task:
    return Task(lambda: Checkpointed(reentrant, segment), square_loss)


def _trained_inside() -> nn.Module:
    """As adapters under a frozen embedding and head, whose output is made to require a gradient."""
    model = Checkpointed(reentrant=True, segment=3)
    for module in (model.inner, model.outer):
        module.requires_grad_(False)
    model.inner.register_forward_hook(lambda module, args, output: output.requires_grad_())
    return model


def _tiny_transformer() -> nn.Module:
    return Transformer(depth=2)


STRUCTURES: dict[str, Task] = {
    "embedding tied to head": TIED_TRANSFORMER,
    "untied, rows that don't divide": Task(_tiny_transformer, language_loss),
    "two blocks share a Linear": Task(SharedAcrossBlocks, square_loss),
    "checkpoint each block": _checkpointed(False, 1),
    "checkpoint each block, reentrant": _checkpointed(True, 1),
    "checkpoint segments of blocks": _checkpointed(False, 2),
    "checkpoint segments of blocks, reentrant": _checkpointed(True, 2),
    "checkpoint uneven segments, reentrant, which hold all that is trained": Task(_trained_inside, square_loss),
    "blocks called in rounds": Task(Rounds, square_loss),
    "one block called repeatedly": Task(OneBlockRepeated, square_loss),
    "no element, one element, no dim": Task(_sequence(Degenerate, Degenerate), square_loss),
    "float32 norms in a bf16 model": Task(_sequence(MixedDtypes, MixedDtypes, MixedDtypes), square_loss),
    "frozen base with adapters": Task(_sequence(Lora, Lora, Lora), square_loss),
    "frozen first layers": Task(_frozen_first, square_loss),
    "frozen middle layer": Task(_frozen_middle, square_loss),
    "nested repeated blocks": Task(Swin, square_loss),
    "parameters that nobody uses": Task(UnusedHead, square_loss),
    "a block skipped on one rank, and on all": Task(Stack, _skips),
    "blocks that return their input, more of them on one rank": Task(DropsBlocks, _drops),
    "structured outputs": Task(Structured, _structured_loss),
    "outputs changed in place": Task(ChangedInPlace, square_loss),
    "a single Linear": Task(lambda: nn.Linear(WIDTH, 1), square_loss),
    "functional use of own weight": Task(lambda: _Functional(), square_loss),
}


class _Functional(nn.Module):
    """Blocks that use their child's weight without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mlp(), Mlp(), Mlp()])
        self.readers = nn.ModuleList([_ReadsChild(), _ReadsChild()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in [*self.blocks, *self.readers]:
            x = module(x)
        return x


class _ReadsChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.child.weight.t()) + self.child.bias
