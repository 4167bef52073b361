"""safe_get_* and safe_set_*: whole and local parameters, gradients and optimizer states while they are sharded."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.cases import sample
from tests.support.distributed import run_ranks
from tests.support.models import WIDTH, Batch, Task, square_loss
from tests.support.training import (
    Setting,
    adamw,
    assert_close,
    assert_same,
    build,
    full_parameters,
    sgd,
    shard_task,
)
from tests.support.zoo import Stack
from zeroshard.errors import UsageError, ZeroShardError
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.plan.builder import Precision, Recipe
from zeroshard.plan.placement import STAGES as SHARDING

STAGES = (0, 1, 2, 3)
TASK = Task(Stack, square_loss)
BF16 = Task(lambda: Stack().bfloat16(), lambda m, b: m(b.normal(3, WIDTH).bfloat16()).float().square().mean())


def _empty(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.numel() == 0]


def _backward(model: nn.Module, rank: int, step: int = 0, task: Task = TASK) -> None:
    task.loss(model, Batch(step, 0, rank)).backward()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int = 0, task: Task = TASK) -> None:
    _backward(model, rank, step, task)
    optimizer.step()
    optimizer.zero_grad()


def _joined(get: Callable[[nn.Parameter], torch.Tensor | None], parameter: nn.Parameter, stage: int) -> torch.Tensor:
    """The ranks' local parts one after the other."""
    part = get(parameter)
    assert part is not None
    parts: list[torch.Tensor | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, part)
    return torch.cat([p for p in parts if p is not None]) if stage else part


def _reads(rank: int, world: int) -> None:
    """Gets equal the unsharded run, and leave the parameters as they were."""
    plain = build(TASK)
    reference = adamw(plain)
    for member in range(world):
        (square_loss(plain, Batch(0, 0, member)) / world).backward()
    gradients = {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}
    reference.step()
    for stage in STAGES:
        model, optimizer = shard_task(TASK, Setting(plan=stage))
        named, sharded = dict(model.named_parameters()), _empty(model)
        assert all(zeroshard.safe_get_full_grad(p) is None for p in named.values()), "before the backward"
        _backward(model, rank)
        seen = {name: zeroshard.safe_get_full_grad(p) for name, p in named.items()}
        assert_close({n: g for n, g in seen.items() if g is not None}, gradients, what=f"stage {stage}")
        for name in gradients:
            local = _joined(zeroshard.safe_get_local_grad, named[name], stage)
            assert torch.equal(local, seen[name].reshape(-1)), (stage, name)  # type: ignore[union-attr]
        assert _empty(model) == sharded
        optimizer.step()
        optimizer.zero_grad()
        assert zeroshard.safe_get_full_grad(named["outer.weight"]) is None, "after the step"
        for name, parameter in plain.named_parameters():
            full = zeroshard.safe_get_full_fp32_param(named[name])
            torch.testing.assert_close(full, parameter.detach(), rtol=0, atol=1e-6)
            assert torch.equal(_joined(zeroshard.safe_get_local_fp32_param, named[name], stage), full.reshape(-1))
            for key in ("exp_avg", "exp_avg_sq"):
                state = zeroshard.safe_get_full_optimizer_state(named[name], key)
                assert state is not None
                torch.testing.assert_close(state, reference.state[parameter][key], rtol=1e-4, atol=1e-9)
                local = _joined(lambda p, k=key: zeroshard.safe_get_local_optimizer_state(p, k), named[name], stage)
                assert torch.equal(local, state.reshape(-1))
            assert optimizer.state[named[name]]["step"] == reference.state[parameter]["step"]
        with pytest.raises(UsageError, match=r"optimizer.state\[parameter\]\['exp_avg'\]: the state is flat"):
            optimizer.state[named["outer.weight"]]["exp_avg"]
        assert_same(full_parameters(model), {n: zeroshard.safe_get_full_fp32_param(p) for n, p in named.items()})
        assert _empty(model) == sharded
        with pytest.raises(UsageError, match="no state 'velocity'; it has exp_avg, exp_avg_sq"):
            zeroshard.safe_get_full_optimizer_state(named["outer.weight"], "velocity")
        _step(model, optimizer, rank, 1)
        zeroshard.close(model)


def test_gets_equal_the_unsharded_values_and_gather_nothing() -> None:
    run_ranks(2, _reads)


