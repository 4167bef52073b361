"""The head in fp8, by itself or beside the blocks: what it computes at each stage, tied to the embedding and not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.fp8_model import BLOCK, Block, adamw, codes_are_those_of_whole_weights, recipe, trained_in_codes
from tests.support.measure import forget_sent, sent
from zeroshard.errors import PlanError
from zeroshard.fp8.convert import choose, convert
from zeroshard.fp8.linear import Fp8Linear
from zeroshard.fp8.recipe import Fp8, Products, Scaling
from zeroshard.plan.traffic import step_traffic

TOKENS = 256
HEAD = Fp8(names=("lm_head",))
WAYS = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
Trained = tuple[list[float], dict[str, torch.Tensor]]


class Language(nn.Module):
    """Embedding, two blocks and a head of its own or the embedding's."""

    def __init__(self, *, tied: bool, reads: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(TOKENS, BLOCK), nn.ModuleList(Block(BLOCK) for _ in range(2))
        self.lm_head = nn.Linear(BLOCK, TOKENS, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight
        self.reads = reads
        """Compute the logits of the head's weight, as fused losses do, and never call the head."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(x, self.lm_head.weight) if self.reads else self.lm_head(x)
        return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def _build(*, tied: bool, reads: bool = False) -> Language:
    torch.manual_seed(5)
    return Language(tied=tied, reads=reads)


def _ids(step: int, rank: int) -> torch.Tensor:
    return torch.randint(TOKENS, (2, 7), generator=torch.Generator().manual_seed(10 * step + rank))


def _train(rank: int, world: int, stage: int, fp8: Fp8, tied: bool, reads: bool = False) -> Trained:
    model: Any = _build(tied=tied, reads=reads)
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), plan=recipe(stage, fp8=fp8))
    assert optimizer is not None
    plan = zeroshard.plan_of(model)
    resting = {segment.name for _, group in plan.groups() if group.scaled for segment in group.layout.segments}
    assert ("lm_head.weight" in resting) == (not tied)
    assert isinstance(model.lm_head, Fp8Linear)
    losses: list[float] = []
    for step in range(3):
        forget_sent(model)
        loss = model(_ids(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    zeroshard.drain(model)
    assert sent(model) == step_traffic(zeroshard.plan_of(model))
    weights = {name: value.clone() for name, value in zeroshard.iterate_full_parameters(model)}
    codes_are_those_of_whole_weights(model, weights)
    zeroshard.close(model)
    return losses, weights


def _alone(*, tied: bool) -> Trained:
    """Plain torch: the head multiplies in fp8; if it is tied, codes are made of the weight in bf16."""
    truth, model = _build(tied=tied), _build(tied=tied).bfloat16()
    convert(model, Products(Scaling.TENSORWISE, ("lm_head",)))
    return trained_in_codes(truth, model, 3, lambda step: model(_ids(step, 0)), ("lm_head",))


@WAYS
@pytest.mark.parametrize("stage", [0, 3])
def test_a_head_alone_in_fp8_computes_what_plain_torch_does(stage: int, tied: bool) -> None:
    losses, weights = run_ranks(1, _train, stage, HEAD, tied)[0]
    expected_losses, expected = _alone(tied=tied)
    assert losses == expected_losses
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-7)


def _stages(rank: int, world: int, fp8: Fp8, tied: bool, reads: bool = False) -> list[Trained]:
    return [_train(rank, world, stage, fp8, tied, reads) for stage in range(4)]


def _same(found: list[list[Trained]]) -> None:
    for (losses, weights), *others in found:
        for other_losses, other in others:
            assert other_losses == losses
            assert all(torch.equal(other[name], value) for name, value in weights.items())


@WAYS
@pytest.mark.parametrize("names", [("lm_head",), ("lm_head", "blocks")], ids=["alone", "beside the blocks"])
@pytest.mark.parametrize("scaling", [Scaling.TENSORWISE, Scaling.BLOCKWISE])
def test_a_head_in_fp8_has_the_same_bits_at_all_stages(scaling: Scaling, names: tuple[str, ...], tied: bool) -> None:
    _same(run_ranks(2, _stages, Fp8(scaling, names), tied))


@WAYS
def test_a_loss_that_reads_the_heads_weight_has_the_same_bits_at_all_stages(tied: bool) -> None:
    _same(run_ranks(2, _stages, HEAD, tied, True))


def test_auto_among_the_names_chooses_besides() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict(
            {
                "blocks": nn.ModuleList(nn.ModuleDict({"wide": nn.Linear(4096, 4096)}) for _ in "ab"),
                "small": nn.Linear(4096, 64),
                "lm_head": nn.Linear(4096, 32000),
            }
        )
    for names, expected in (
        (None, {"blocks.0.wide", "blocks.1.wide"}),
        (("auto", "lm_head"), {"blocks.0.wide", "blocks.1.wide", "lm_head"}),
        (("lm_head",), {"lm_head"}),
    ):
        assert {choice.name for choice in choose(model, Fp8(names=names, tokens=65536)) if choice.taken} == expected


def test_a_named_head_that_cannot_multiply_in_fp8_is_refused() -> None:
    model = nn.ModuleDict({"model": nn.ModuleDict({"lm_head": nn.Linear(32, 50257)})})
    with pytest.raises(PlanError, match=r"'model\.lm_head' can't compute in fp8: its sizes 50257 x 32 are no"):
        choose(model, HEAD)
    with pytest.raises(PlanError, match="stays in float32"):
        choose(_build(tied=False), HEAD, kept=("lm_head",))
    reasons = {choice.name: choice.why for choice in choose(_build(tied=True), HEAD)}
    assert reasons["lm_head"] == "named, and cast in each forward, for its weight is tied"
