"""Around state in host memory: readers find the step done, what goes wrong ends the run, bytes are the plan's."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.measure import held_bytes
from tests.support.models import Batch, Task, square_loss
from tests.support.offload import offloaded, on_device, recipe, train
from tests.support.training import Setting, adamw, assert_same, build, full_parameters, sgd, shard_task
from tests.support.zoo import Stack
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.memory.host_memory import check_host_memory
from zeroshard.engine.memory.rank_values import read_values
from zeroshard.engine.step.attached import stepper_of
from zeroshard.engine.step.host_state_stepper import HostStateStepper
from zeroshard.engine.step.stepper import HostStepper
from zeroshard.errors import NonFiniteError, PlanError
from zeroshard.nvme.places import Spill
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.optim.updates import FlatUpdate
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.offload import Offload
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import HostUpdate, OnNonFinite

TASK = Task(Stack, square_loss)


def _step(model: nn.Module, optimizer: ShardedOptimizer, rank: int, step: int) -> None:
    TASK.loss(model, Batch(step, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _first(model: nn.Module) -> nn.Parameter:
    return next(iter(model.parameters()))


def _by_eval(model: nn.Module, folder: Path) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return TASK.loss(model, Batch(9, 0, 0)).reshape(1)


def _by_gathered(model: nn.Module, folder: Path) -> torch.Tensor:
    with zeroshard.GatheredParameters(list(model.parameters())):
        return torch.cat([parameter.detach().float().reshape(-1) for parameter in model.parameters()])


def _by_master(model: nn.Module, folder: Path) -> torch.Tensor:
    return zeroshard.safe_get_full_fp32_param(_first(model)).reshape(-1)


def _by_state(model: nn.Module, folder: Path) -> torch.Tensor:
    found = zeroshard.safe_get_full_optimizer_state(_first(model), "exp_avg")
    assert found is not None
    return found.reshape(-1)


def _by_momentum(model: nn.Module, folder: Path) -> torch.Tensor:
    found = zeroshard.safe_get_full_optimizer_state(_first(model), "momentum_buffer")
    assert found is not None
    return found.reshape(-1)


def _by_full(model: nn.Module, folder: Path) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in full_parameters(model).values()])


def _by_checkpoint(model: nn.Module, folder: Path) -> torch.Tensor:
    zeroshard.save(model, folder, "now")
    other = build(TASK)
    momentum = isinstance(stepper_of(model), HostStepper)
    other, _ = zeroshard.shard(other, (sgd if momentum else adamw)(other), plan=recipe(3, "bf16"))
    zeroshard.load(other, folder, "now")
    return _by_full(other, folder)


def _by_drain(model: nn.Module, folder: Path) -> torch.Tensor:
    zeroshard.drain(model)
    masters = [read_values(g, device=g.device) for unit in handle_of(model).runtime.units for g in unit.trainable]
    return torch.cat([master.float().reshape(-1).clone() for master in masters])


READERS: list[Callable[[nn.Module, Path], torch.Tensor]] = [
    _by_eval,
    _by_gathered,
    _by_master,
    _by_state,
    _by_full,
    _by_checkpoint,
    _by_drain,
]


def _slowly(model: nn.Module) -> None:
    """Let the worker take its time, so that nothing is done already when a reader forgets to wait for it."""
    stepper = stepper_of(model)
    assert isinstance(stepper, HostStateStepper)
    update = stepper.update
    assert isinstance(update, FlatUpdate)
    apply_region = update.apply_region

    def slow(number: int, coefficient: float, active: Sequence[bool], hyper: Sequence[Mapping[str, Any]]) -> None:
        time.sleep(0.01)
        apply_region(number, coefficient, active, hyper)

    update.apply_region = slow


def _pair(update: HostUpdate, param: bool) -> tuple[tuple[nn.Module, ShardedOptimizer], ...]:
    """A model with state on the host, and one with the same arithmetic on the device."""
    plain = recipe(3, "bf16", None if update is HostUpdate.PROCESSOR else "float32")
    setting = Setting(plan=plain, optimizer=sgd if update is HostUpdate.PROCESSOR else adamw)
    away = shard_task(TASK, setting.at(offloaded(plain, update, param=param)))
    if update is HostUpdate.STREAMED:
        return away, on_device(TASK, setting)
    _slowly(away[0])
    return away, shard_task(TASK, setting)


def _readers(rank: int, world: int, folder: str) -> None:
    for number, update in enumerate(HostUpdate):
        for param in (False, True):
            (model, optimizer), (reference, its_optimizer) = _pair(update, param)
            for step, reader in enumerate(READERS):
                if reader is _by_state and update is HostUpdate.PROCESSOR:
                    reader = _by_momentum
                _step(reference, its_optimizer, rank, step)
                _step(model, optimizer, rank, step)
                place = Path(folder) / f"{number}{param}{reader.__name__}"
                got, expected = reader(model, place / "a"), reader(reference, place / "b")
                assert torch.equal(got, expected), (update, param, reader.__name__)
                model.train()
                reference.train()
            for each in (model, reference):
                zeroshard.close(each)


def test_every_reader_between_a_step_and_the_next_forward_finds_the_step_done(tmp_path: Path) -> None:
    run_ranks(2, _readers, str(tmp_path))


def _setters(rank: int, world: int) -> None:
    for update, param in itertools.product(HostUpdate, (False, True)):
        model, optimizer = shard_task(TASK, Setting(plan=offloaded(recipe(3, "bf16"), update, param=param)))
        _step(model, optimizer, rank, 0)
        parameter = _first(model)
        wanted = torch.full(zeroshard.safe_get_full_fp32_param(parameter).shape, 0.25)
        zeroshard.safe_set_full_fp32_param(parameter, wanted)
        zeroshard.safe_set_full_optimizer_state(parameter, wanted * 2, "exp_avg")
        with zeroshard.GatheredParameters([parameter]):
            assert torch.equal(parameter.detach().float(), wanted)
        found = zeroshard.safe_get_full_optimizer_state(parameter, "exp_avg")
        assert found is not None
        assert torch.equal(found, wanted * 2)
        with zeroshard.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter.fill_(0.5)
        assert bool((zeroshard.safe_get_full_fp32_param(parameter) == 0.5).all())
        TASK.loss(model, Batch(1, 0, rank)).backward()
        gradient = zeroshard.safe_get_full_grad(parameter)
        assert gradient is not None
        norm = zeroshard.clip_grad_norm_(model, 1e9)
        zeroshard.safe_set_full_grad(parameter, gradient * 0)
        left = float(norm**2 - gradient.square().sum())
        assert float(zeroshard.clip_grad_norm_(model, 1e9)) ** 2 == pytest.approx(left, rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
        zeroshard.close(model)


def test_what_is_set_is_what_the_next_step_works_on() -> None:
    run_ranks(2, _setters)


def _bytes(rank: int, world: int) -> None:
    for update in HostUpdate:
        for stage, ratio, param in ((1, 1.0, False), (2, 0.5, False), (3, 1.0, False), (3, 1.0, True)):
            for dtype in (None, "bf16"):
                plan = offloaded(recipe(stage, dtype), update, ratio, param=param)
                model, optimizer = shard_task(TASK, Setting(plan=plan))
                _step(model, optimizer, rank, 0)
                planned = state_bytes(zeroshard.plan_of(model))
                what = f"{update.value}, stage {stage}, ratio {ratio}, {dtype}, parameters too: {param}"
                assert replace(planned, no_sync=0, step=0) == held_bytes(model), what
                assert planned.host > 0, what
                zeroshard.close(model)


def test_bytes_on_both_sides_are_those_of_the_plan() -> None:
    run_ranks(2, _bytes)


def _host_bytes_per_parameter(rank: int, world: int) -> list[float]:
    found = []
    for update in HostUpdate:
        model, _ = shard_task(TASK, Setting(plan=offloaded(recipe(3, "bf16"), update)))
        plan = zeroshard.plan_of(model)
        padded = sum(group.layout.numel for _, group in plan.groups())
        found.append(state_bytes(plan).host * world / padded)
        zeroshard.close(model)
    return found


def test_a_parameter_takes_14_bytes_of_host_memory() -> None:
    assert run_ranks(2, _host_bytes_per_parameter) == [[14.0, 14.0], [14.0, 14.0]]


def _two_steps(model: nn.Module, optimizer: ShardedOptimizer, rank: int) -> None:
    for step in (1, 2):
        _step(model, optimizer, rank, step)


def _worker_fails(rank: int, world: int) -> str:
    model, optimizer = shard_task(TASK, Setting(plan=offloaded(recipe(3))))
    _step(model, optimizer, rank, 0)
    optimizer.param_groups[0]["betas"] = (0.9, 2.0)  # its correction is the root of a negative number
    with pytest.raises(ValueError, match="math domain error") as caught:
        _two_steps(model, optimizer, rank)
    return "".join(entry.name for entry in caught.traceback)


def test_what_goes_wrong_in_the_worker_ends_the_run_with_its_traceback() -> None:
    for names in run_ranks(2, _worker_fails):
        assert "_update_run" in names


def _step_twice(optimizer: ShardedOptimizer, backward: Callable[[], None]) -> None:
    optimizer.step()
    backward()
    optimizer.step()  # where the device's step tells what the one before was


def _nonfinite(rank: int, world: int) -> None:
    for update in HostUpdate:
        model, optimizer = shard_task(TASK, Setting(plan=offloaded(recipe(3), update)))
        _step(model, optimizer, rank, 0)
        before = full_parameters(model)
        (TASK.loss(model, Batch(1, 0, rank)) * (float("inf") if rank == 1 else 1.0)).backward()
        with pytest.raises(NonFiniteError, match="first in "):
            _step_twice(optimizer, lambda model=model: TASK.loss(model, Batch(2, 0, rank)).backward())
        assert_same(full_parameters(model), before)
        zeroshard.close(model)


def test_gradients_that_are_not_finite_change_nothing() -> None:
    run_ranks(2, _nonfinite)


def _refusal(rank: int, world: int) -> list[str]:
    said = []
    cases: list[tuple[Setting, type[Exception]]] = [
        (Setting(plan=offloaded(recipe(0))), PlanError),
        (Setting(plan=offloaded(recipe(3)), optimizer=lambda model: zeroshard.Lamb(model.parameters())), PlanError),
        (Setting(plan=offloaded(recipe(3)), optimizer=_muon), PlanError),
        (Setting(plan=offloaded(recipe(3)), optimizer=_dion), PlanError),
        (Setting(plan=offloaded(recipe(3)), optimizer=_amsgrad), PlanError),
        (Setting(plan=offloaded(recipe(3, "bf16", "int16"))), PlanError),
        (Setting(plan=offloaded(recipe(3), HostUpdate.STREAMED), optimizer=_lion), PlanError),
    ]
    for setting, kind in cases:
        with pytest.raises(kind) as caught:
            shard_task(TASK, setting)
        said.append(str(caught.value))
    return said


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    matrices, others = [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]
    return zeroshard.MuonAdamW([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])


def _dion(model: nn.Module) -> torch.optim.Optimizer:
    return zeroshard.Dion(model.named_parameters())


def _amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), amsgrad=True)


def _lion(model: nn.Module) -> torch.optim.Optimizer:
    return zeroshard.Lion(model.parameters())


def test_what_can_not_be_offloaded_is_refused_by_name() -> None:
    stage, lamb, muon, dion, amsgrad, split, lion = run_ranks(1, _refusal)[0]
    assert "use stage 1, 2 or 3" in stage
    assert "Lamb can't update state in host memory" in lamb
    assert "MuonAdamW can't update state in host memory" in muon
    assert "whole matrices (Muon, Dion) stays on the device" in dion
    assert "AdamW with amsgrad can't update state in host memory" in amsgrad
    assert "float32 master weights" in split
    assert "Lion has no kernel" in lion
    assert "use Adam or AdamW, or Offload(update=HostUpdate.PROCESSOR) with this one" in lion


@pytest.mark.parametrize(
    "given",
    [
        *({"ratio": ratio} for ratio in (-0.1, 1.1, float("nan"), "0.5", None, True)),
        {"update": "streamed"},
        {"param": 1},
        {"pin_memory": "no"},
        {"stream_numel": 1.5},
        {"window_numel": 0},
        {"spill": "/disk"},
        {"spill": Spill(("/disk",))},
    ],
)
def test_an_offload_that_means_nothing_is_refused_by_the_name_of_its_part(given: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=f"offload {next(iter(given))} "):
        Offload(**given)


def test_more_host_memory_than_there_is_is_refused_before_any_is_taken() -> None:
    with pytest.raises(PlanError, match=r"100.00 GiB of state in host memory per rank, 800.00 GiB for the 8"):
        check_host_memory(100 << 30, 8, 512 << 30)
    check_host_memory(10 << 30, 8, 512 << 30)
    check_host_memory(10 << 30, 8, None)


def _plan_text(rank: int, world: int) -> str:
    model, _ = shard_task(TASK, Setting(plan=offloaded(recipe(3, "bf16"), param=True)))
    plan = zeroshard.plan_of(model)
    assert Plan.from_json(plan.to_json()) == plan
    return plan.to_json()


def test_a_plan_with_host_state_reads_back_and_is_checked() -> None:
    text = run_ranks(1, _plan_text)[0]
    for old, new, wrong in (
        ('"update": "processor"', '"update": null', "update must say"),
        ('"accumulate": false', '"accumulate": true', "one micro-batch"),
    ):
        assert old in text
        with pytest.raises(PlanError, match=wrong):
            Plan.from_json(text.replace(old, new))


def _on_disk(rank: int, world: int) -> None:
    text = _plan_text(rank, world).replace('"tier": "host"', '"tier": "nvme"')
    plan = Plan.from_json(text.replace('"window_numel": 0', '"window_numel": 9'))
    with pytest.raises(PlanError, match=r"rests on 'nvme', but no folder is named.*spill=Spill"):
        zeroshard.shard(build(TASK), torch.optim.AdamW, plan=plan)


def test_state_on_disk_needs_a_folder() -> None:
    run_ranks(1, _on_disk)


class _Branches(nn.Module):
    """Two branches of which each step uses one, so that the other gets no gradient on any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
        self.out = nn.Linear(8, 3)
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        return self.out(self.blocks[self.turn // 3 % 2](x))


def _branches(rank: int, world: int) -> None:
    task = Task(_Branches, lambda model, batch: model(batch.normal(3, 8)).float().square().mean())
    for update in HostUpdate:
        for dtype in (None, "bf16"):
            plain = recipe(3, dtype, None if update is HostUpdate.PROCESSOR else "float32" if dtype else None)
            setting = Setting(plan=plain, steps=8, optimizer=sgd if update is HostUpdate.PROCESSOR else adamw)
            away = setting.at(offloaded(plain, update))
            got = train(*shard_task(task, away), task, away, rank)
            on = on_device if update is HostUpdate.STREAMED else shard_task
            expected = train(*on(task, setting), task, setting, rank)
            assert got.losses == expected.losses, (update, dtype)
            assert_same(got.parameters, expected.parameters, f"{update} {dtype}")


def test_parameters_without_a_gradient_stay_what_they_are() -> None:
    run_ranks(2, _branches)


def _engine(rank: int, world: int) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    losses = []
    for section in ({"stage": 3}, zero):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": True},
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": section,
        }
        engine, *_ = zeroshard.initialize(model=build(TASK), config=config)
        for step in range(6):
            if step == 3:
                engine.set_gradient_accumulation_steps(2)  # accumulators are taken in mid-run
            for micro in range(1 if step < 3 else 2):
                loss = TASK.loss(engine, Batch(step, micro, rank))
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
        engine.destroy()
    assert losses[: len(losses) // 2] == losses[len(losses) // 2 :]


def test_a_config_asks_for_it_and_accumulation_may_begin_in_mid_run() -> None:
    run_ranks(2, _engine)


def _skips(rank: int, world: int) -> None:
    plain = recipe(3, "bf16", "float32")
    plain = replace(plain, policy=replace(plain.policy, on_nonfinite=OnNonFinite.SKIP))
    for update in HostUpdate:
        model, optimizer = shard_task(TASK, Setting(plan=offloaded(plain, update, param=True)))
        _step(model, optimizer, rank, 0)
        before = {name: value.clone() for name, value in zeroshard.iterate_full_parameters(model, master=False)}
        (TASK.loss(model, Batch(1, 0, rank)) * math.inf).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = {name: value.clone() for name, value in zeroshard.iterate_full_parameters(model, master=False)}
        assert_same(after, before, f"{update}: what passes through the device comes back as it was")
        zeroshard.close(model)


def test_a_skipped_step_leaves_parameters_on_the_host_as_they_were() -> None:
    run_ranks(2, _skips)