def _round_trips(rank: int, world: int) -> None:
    for task in (TASK, BF16):
        for stage in STAGES:
            model, optimizer = shard_task(task, Setting(plan=stage))
            _step(model, optimizer, rank, task=task)
            sharded = _empty(model)
            for number, (name, parameter) in enumerate([*model.named_parameters()][::3]):
                shape = zeroshard.safe_get_full_fp32_param(parameter).shape
                value = torch.randn(shape, generator=torch.Generator().manual_seed(number))
                zeroshard.safe_set_full_fp32_param(parameter, value)
                assert torch.equal(zeroshard.safe_get_full_fp32_param(parameter), value), (stage, name)
                part = zeroshard.safe_get_local_fp32_param(parameter)
                zeroshard.safe_set_local_fp32_param(parameter, part + 1.0)
                assert torch.equal(zeroshard.safe_get_full_fp32_param(parameter), value + 1.0), (stage, name)
                with zeroshard.GatheredParameters(parameter):
                    assert torch.equal(parameter.detach(), (value + 1.0).to(parameter.dtype)), (stage, name)
                for key in ("exp_avg", "exp_avg_sq"):
                    zeroshard.safe_set_full_optimizer_state(parameter, value.abs(), key)
                    local = zeroshard.safe_get_local_optimizer_state(parameter, key)
                    assert local is not None
                    zeroshard.safe_set_local_optimizer_state(parameter, local * 2.0, key)
                    state = zeroshard.safe_get_full_optimizer_state(parameter, key)
                    assert state is not None
                    assert torch.equal(state, value.abs() * 2.0), (stage, name)
            assert _empty(model) == sharded
            _backward(model, rank, 1, task)
            for name, parameter in [*model.named_parameters()][1::3]:
                gradient = zeroshard.safe_get_full_grad(parameter)
                if gradient is None:
                    continue
                value = torch.linspace(-1, 1, gradient.numel()).view(gradient.shape).bfloat16().float()
                zeroshard.safe_set_full_grad(parameter, value)
                assert torch.equal(zeroshard.safe_get_full_grad(parameter), value), (stage, name)  # type: ignore[arg-type]
                part = zeroshard.safe_get_local_grad(parameter)
                assert part is not None
                zeroshard.safe_set_local_grad(parameter, part * 2.0)
                assert torch.equal(zeroshard.safe_get_full_grad(parameter), value * 2.0), (stage, name)  # type: ignore[arg-type]
            optimizer.step()
            zeroshard.close(model)


def test_what_was_set_is_got_at_every_stage_in_fp32_and_bf16() -> None:
    run_ranks(2, _round_trips)


def _followed(rank: int, world: int) -> None:
    """Training after sets equals unsharded training after the same changes."""
    plain = build(TASK)
    reference = adamw(plain)
    for step in range(3):
        for member in range(world):
            (square_loss(plain, Batch(step, 0, member)) / world).backward()
        if step == 1:
            plain.get_parameter("inner.weight").grad.mul_(3.0)  # type: ignore[union-attr]
        reference.step()
        reference.zero_grad()
        if step == 0:
            with torch.no_grad():
                plain.get_parameter("outer.weight").mul_(0.5)
                reference.state[plain.get_parameter("outer.bias")]["exp_avg"].fill_(0.25)
    for stage in STAGES:
        model, optimizer = shard_task(TASK, Setting(plan=stage))
        named, norm = dict(model.named_parameters()), 0.0
        for step in range(3):
            _backward(model, rank, step)
            if step == 1:
                zeroshard.get_global_grad_norm(model)
                zeroshard.clip_grad_norm_(model, float("inf"))  # measured before the change, so to be measured again
                gradient = zeroshard.safe_get_full_grad(named["inner.weight"])
                assert gradient is not None
                zeroshard.safe_set_full_grad(named["inner.weight"], gradient * 3.0)
                norm = zeroshard.clip_grad_norm_(model, float("inf"))
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                assert zeroshard.get_global_grad_norm(model) == pytest.approx(norm)
            if step == 0:
                half = zeroshard.safe_get_full_fp32_param(named["outer.weight"]) * 0.5
                # rank 0's value counts; the others give nonsense
                zeroshard.safe_set_full_fp32_param(named["outer.weight"], half if rank == 0 else half * 0)
                full = torch.full((WIDTH,), 0.25)
                zeroshard.safe_set_full_optimizer_state(named["outer.bias"], full, "exp_avg")
        assert_close(full_parameters(model), dict(plain.named_parameters()), 2e-6, what=f"stage {stage}")
        zeroshard.close(model)


def test_the_next_forward_and_step_see_what_was_set() -> None:
    run_ranks(2, _followed)


