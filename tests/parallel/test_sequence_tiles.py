"""Work in tiles computes what work on the whole sequence does, at all stages, and the whole never stands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.parallel_model import VOCABULARY, WIDTH, Block, Mlp, Transformer, build
from zeroshard.errors import UsageError

pytest.importorskip("deepspeed", reason="zeroshard-deepspeed (compat/deepspeed) is not installed")

SAMPLES, TOKENS = 2, 13
CLIP = 0.5


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, VOCABULARY, (SAMPLES, TOKENS), generator=generator)
    labels = ids.roll(-1, 1)
    labels[0, :9] = -100  # the first tiles have no labels at all
    return ids, labels


class WithLoss(nn.Module):
    """A transformer that returns its loss, in tiles or not."""

    def __init__(self, model: Transformer, tiles: int) -> None:
        super().__init__()
        self.inner, self.tiles = model, tiles

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.inner.embedding(ids)
        for block in self.inner.blocks:
            assert isinstance(block, Block)
            x = x + block.attention(block.attention_norm(x))
            x = x + self._mlp(block.mlp, block.mlp_norm(x))
        x = self.inner.norm(x)
        if not self.tiles:
            return _loss(self.inner, x.flatten(0, 1), labels.flatten())
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

        return TiledFusedLogitsLoss.apply(_loss, self.inner, x, labels, None, self.tiles, None, "mean")

    def _mlp(self, mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

        if not self.tiles:
            return mlp(x)
        return TiledMLP.apply(Mlp.forward, mlp, x, self.tiles, [mlp.up.weight])


def _loss(model: Transformer, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.head(x), labels)


class Largest(TorchDispatchMode):
    """Notes the most tokens of which logits stand."""

    tokens = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() > 1 and result.shape[-1] == 3 * VOCABULARY:
            tokens = result.numel() // result.shape[-1]
            self.tokens = max(self.tokens, tokens if result.shape[0] != WIDTH else 0)  # else it is the weight
        return result


def _trains(rank: int, world: int) -> None:
    for stage in range(4):
        plain, optimizer = WithLoss(build(), 0), None
        tiled = WithLoss(build(), 4)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        engine, *_ = zeroshard.initialize(
            model=tiled,
            optimizer=torch.optim.AdamW(tiled.parameters(), lr=1e-3),
            config={
                "train_micro_batch_size_per_gpu": SAMPLES,
                "gradient_clipping": CLIP,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            },
        )
        for step in range(2):
            wanted = torch.stack([plain(*_batch(step, data)) for data in range(world)])
            wanted.mean().backward()
            norm = float(nn.utils.clip_grad_norm_(plain.parameters(), CLIP))
            optimizer.step()
            optimizer.zero_grad()
            loss = engine(*_batch(step, rank))
            assert abs(float(loss.detach()) - float(wanted[rank].detach())) < 1e-6, (stage, step)
            engine.backward(loss)
            engine.step()
            found = engine.get_global_grad_norm()
            assert found is not None
            assert abs(found - norm) < 1e-6, (stage, step, found, norm)
        engine.destroy()


def test_a_model_in_tiles_trains_as_the_whole_does_at_all_stages() -> None:
    run_ranks(2, _trains)


@pytest.mark.parametrize("masked", [False, True])
def test_a_loss_in_tiles_has_the_gradients_of_the_whole_and_never_its_logits(masked: bool) -> None:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    torch.manual_seed(0)
    head = nn.Linear(WIDTH, 3 * VOCABULARY)
    hidden = torch.randn(SAMPLES, TOKENS, WIDTH, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (SAMPLES, TOKENS))
    labels[1, 4:] = -100
    mask = (torch.rand(SAMPLES, TOKENS) > 0.3) if masked else None

    def loss_of(module: nn.Linear, x: torch.Tensor, y: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        y = y if kept is None else torch.where(kept, y, -100)
        return F.cross_entropy(module(x), y)

    flat = None if mask is None else mask.flatten()
    wanted = loss_of(head, hidden.flatten(0, 1), labels.flatten(), flat)
    gradients = torch.autograd.grad(wanted, [hidden, head.weight])
    with Largest() as seen:
        found = TiledFusedLogitsLoss.apply(loss_of, head, hidden, labels, mask, 5)
        of_tiles = torch.autograd.grad(found, [hidden, head.weight])
    assert abs(float(found) - float(wanted)) < 1e-6
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(of_tiles, gradients, strict=True))
    assert seen.tokens == 6  # of 26
    total = TiledFusedLogitsLoss.apply(
        lambda module, x, y: F.cross_entropy(module(x), y, reduction="sum"), head, hidden, labels, None, 3, None, "sum"
    )
    whole = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
    assert torch.allclose(total, whole)


def test_any_function_of_tokens_is_computed_in_tiles() -> None:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import SequenceTiledCompute, sequence_tiled_compute

    x = torch.randn(SAMPLES, TOKENS, WIDTH, requires_grad=True)
    labels = torch.randint(0, WIDTH, (SAMPLES, TOKENS))
    labels[:, 2:] = -100

    def scaled(x: torch.Tensor, bias: torch.Tensor | None, factor: float) -> torch.Tensor:
        assert bias is None
        return x * factor

    parts: dict[str, torch.Tensor | None] = {"x": x, "bias": None}
    found = sequence_tiled_compute(scaled, TOKENS, 4, parts, {"factor": 2.0}, "x")
    assert torch.equal(found, 2 * x)

    def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.view(-1, WIDTH), labels.view(-1))

    wanted = loss(x, labels)
    found = SequenceTiledCompute.apply(loss, TOKENS, 99, ["x", "labels"], [], "x", None, 0, "mean", x, labels)
    assert torch.allclose(found, wanted)
    assert torch.allclose(torch.autograd.grad(found, x)[0], torch.autograd.grad(wanted, x)[0], atol=1e-7)
    with pytest.raises(UsageError, match="seqlen is 12, but x has 13 tokens"):
        sequence_tiled_compute(scaled, 12, 2, {"x": x}, {})
    with pytest.raises(UsageError, match="a sequence in 0 tiles"):
        sequence_tiled_compute(scaled, TOKENS, 0, {"x": x}, {})
    with pytest.raises(UsageError, match="output_reduction is 'max'"):
        sequence_tiled_compute(loss, TOKENS, 2, {"x": x, "labels": labels}, {}, output_reduction="max")
