"""A small transformer, how it is divided over an axis of tensor parallelism, and training it in one process or many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroshard
from tests.support.one_process import CLIP, State, Step, alone

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 16, 16, 4, 8, 2
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    """Causal attention over as many heads as the projections give."""

    def __init__(self) -> None:
        super().__init__()
        # Without a bias: that of keys changes nothing, and Adam would follow what rounding makes of its gradient.
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v)]
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp_norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build() -> Transformer:
    """The same model in every process."""
    torch.manual_seed(0)
    return Transformer()


def tokens(step: int, data: int) -> torch.Tensor:
    """What data rank `data` reads in a step, and behind each the one to be foretold."""
    generator = torch.Generator().manual_seed(1000 * step + data)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def divide(model: nn.Module, axis: DeviceMesh, *, sequence: bool = False, loss_parallel: bool = False) -> nn.Module:
    """The model over an axis, in the way of Megatron; with `sequence` the norms work on a part of the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    between = Shard(1) if sequence else Replicate()
    logits: dict[str, Any] = {"output_layouts": Shard(-1), "use_local_output": False}
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between, **(logits if loss_parallel else {"output_layouts": Replicate()})
        ),
    }
    for index in range(2):
        block = f"blocks.{index}"
        plan |= {f"{block}.attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {f"{block}.attention.o": RowwiseParallel(output_layouts=between)}
        plan |= {f"{block}.mlp.up": ColwiseParallel(), f"{block}.mlp.down": RowwiseParallel(output_layouts=between)}
        if sequence:
            whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            plan |= {f"{block}.{name}_norm": SequenceParallel() for name in ("attention", "mlp")}
            plan |= {f"{block}.attention": whole, f"{block}.mlp": whole}
    if sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, axis, plan)
    return model


def in_one_process(
    data_ranks: int, steps: int = 3, lr: float = 1e-3, made: Callable[[], nn.Module] = build, clip: float = CLIP
) -> tuple[list[Step], State]:
    """Losses, norms and parameters of a run on all data in one process, without zeroshard."""

    def losses(model: nn.Module, step: int) -> Iterator[torch.Tensor]:
        yield torch.stack([loss_of(model, tokens(step, data)) for data in range(data_ranks)]).mean()

    return alone(made(), losses, steps, lr=lr, clip=clip)


@dataclass(frozen=True)
class Layout:
    """How ranks are divided, and what ZeRO does on the data axes."""

    data: int
    tensor: int
    stage: int

    def __str__(self) -> str:
        return f"dp {self.data} x tp {self.tensor}, stage {self.stage}"

    @property
    def reader(self) -> int:
        """This rank's number among those that read different data."""
        return dist.get_rank() // self.tensor


def sharded(
    layout: Layout, *, sequence: bool = False, lr: float = 1e-3, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model on all ranks in a layout."""
    mesh = init_device_mesh("cpu", (layout.data, layout.tensor), mesh_dim_names=("dp_shard", "tp"))
    model = build()
    if layout.tensor > 1:
        divide(model, mesh["tp"], sequence=sequence)
    given = {"plan": layout.stage, "clip_norm": CLIP, **options}
    return zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=lr), mesh=mesh, **given)


def loss_of_part(window: slice) -> Loss:
    """The loss of a rank that has a part of each sequence."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch[:, :-1][:, window]).flatten(0, 1), batch[:, 1:][:, window].flatten())

    return loss


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, reader: int, steps: Sequence[int], loss: Loss = loss_of
) -> list[Step]:
    """Losses and norms as one process would see them.

    Args:
        reader: this rank's number among those that read different data.
    """
    found: list[Step] = []
    for step in steps:
        value = loss(model, tokens(step, reader))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = value.detach().clone()
        dist.all_reduce(mean)
        norm = zeroshard.get_global_grad_norm(model)
        assert norm is not None
        found.append((float(mean) / dist.get_world_size(), norm))
    return found


def assert_close(
    found: tuple[list[Step], dict[str, torch.Tensor]], wanted: tuple[list[Step], dict[str, torch.Tensor]], what: object
) -> None:
    """Losses, norms and parameters within 1e-6."""
    for (loss, norm), (other_loss, other_norm) in zip(found[0], wanted[0], strict=True):
        assert abs(loss - other_loss) < 1e-6, f"{what}: loss {loss}, in one process {other_loss}"
        assert abs(norm - other_norm) < 1e-6 * max(1.0, other_norm), f"{what}: norm {norm}, {other_norm}"
    for name, value in wanted[1].items() if found[1] else ():
        if name.endswith(".exp_avg_sq") and name not in found[1]:
            continue
        difference = float((found[1][name] - value).abs().max())
        assert difference < 1e-6, f"{what}: {name} differs by {difference}"


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and moments, whole."""
    found = dict(zeroshard.full_state_dict(model))
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            value = zeroshard.safe_get_full_optimizer_state(parameter, key)
            assert value is not None
            found[f"{name}.{key}"] = value
    return found


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: object) -> None:
    """Every tensor that both have, bit for bit."""
    for name, value in wanted.items():
        assert name not in found or torch.equal(found[name], value), f"{what}: {name}"