def _pending(rank: int, world: int) -> None:
    """Amid an accumulation, under no_sync too, gets give the sum so far and sets replace it."""
    for stage in STAGES:
        for local in (False, True):
            model, optimizer = shard_task(TASK, Setting(plan=stage, micro=2, optimizer=sgd))
            parameter = dict(model.named_parameters())["outer.weight"]
            expected = build(TASK)
            for member in range(world):
                (square_loss(expected, Batch(0, 0, member)) / world).backward()
            first = expected.get_parameter("outer.weight").grad
            assert first is not None
            if local:
                with zeroshard.no_sync(model):
                    _backward(model, rank)
            else:
                _backward(model, rank)
            for _ in range(2):
                seen = zeroshard.safe_get_full_grad(parameter)
                assert seen is not None
                torch.testing.assert_close(seen, first, rtol=0, atol=1e-6)
            zeroshard.safe_set_full_grad(parameter, torch.ones(WIDTH, WIDTH))
            assert bool((zeroshard.safe_get_full_grad(parameter) == 1.0).all())  # type: ignore[union-attr]
            _backward(model, rank)
            both = zeroshard.safe_get_full_grad(parameter)
            assert both is not None
            torch.testing.assert_close(both, first + 1.0, rtol=0, atol=1e-6)
            optimizer.step()
            optimizer.zero_grad()
            zeroshard.close(model)


def test_gradients_amid_an_accumulation() -> None:
    run_ranks(2, _pending)


