"""On GPUs: a step that is replayed as a CUDA graph computes what the same step does without one, bit for bit.

Run by `pytest tests/gpu` on a machine with GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from benchmarks.llama import Llama
from tests.gpu.test_training import BACKEND, BATCH, GPUS, LENGTH, SHAPE, on_gpu
from tests.support.distributed import run_ranks
from zeroshard.errors import UsageError, ZeroShardWarning

pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
STEPS = 12
Between = Callable[[int, nn.Module], object]


def _recipe(stage: int, micro: int, *, peer_copies: bool | None = None) -> zeroshard.Recipe:
    policy = zeroshard.ExecutionPolicy(clip_norm=0.5, accumulate=micro > 1, overlap_step=True)
    precision = zeroshard.Precision(param="bf16")
    return zeroshard.Recipe(zeroshard.STAGES[stage], precision=precision, policy=policy, peer_copies=peer_copies)


def _train(
    rank: int,
    *,
    graphed: bool,
    stage: int = 3,
    micro: int = 1,
    peer_copies: bool | None = None,
    between: Between = lambda step, model: None,
    lengths: tuple[int, ...] = (LENGTH,),
    graphs: int = 1,
) -> tuple[list[float], torch.Tensor]:
    device = torch.device("cuda", rank)
    torch.manual_seed(0)
    with zeroshard.Init(device=device):
        model = Llama(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    recipe = _recipe(stage, micro, peer_copies=peer_copies)
    model, optimizer = zeroshard.shard(model, optimizer, plan=recipe, device=device)

    def train(batches: list[torch.Tensor]) -> torch.Tensor:
        loss = torch.zeros(())
        for ids in batches:
            loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
            (loss / micro).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step: Any = zeroshard.GraphedStep(model, train) if graphed else train
    generator = torch.Generator().manual_seed(rank)
    losses: list[torch.Tensor] = []
    for index in range(STEPS):
        size = (BATCH, lengths[index % len(lengths)] + 1)
        batches = [torch.randint(SHAPE.vocabulary, size, generator=generator).to(device) for _ in range(micro)]
        losses.append(step(batches))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / (index + 1)  # a graph must read what is new
        between(index, model)
    whole = [value.detach().float().flatten().cpu() for _, value in zeroshard.iterate_full_parameters(model)]
    if graphed:
        assert step.graphs == graphs
    zeroshard.close(model)
    return [float(loss) for loss in losses], torch.cat(whole)


def _compare(rank: int, **options: Any) -> None:
    losses, parameters = _train(rank, graphed=True, **options)
    options.pop("graphs", None)
    expected, wanted = _train(rank, graphed=False, **options)
    assert losses == expected, f"{options}: {losses} against {expected}"
    assert torch.equal(parameters, wanted), options
    assert len(set(losses)) > STEPS // 2


def _use_between(step: int, model: nn.Module) -> None:
    """What people do between steps; each leaves the slots in another state than a step does."""
    if step == 9:
        with torch.no_grad():
            ids = torch.arange(2 * LENGTH, device="cuda").reshape(2, LENGTH) % SHAPE.vocabulary
            model(ids, ids)
    if step == 4:
        with zeroshard.GatheredParameters(list(model.parameters())[:3], modifier_rank=0):
            for parameter in list(model.parameters())[:3]:
                parameter.data.mul_(0.5)
    if step == 5:  # memory moves: the graph is of no use any more, another one is captured
        zeroshard.offload_states(model)
        zeroshard.reload_states(model)


def _all(rank: int, world: int) -> None:
    on_gpu(rank)
    for stage, micro in ((3, 1), (3, 2), (2, 1), (1, 2)):
        _compare(rank, stage=stage, micro=micro)
    _compare(rank, peer_copies=False)
    _compare(rank, lengths=(LENGTH, LENGTH // 2), graphs=2)
    _compare(rank, between=_use_between)


@pytest.mark.parametrize("world", sorted({1, GPUS}))
def test_a_replayed_step_gives_the_same_bits(world: int) -> None:
    run_ranks(world, _all, backend=BACKEND, timeout=240)


def _engine(rank: int, graphed: bool, micro: int, half: str) -> tuple[list[float], torch.Tensor, tuple[Any, ...]]:
    torch.manual_seed(0)
    device = torch.device("cuda", rank)
    with zeroshard.Init(device=device):
        model = Llama(SHAPE)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": micro,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 3},
        half: {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": STEPS, "warmup_type": "linear"}},
    }
    engine, *_ = zeroshard.initialize(model=model, config=config)

    def train(batches: list[torch.Tensor]) -> torch.Tensor:
        loss = torch.zeros(())
        for ids in batches:
            loss = engine(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
            engine.backward(loss)
            engine.step()
        return loss.detach()

    step: Any = zeroshard.GraphedStep(engine, train, required=True) if graphed else train
    generator = torch.Generator().manual_seed(rank)
    losses: list[torch.Tensor] = []
    for index in range(STEPS):
        batches = [torch.randint(SHAPE.vocabulary, (BATCH, LENGTH + 1), generator=generator) for _ in range(micro)]
        losses.append(step([ids.to(device) for ids in batches]))
        if index == 7:
            engine.eval()
            with torch.no_grad():
                engine(*(batches[0][:, :-1].contiguous().to(device),) * 2)
            engine.train()
    whole = [value.detach().float().flatten().cpu() for _, value in zeroshard.iterate_full_parameters(engine.module)]
    counters = (engine.micro_steps, engine.global_steps, engine.global_samples, engine.skipped_steps, engine.get_lr())
    assert not graphed or step.graphs == 1
    engine.destroy()
    return [float(loss) for loss in losses], torch.cat(whole), counters


def _engines(rank: int, world: int) -> None:
    on_gpu(rank)
    for micro, half in ((1, "bf16"), (2, "bf16"), (1, "fp16")):
        losses, parameters, counters = _engine(rank, True, micro, half)
        expected, wanted, counted = _engine(rank, False, micro, half)
        assert (losses, counters) == (expected, counted)
        assert torch.equal(parameters, wanted)


def test_an_engine_in_a_replayed_step_has_the_same_bits_counters_and_rates() -> None:
    run_ranks(GPUS, _engines, backend=BACKEND, timeout=240)


def _refusals(rank: int, world: int) -> None:
    on_gpu(rank)
    device = torch.device("cuda", rank)
    model = nn.Linear(8, 8, device=device)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), plan=3, device=device)

    def train(x: torch.Tensor) -> float:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step, x = zeroshard.GraphedStep(model, train, required=True), torch.ones(4, 8, device=device)
    before = [step(x) for _ in range(3)]
    with pytest.raises(UsageError, match=r"can't be captured.*item"):
        step(x)
    goes_on = zeroshard.GraphedStep(model, train)
    after = [goes_on(x) for _ in range(3)]
    with pytest.warns(ZeroShardWarning, match=r"can't be captured.*goes on without a graph"):
        after.append(goes_on(x))
    after += [goes_on(x) for _ in range(3)]
    assert sorted(before + after, reverse=True) == before + after
    assert len(set(after)) == len(after)
    zeroshard.close(model)


def test_a_step_that_waits_for_the_device_goes_on_ungraphed_or_is_refused_and_nothing_is_lost() -> None:
    run_ranks(GPUS, _refusals, backend=BACKEND, timeout=60)
