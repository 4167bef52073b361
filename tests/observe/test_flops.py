"""FLOPs are those of the analytic count: dense, attention, experts, accumulation, checkpointing; rates follow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

import zeroshard
from tests.support.distributed import run_ranks
from tests.test_initialize import ADAMW
from zeroshard.errors import UsageError, ZeroShardWarning
from zeroshard.observe.flops.counter import _MORE
from zeroshard.observe.flops.step import StepFlops

WIDTH, HIDDEN, HEADS, EXPERTS, LENGTH, BATCH, LAYERS = 32, 64, 4, 4, 16, 2, 3
CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": BATCH, "optimizer": ADAMW}
TOKENS = BATCH * LENGTH


class Block(nn.Module):
    """Attention and a part of two products, of the expert that each token chooses where there are experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, experts) if experts > 1 else None
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        if self.router is None:
            return x + self.experts[0](x)
        flat = x.reshape(-1, WIDTH)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        mixed = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            mixed = mixed.index_add(0, rows, expert(flat[rows]) * weight[rows].unsqueeze(-1))
        return x + mixed.view_as(x)


class Model(nn.Module):
    def __init__(self, experts: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(experts) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def forward_flops(experts: int = 1) -> int:
    """By hand: two FLOPs for each multiplication; each token sees one expert, and all of them where it is chosen."""
    weights = WIDTH * 3 * WIDTH + WIDTH * WIDTH + 2 * WIDTH * HIDDEN + (WIDTH * experts if experts > 1 else 0)
    attention = 2 * 2 * BATCH * LENGTH * LENGTH * WIDTH
    return LAYERS * (2 * TOKENS * weights + attention)


def _counted(case: dict[str, Any], experts: int) -> tuple[int, int, int, float]:
    """FLOPs of one step's forward, backward and what was computed again, and FLOPs of a sample."""
    torch.manual_seed(0)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {**CONFIG, "zero_optimization": zero, "flops_profiler": {"enabled": True, "detailed": False}, **case}
    engine, *_ = zeroshard.initialize(model=Model(experts), config=config)
    (flops,) = (listener for listener in engine._observer._listeners if isinstance(listener, StepFlops))
    for _ in range(2):
        counter = flops.counter
        for _ in range(engine.gradient_accumulation_steps()):
            x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)  # so that the first layer has a whole backward
            engine.backward(engine(x).float().square().mean())
            engine.step()
    assert counter is not None, "the second step is counted"
    assert flops.counter is None, "and no other"
    per_sample = engine.tput_timer.flops_per_sample
    assert engine.tput_timer.avg_tflops() > 0
    engine.destroy()
    return counter.forward, counter.backward, counter.again, per_sample


def _compare_with_the_analytic_count(rank: int, world: int) -> None:
    cases: list[tuple[dict[str, Any], int, int]] = [
        ({}, 1, 1),
        ({}, EXPERTS, 1),
        ({"gradient_accumulation_steps": 3}, 1, 3),
        ({"activation_checkpointing": {"policy": "full"}}, 1, 1),
        ({"bf16": {"enabled": True}}, 1, 1),
    ]
    attention = LAYERS * 2 * BATCH * LENGTH * LENGTH * WIDTH  # its backward makes one product of the forward again
    last = LAYERS * 2 * TOKENS * HIDDEN * WIDTH  # whose output no backward needs, so torch does not compute it again
    for case, experts, micro_batches in cases:
        forward, backward, recomputed, per_sample = _counted(case, experts)
        expected = forward_flops(experts) * micro_batches
        again = expected - last if "activation_checkpointing" in case else 0
        assert forward == pytest.approx(expected, rel=0.01), case
        assert backward == pytest.approx(2 * expected + attention * micro_batches, rel=0.01), case
        assert recomputed == pytest.approx(again, rel=0.01), case
        assert per_sample == pytest.approx((forward + backward) / (BATCH * micro_batches)), case


def test_a_step_has_the_flops_of_the_analytic_count() -> None:
    run_ranks(2, _compare_with_the_analytic_count)