def _special(rank: int, world: int) -> None:
    """Loss scale, split masters, frozen and foreign parameters, an optimizer that makes its state late."""
    for stage in (1, 3):
        scaler = LossScaler(torch.device("cpu"), dynamic=False, initial=1024.0)
        model = build(TASK)
        recipe = Recipe(sharding=SHARDING[stage], precision=Precision(param="bf16", master="int16"))
        model.get_parameter("inner.bias").requires_grad_(False)
        late = torch.optim.Adamax([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        fixed = model.get_parameter("inner.bias").detach().clone()
        model, optimizer = zeroshard.shard(model, late, plan=stage, scaler=scaler)
        named = dict(model.named_parameters())
        assert zeroshard.safe_get_full_optimizer_state(named["outer.weight"], "exp_inf") is None
        (square_loss(model, Batch(0, 0, rank)) * 1024.0).backward()
        twin = build(TASK)
        for member in range(world):
            (square_loss(twin, Batch(0, 0, member)) / world).backward()
        seen = zeroshard.safe_get_full_grad(named["outer.weight"])
        torch.testing.assert_close(seen, twin.get_parameter("outer.weight").grad, rtol=0, atol=1e-6)
        assert zeroshard.safe_get_full_grad(named["inner.bias"]) is None
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(zeroshard.safe_get_full_fp32_param(named["inner.bias"]), fixed)
        zeroshard.safe_set_full_fp32_param(named["inner.bias"], fixed + 1.0)
        assert torch.equal(zeroshard.safe_get_full_fp32_param(named["inner.bias"]), fixed + 1.0)
        assert zeroshard.safe_get_full_optimizer_state(named["inner.bias"], "exp_inf") is None
        zeroshard.safe_set_full_optimizer_state(named["outer.weight"], torch.ones(WIDTH, WIDTH), "exp_inf")
        state = zeroshard.safe_get_full_optimizer_state(named["outer.weight"], "exp_inf")
        assert state is not None
        assert bool((state == 1.0).all())
        zeroshard.close(model)

        model = build(TASK)
        model, _ = zeroshard.shard(model, plan=recipe)
        value = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
        parameter = dict(model.named_parameters())["outer.weight"]
        zeroshard.safe_set_full_fp32_param(parameter, value)
        assert torch.equal(zeroshard.safe_get_full_fp32_param(parameter), value), "bf16 and its remainder are exact"
        zeroshard.safe_set_local_fp32_param(parameter, zeroshard.safe_get_local_fp32_param(parameter) * 3.0)
        assert torch.equal(zeroshard.safe_get_full_fp32_param(parameter), value * 3.0)
        zeroshard.close(model)


def test_loss_scale_split_masters_frozen_parameters_and_late_states() -> None:
    run_ranks(2, _special)


def _refusals(rank: int, world: int) -> None:
    with pytest.raises(UsageError, match="not a parameter of a sharded model"):
        zeroshard.safe_get_full_fp32_param(torch.ones(3))
    model, _ = shard_task(TASK, Setting())
    parameter = dict(model.named_parameters())["outer.weight"]
    with pytest.raises(UsageError, match=r"'outer\.weight' needs a tensor of shape \(\d+, \d+\), got shape \(3,\)"):
        zeroshard.safe_set_full_fp32_param(parameter, torch.ones(3))
    for value in (torch.ones(WIDTH, WIDTH, dtype=torch.complex64), torch.ones(WIDTH, WIDTH, device="meta")):
        with pytest.raises(UsageError, match="needs a tensor of real numbers"):
            zeroshard.safe_set_full_fp32_param(parameter, value)
    with pytest.raises(UsageError, match="needs a dense tensor"):
        zeroshard.safe_set_full_fp32_param(parameter, torch.ones(WIDTH, WIDTH).to_sparse())
    # Only rank 0's value is wrong: nobody waits for it.
    words = "got shape" if rank == 0 else "the value of rank 0 is not valid"
    with pytest.raises(UsageError, match=rf"'outer\.weight' .*{words}"):
        zeroshard.safe_set_full_fp32_param(parameter, torch.ones(3) if rank == 0 else torch.ones(WIDTH, WIDTH))
    before = zeroshard.safe_get_local_fp32_param(parameter)
    words = "got shape" if rank == 1 else "the value of another rank is not valid"
    with pytest.raises(UsageError, match=rf"'outer\.weight' .*{words}"):
        zeroshard.safe_set_local_fp32_param(parameter, torch.ones(3) if rank == 1 else before + 1.0)
    assert torch.equal(zeroshard.safe_get_local_fp32_param(parameter), before), "refused on all ranks, written on none"
    with pytest.raises(UsageError, match=r"leaf modules: this Linear is sharded already"):
        zeroshard.set_z3_leaf_module(model.get_submodule("outer"), True)
    with pytest.raises(UsageError, match="no gradient to set"):
        zeroshard.safe_set_full_grad(parameter, torch.ones(WIDTH, WIDTH))
    with zeroshard.GatheredParameters(parameter, modifier_rank=0):
        with pytest.raises(UsageError, match="inside GatheredParameters"):
            zeroshard.safe_set_full_fp32_param(parameter, torch.ones(WIDTH, WIDTH))
        zeroshard.safe_get_full_fp32_param(parameter)


def test_calls_without_meaning_are_refused() -> None:
    run_ranks(2, _refusals)


def _alone(rank: int, world: int, stage: int, call: str) -> tuple[str, float]:
    model, optimizer = shard_task(TASK, Setting(plan=stage))
    parameter = dict(model.named_parameters())["outer.weight"]
    _step(model, optimizer, rank)
    start = time.monotonic()
    try:
        if rank == 1 and call == "get":
            zeroshard.safe_get_full_fp32_param(parameter)
        elif rank == 1:
            zeroshard.safe_set_local_fp32_param(parameter, zeroshard.safe_get_local_fp32_param(parameter))
        for step in range(1, 4):
            _step(model, optimizer, rank, step)
    except ZeroShardError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "right", time.monotonic() - start


@pytest.mark.parametrize(("stage", "call"), sample([(1, "get"), (3, "set")]))
def test_a_call_on_one_rank_alone_ends_within_seconds_in_an_error(stage: int, call: str) -> None:
    for text, seconds in run_ranks(2, _alone, stage, call, timeout=60):
        assert text.startswith("DivergenceError"), text
        assert "outer.weight" in text
        assert ("safe_set_local_fp32_param" if call == "set" else "safe_get_full_fp32_param") in text
        assert seconds < 15.0


WIDE = Task(lambda: Stack().double(), lambda m, b: m(b.normal(3, WIDTH).double()).square().mean())


def _float64(rank: int, world: int) -> None:
    """Values that float32 has not, of parameters and of gradients, come out as they went in."""
    for stage in STAGES:
        model, _ = shard_task(WIDE, Setting(plan=stage, optimizer=sgd))
        weight = model.get_parameter("outer.weight")
        shape = zeroshard.safe_get_full_fp32_param(weight).shape
        value = torch.linspace(0, 1, shape.numel(), dtype=torch.float64).view(shape) / 3
        zeroshard.safe_set_full_fp32_param(weight, value)
        assert torch.equal(zeroshard.safe_get_full_fp32_param(weight), value)
        zeroshard.safe_set_local_fp32_param(weight, 2 * zeroshard.safe_get_local_fp32_param(weight))
        assert torch.equal(zeroshard.safe_get_full_fp32_param(weight), 2 * value)
        with zeroshard.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight.div_(7)
        assert torch.equal(zeroshard.safe_get_full_fp32_param(weight), 2 * value / 7)
        _backward(model, rank, task=WIDE)
        zeroshard.safe_set_full_grad(weight, value)
        assert torch.equal(zeroshard.safe_get_full_grad(weight), value)


def test_float64_is_handed_over_exactly() -> None:
    run_ranks(2, _float64)
