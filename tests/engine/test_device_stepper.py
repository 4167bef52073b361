"""The step that leaves its decisions on the device trains like the one whose host decides; here on PyTorch twins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.engine.build import build_handle
from zeroshard.engine.outside_step.gathered import mark_parameters
from zeroshard.engine.planning import make_plan
from zeroshard.engine.step.attached import attach_optimizer, stepper_of
from zeroshard.engine.step.device_stepper import DeviceStepper
from zeroshard.engine.step.regions_of import make_regions
from zeroshard.errors import NonFiniteError, UsageError
from zeroshard.optim.adam.device_adam import DeviceAdam
from zeroshard.optim.clients import torch_source
from zeroshard.optim.kernels.norm import SquaredNorm
from zeroshard.optim.kernels.tiles import GRADIENT_TILE
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.optim.rules import ADAMW
from zeroshard.optim.split_master import join, split
from zeroshard.plan.builder import Precision, Recipe
from zeroshard.plan.placement import STAGES
from zeroshard.plan.policy import ExecutionPolicy, OnNonFinite

CPU = torch.device("cpu")


def _model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12)) for _ in range(3)]
    return nn.Sequential(nn.Linear(6, 12), nn.ModuleList(blocks)[0], *blocks[1:], nn.Linear(12, 3))


class _OutOfOrder(nn.Module):
    """Units are used in another order than they are declared in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(12, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12)) for _ in range(3))
        self.first = nn.Linear(6, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.last(x)


def _groups(model: nn.Module) -> list[dict[str, object]]:
    named = list(model.named_parameters())
    decayed = [p for n, p in named if n.endswith("weight")]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [p for n, p in named if n.endswith("bias")], "lr": 3e-2},
    ]


def _on_device(model: nn.Module, recipe: Recipe, scaler: LossScaler | None) -> ShardedOptimizer:
    """What zeroshard.shard does on a GPU, with the twins of its kernels."""
    source = torch_source(torch.optim.AdamW(_groups(model), lr=1e-2), allow_untested=False)
    handle = build_handle(model, make_plan(model, recipe, source, CPU), device=CPU)
    mark_parameters(handle)
    stepper = DeviceStepper(handle, DeviceAdam(ADAMW, make_regions(handle, source.groups), CPU), scaler)
    return attach_optimizer(model, source, stepper)


def _losses(model: nn.Module, optimizer: ShardedOptimizer, rank: int, dtype: torch.dtype, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _compare(rank: int, world_size: int, make: Callable[[], nn.Module], masters: tuple[str | None, ...]) -> None:
    for stage in (0, 1, 2, 3):
        for master in masters:
            precision = Precision(param=None if master is None else "bf16", master=master)
            dtype = torch.float32 if master is None else torch.bfloat16
            recipe = Recipe(
                sharding=STAGES[stage],
                precision=precision,
                policy=ExecutionPolicy(clip_norm=0.5),
                transient_gradients=stage == 3,
            )
            host, device = make(), make()
            plain = Recipe(sharding=STAGES[stage], precision=Precision(param=precision.param), policy=recipe.policy)
            host, host_optimizer = zeroshard.shard(host, torch.optim.AdamW(_groups(host), lr=1e-2), plan=plain)
            device_optimizer = _on_device(device, recipe, None)
            expected = _losses(host, host_optimizer, rank, dtype, 12)
            got = _losses(device, device_optimizer, rank, dtype, 12)
            tolerance = 1e-5 if master is None else 2e-2
            assert got == pytest.approx(expected, rel=tolerance), (stage, master)
            zeroshard.close(host)
            zeroshard.close(device)


def _norms_between(rank: int, world_size: int) -> None:
    recipe = Recipe(sharding=STAGES[3], policy=ExecutionPolicy(accumulate=True))
    for on_device in (False, True):
        losses = []
        for ask in (False, True):
            model = _model()
            optimizer = _on_device(model, recipe, None) if on_device else None
            if optimizer is None:
                model, optimizer = zeroshard.shard(model, torch.optim.AdamW(_groups(model), lr=1e-2), plan=recipe)
            for scale in (0.01, 1.0):
                (model(torch.full((8, 6), 1.0 + rank)).square().mean() * scale).backward()
                if ask or scale == 1.0:
                    zeroshard.clip_grad_norm_(model, 1e-3)
            optimizer.step()
            losses.append(zeroshard.get_global_grad_norm(model))
            losses.append(model(torch.ones(8, 6)).square().mean().item())
            zeroshard.close(model)
        assert losses[:2] == losses[2:], on_device


def test_a_norm_that_was_asked_for_between_two_backwards_is_not_that_of_the_step() -> None:
    run_ranks(2, _norms_between)


def _limit_of_dropped(rank: int, world_size: int) -> None:
    recipe = Recipe(sharding=STAGES[2], policy=ExecutionPolicy(accumulate=True))
    for on_device in (False, True):
        trained = []
        for drop in ("nothing clipped", "optimizer.zero_grad", "model.zero_grad", "a step without gradients"):
            model = _model()
            optimizer = _on_device(model, recipe, None) if on_device else None
            if optimizer is None:
                model, optimizer = zeroshard.shard(model, torch.optim.AdamW(_groups(model), lr=1e-2), plan=recipe)
            if drop.endswith("zero_grad"):
                model(torch.ones(8, 6)).square().mean().backward()
            if drop != "nothing clipped":
                zeroshard.clip_grad_norm_(model, 1e-6)
            {"optimizer.zero_grad": optimizer.zero_grad, "model.zero_grad": model.zero_grad}.get(drop, optimizer.step)()
            model(torch.full((8, 6), 1.0 + rank)).square().mean().backward()
            optimizer.step()
            trained.append(zeroshard.full_state_dict(model))
            zeroshard.close(model)
        for found in trained[1:]:
            assert all(torch.equal(value, trained[0][name]) for name, value in found.items()), on_device


def test_a_limit_goes_with_the_gradients_that_it_was_for() -> None:
    run_ranks(2, _limit_of_dropped)


def test_an_option_that_comes_late_is_refused_as_by_the_host() -> None:
    model = _model()
    optimizer = _on_device(model, Recipe(sharding=STAGES[2]), None)
    model(torch.ones(8, 6)).square().mean().backward()
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(UsageError, match="group 0: maximize was switched on after the model was sharded"):
        optimizer.step()
    zeroshard.close(model)


def test_a_step_that_the_update_refuses_was_not_applied() -> None:
    model = _model()
    scaler = LossScaler("cpu", window=1)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), plan=2)
    stepper = stepper_of(model)
    stepper.scaler = scaler
    before = scaler.state_dict()
    model(torch.ones(8, 6)).square().mean().backward()
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(UsageError, match="maximize"):
        optimizer.step()
    assert not stepper.report.applied
    assert scaler.state_dict() == before
    zeroshard.close(model)