def test_the_count_is_printed_by_module_and_the_rate_with_the_progress(tmp_path: Path, capsys: Any) -> None:
    asked = {"enabled": True, "module_depth": 2, "top_modules": 2}
    for place in ({}, {"output_file": str(tmp_path / "flops.txt")}):
        config = {**CONFIG, "steps_per_print": 4, "flops_profiler": {**asked, **place}}
        engine, *_ = zeroshard.initialize(model=Model(), config=config)
        for _ in range(4):
            engine.backward(engine(torch.randn(BATCH, LENGTH, WIDTH)).square().mean())
            engine.step()
        engine.destroy()
        told = capsys.readouterr().out
        text = (tmp_path / "flops.txt").read_text() if place else told
        assert re.search(
            r"FLOPs of step 2 on each rank: forward \S+ MFLOPs, backward \S+ MFLOPs, computed again 0.00", text
        )
        assert "level 2: Model.blocks.0 " in text
        assert "level 3" not in text
        assert ("FLOPs of step" in told) is not bool(place)
        assert re.search(r"step 4: .* samples/s, .* TFLOP/s per rank", told)


@pytest.mark.parametrize("place", ["/dev/full", "none/flops.txt"])
def test_the_count_is_printed_where_its_file_cannot_be_written(tmp_path: Path, capsys: Any, place: str) -> None:
    profiled = {"enabled": True, "profile_step": 1, "output_file": str(tmp_path / place)}
    engine, *_ = zeroshard.initialize(model=Model(), config={**CONFIG, "flops_profiler": profiled})
    engine.backward(engine(torch.randn(BATCH, LENGTH, WIDTH)).square().mean())
    engine.step()
    engine.backward(engine(torch.randn(BATCH, LENGTH, WIDTH)).square().mean())
    with pytest.warns(ZeroShardWarning, match=r"flops_profiler\.output_file: .* can't be written: .*it is printed"):
        engine.step()
    engine.destroy()
    assert "FLOPs of step 2 on each rank" in capsys.readouterr().out


def test_a_model_is_profiled_by_one_call(tmp_path: Path, capsys: Any) -> None:
    model = Model()
    x = torch.randn(BATCH, LENGTH, WIDTH)
    flops, macs, params = zeroshard.get_model_profile(model, args=(x,), as_string=False, print_profile=False)
    assert flops == pytest.approx(forward_flops(), rel=0.01)
    assert macs == flops // 2
    assert params == sum(parameter.numel() for parameter in model.parameters())
    assert capsys.readouterr().out == ""
    words = zeroshard.get_model_profile(model, (BATCH, LENGTH, WIDTH), output_file=str(tmp_path / "profile"))
    assert words[0] == f"{flops / 1e6:.2f} MFLOPs"
    assert "Model" in (tmp_path / "profile").read_text()
    fewer, *_ = zeroshard.get_model_profile(
        model, args=(x,), as_string=False, print_profile=False, ignore_modules=[nn.Sequential]
    )
    assert flops - fewer == LAYERS * 2 * TOKENS * 2 * WIDTH * HIDDEN
    with pytest.raises(UsageError, match="give input_shape, args or kwargs"):
        zeroshard.get_model_profile(model)
    with pytest.raises(UsageError, match='mode="generate": Model has no generate'):
        zeroshard.get_model_profile(model, args=(x,), mode="generate")


KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")


@pytest.mark.parametrize("kernel", KERNELS)
def test_heads_of_queries_may_share_keys_in_every_kernel_of_attention(kernel: str) -> None:
    """As torch's own formulas have it where queries and keys have the same number of heads."""
    aten = torch.ops.aten
    forward = _MORE[getattr(aten, f"_scaled_dot_product_{kernel}")]
    backward = _MORE[getattr(aten, f"_scaled_dot_product_{kernel}_backward")]
    query, key, value, grad = (2, 8, 5, 16), (2, 8, 7, 16), (2, 8, 7, 4), (2, 8, 5, 4)
    assert forward(query, key, value) == sdpa_flop_count(query, key, value)
    assert backward(grad, query, key, value) == sdpa_backward_flop_count(grad, query, key, value)
    few_keys, few_values = (2, 2, 7, 16), (2, 2, 7, 4)
    assert forward(query, few_keys, few_values) == forward(query, key, value)
    assert backward(grad, query, few_keys, few_values) == backward(grad, query, key, value)