def test_it_trains_as_the_host_does_at_every_stage_and_kind_of_master_weights() -> None:
    run_ranks(2, _compare, _model, (None, "float32", "int16"))


def test_it_follows_another_order_of_units() -> None:
    run_ranks(2, _compare, _OutOfOrder, (None,))


def _overflow(rank: int, world_size: int) -> tuple[bool, float, float, int]:
    model = _model()
    policy = ExecutionPolicy(clip_norm=0.5, on_nonfinite=OnNonFinite.SKIP)
    scaler = LossScaler(CPU, True, 1024.0, 100, 1, False, 1.0)
    optimizer = _on_device(model, Recipe(policy=policy), scaler)
    stepper = optimizer._handler
    assert isinstance(stepper, DeviceStepper)
    _losses(model, optimizer, rank, torch.float32, 1)
    before = zeroshard.full_state_dict(model)
    model(torch.full((8, 6), 3e38 if rank == 1 else 1.0)).square().mean().backward()
    optimizer.step()
    after = zeroshard.full_state_dict(model)
    same = all(torch.equal(before[name], after[name]) for name in before)
    steps = {float(count) for count in stepper.update.tensors()["steps"]}
    zeroshard.close(model)
    return same and not stepper.report.applied, float(scaler.scale), max(steps), int(scaler.total_skips)


def test_an_overflow_on_one_rank_changes_nothing_on_any_and_is_not_counted_as_a_step() -> None:
    for outcome in run_ranks(2, _overflow):
        assert outcome == (True, 512.0, 1.0, 1)


def _raise(rank: int, world_size: int) -> str:
    model = _model()
    optimizer = _on_device(model, Recipe(), None)
    model(torch.full((8, 6), float("nan") if rank == 0 else 1.0)).square().mean().backward()
    with pytest.raises(NonFiniteError) as caught:
        optimizer.step()
    zeroshard.close(model)
    return str(caught.value)


def test_a_nan_ends_in_an_error_that_names_a_parameter() -> None:
    for message in run_ranks(2, _raise):
        assert "first in" in message
        assert "weight" in message or "bias" in message


def test_gradients_with_nan_are_applied_where_the_plan_says_so() -> None:
    model = _model()
    policy = ExecutionPolicy(on_nonfinite=OnNonFinite.APPLY, clip_norm=1.0)
    optimizer = _on_device(model, Recipe(policy=policy), None)
    model(torch.full((8, 6), float("nan"))).square().mean().backward()
    optimizer.step()
    assert stepper_of(model).report.applied
    assert all(bool(value.isnan().any()) for _, value in zeroshard.iterate_full_parameters(model))
    zeroshard.close(model)


def test_split_master_weights_hold_every_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(100_000, generator=generator) * torch.exp(40 * torch.randn(100_000, generator=generator))
    values = values[values.abs() < 3e38]
    ties = (torch.arange(-40, 40, dtype=torch.int32) * 0x8000 + 0x3F800000).view(torch.float32)
    for case in (values, ties, torch.zeros(3), -torch.zeros(3)):
        upper, remainder = split(case)
        assert torch.equal(join(upper, remainder).view(torch.int32), case.view(torch.int32))
        assert torch.all((upper.float() - case).abs() <= (case.bfloat16().float() - case).abs() * (1 + 1e-6))


def test_the_norm_finds_where_the_first_bad_value_is() -> None:
    tensors = [torch.randn(40_000), torch.randn(20_000).bfloat16(), torch.randn(5)]
    norm = SquaredNorm([[(0, 30_000), (30_016, 40_000)], [(0, 20_000)], [(0, 5)]], CPU)
    tensors[0][30_000:30_016] = float("nan")  # padding
    total = torch.zeros((), dtype=torch.float64)
    for number, tensor in enumerate(tensors):
        norm.square(number, tensor)
    norm.into(total)
    assert total.item() == pytest.approx(sum(tensor.double().nan_to_num().square().sum().item() for tensor in tensors))
    tensors[0][35_000] = float("inf")
    norm.square(0, tensors[0])
    norm.into(total)
    assert norm.place_of(int(norm.first_bad)) == (0, 30_016 + GRADIENT_TILE)
