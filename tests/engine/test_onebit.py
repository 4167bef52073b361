"""1-bit optimizers equal a plain simulation of all ranks, bit by bit of what is sent, at stages 0 and 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.support.cases import sample
from tests.support.distributed import run_ranks
from tests.support.measure import forget_sent, held_bytes, sent
from tests.support.models import WIDTH, Batch
from tests.support.training import assert_close, assert_same, full_parameters
from tests.support.zoo import Stack
from zeroshard.engine.engine import Engine
from zeroshard.errors import CheckpointError, PlanError, UsageError
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.onebit.mean import pack, unpack
from zeroshard.plan.builder import Precision, Recipe, build_plan
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.placement import STAGES
from zeroshard.plan.plan import ExecutionPolicy, OnNonFinite, Plan
from zeroshard.plan.traffic import step_traffic
from zeroshard.sharding.units import find_units

FREEZE = 3
STEPS = 7
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-4, "weight_decay": 0.1}
LAMB: dict[str, Any] = {**ADAM, "coeff_beta": 0.5, "factor_threshold": 0.2, "factor_max": 2.0, "max_coeff": 5.0}
BOUNDS: dict[str, Any] = {"min_coeff": 0.01, "factor_min": 0.5}
MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "OneBitAdam": lambda model: zeroshard.OneBitAdam(_groups(model), freeze_step=FREEZE, **ADAM),
    "OneBitLamb": lambda model: zeroshard.OneBitLamb(_groups(model), freeze_step=FREEZE, **LAMB, **BOUNDS),
}


def _model() -> nn.Module:
    torch.manual_seed(3)
    model = Stack(3)
    model.blocks[1].requires_grad_(False)
    return model


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for _, p in named if p.dim() > 1]},
        {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0, "lr": 5e-3},
    ]


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Block 2 has no gradient in step 4, on no rank; on rank 1 it has none in step 5 either."""
    skip = batch.step == 4 or (batch.step == 5 and batch.rank == 1)
    return model(batch.normal(3, WIDTH), (0, 1) if skip else (0, 1, 2)).float().square().mean()


class _Simulation:
    """All ranks in one process, each with its own gradients and errors, and no packing, slicing or sending."""

    def __init__(self, plan: Plan, world: int, lamb: bool) -> None:
        self.model, self.world, self.lamb = _model(), world, lamb
        self.pieces: dict[str, list[slice]] = {}
        for _, group in plan.groups():
            for rank in range(world if group.trainable else 0):
                start, end = group.layout.shard_range(rank)
                for index, low, high in group.layout.pieces(start, end):
                    segment = group.layout.segments[index]
                    cut = slice(start + low - segment.offset, start + high - segment.offset)
                    self.pieces.setdefault(segment.name, []).append(cut)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        zeros = {name: torch.zeros(p.numel()) for name, p in self.parameters.items()}
        self.m, self.v = dict(zeros), dict(zeros)
        self.worker = [{name: zero.clone() for name, zero in zeros.items()} for _ in range(world)]
        self.server = {name: zero.clone() for name, zero in zeros.items()}
        self.ratio, self.factor = dict.fromkeys(zeros, 0.0), dict.fromkeys(zeros, 1.0)
        self.fresh: dict[str, torch.Tensor] = {}

    def hyper(self, name: str) -> dict[str, Any]:
        common = {**LAMB, **BOUNDS} if self.lamb else ADAM
        return {**common, "weight_decay": 0.0, "lr": 5e-3} if self.parameters[name].dim() == 1 else common

    @torch.no_grad()
    def step(self, number: int) -> None:
        grads = [self._gradients(Batch(number, 0, rank)) for rank in range(self.world)]
        for name, parameter in self.parameters.items():
            mine = [own.get(name) for own in grads]
            if all(grad is None for grad in mine):
                continue
            each = [torch.zeros(parameter.numel()) if grad is None else grad for grad in mine]
            hyper = self.hyper(name)
            before = self.m[name]
            if number < FREEZE:
                total = each[0] if self.world == 1 else sum(each[1:], each[0])
                grad = total * (1 / self.world)
                self.m[name] = before * hyper["betas"][0] + grad * (1 - hyper["betas"][0])
                self.v[name] = self.v[name] * hyper["betas"][1] + grad * grad * (1 - hyper["betas"][1])
            else:
                self.m[name] = self._average(
                    name, [before * hyper["betas"][0] + g * (1 - hyper["betas"][0]) for g in each]
                )
            self._update(name, parameter, hyper, before, warm=number < FREEZE)
        if number == FREEZE - 1:
            self.fresh = {name: value.clone() for name, value in self.v.items()}

    def _gradients(self, batch: Batch) -> dict[str, torch.Tensor]:
        self.model.zero_grad()
        with torch.enable_grad():
            _loss(self.model, batch).backward()
        return {name: p.grad.reshape(-1).clone() for name, p in self.parameters.items() if p.grad is not None}

    def _average(self, name: str, values: list[torch.Tensor]) -> torch.Tensor:
        found = torch.zeros_like(values[0])
        for cut in self.pieces[name]:
            mean = torch.zeros_like(values[0][cut])
            for rank, value in enumerate(values):
                mean += _one_bit(value[cut], self.worker[rank][name][cut]) / self.world
            found[cut] = _one_bit(mean, self.server[name][cut])
        return found

    def _update(
        self, name: str, parameter: torch.Tensor, hyper: dict[str, Any], before: torch.Tensor, *, warm: bool
    ) -> None:
        flat = parameter.view(-1)
        root = self.v[name].sqrt() + hyper["eps"]
        bare = self.m[name] / root
        update = bare + flat * hyper["weight_decay"]
        used = 1.0
        if self.lamb and warm:
            weight, size = float(flat.double().norm()), float(update.double().norm())
            used = min(max(weight / size, hyper["min_coeff"]), hyper["max_coeff"]) if weight and size else 1.0
            self.ratio[name] = hyper["coeff_beta"] * self.ratio[name] + (1 - hyper["coeff_beta"]) * used
        elif self.lamb:
            beta1, beta2 = hyper["betas"]
            grad = (self.m[name] - before * beta1) / (1 - beta1)
            self.fresh[name] = self.fresh[name] * beta2 + grad * grad * (1 - beta2)
            factor = float((root / (self.fresh[name].sqrt() + hyper["eps"])).max())
            share = (
                min(1.0, float(bare.double().norm()) / float(update.double().norm())) if hyper["weight_decay"] else 1.0
            )
            factor = min(max(factor * share + 1 - share, hyper["factor_min"]), hyper["factor_max"])
            last, threshold = self.factor[name], hyper["factor_threshold"]
            self.factor[name] = min(max(factor, last * (1 - threshold)), last * (1 + threshold))
            used = self.ratio[name] * self.factor[name]
        flat -= update * (hyper["lr"] * used)


def _one_bit(value: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Sign times root mean square of value and error; what that leaves out becomes the error."""
    whole = value + error
    found = torch.where(whole >= 0, 1.0, -1.0) * (whole.norm() / math.sqrt(len(whole)))
    error.copy_(whole - found)
    return found


class _ZeroOne(_Simulation):
    """0/1 Adam with a model for each rank."""

    def __init__(self, plan: Plan, world: int, policy: dict[str, int]) -> None:
        super().__init__(plan, world, lamb=False)
        self.policy = policy
        self.models = [_model() for _ in range(world)]
        self.every = {"variance": 1, "talk": 1}
        self.count = {"variance": 0, "talk": 0}
        zeros = self.m
        self.moments = [{name: zero.clone() for name, zero in zeros.items()} for _ in range(world)]
        self.sums = [{name: zero.clone() for name, zero in zeros.items()} for _ in range(world)]
        self.rates = dict.fromkeys(zeros, 0.0)
        self.anchor: dict[str, torch.Tensor] = {}

    def flat(self, rank: int, name: str) -> torch.Tensor:
        return dict(self.models[rank].named_parameters())[name].view(-1)

    @torch.no_grad()
    def step(self, number: int) -> None:
        step, grads = number + 1, []
        for rank, model in enumerate(self.models):
            self.model, self.parameters = model, {n: p for n, p in model.named_parameters() if p.requires_grad}
            grads.append(self._gradients(Batch(number, 0, rank)))
        active = [name for name in self.parameters if any(name in own for own in grads)]
        each = {name: [own.get(name, torch.zeros_like(self.v[name])) for own in grads] for name in active}
        if step <= self.policy["var_freeze_step"]:
            self._early(step, each)
        else:
            self._late(step, each)
        if step == self.policy["var_freeze_step"]:
            for errors in (*self.worker, self.server):
                for error in errors.values():
                    error.zero_()
            self.anchor = {name: self.flat(0, name).clone() for name in self.parameters}

    def _tick(self, what: str, scaler: int, most: int) -> None:
        self.count[what] += 1
        if self.count[what] == scaler:
            self.count[what], self.every[what] = 0, min(most, 2 * self.every[what])

    def _early(self, step: int, each: dict[str, list[torch.Tensor]]) -> None:
        variance = step % self.every["variance"] == 0
        for name, grads in each.items():
            hyper = self.hyper(name)
            beta1, beta2 = hyper["betas"]
            grad = sum(grads[1:], grads[0]) * (1 / self.world) if variance else self._average(name, grads)
            for moments in self.moments:
                moments[name] = moments[name] * beta1 + grad * (1 - beta1)
            if variance:
                self.v[name] = self.v[name] * beta2 + grad * grad * (1 - beta2)
            for rank in range(self.world):
                self._move(rank, name, hyper)
        if variance:
            self._tick("variance", self.policy["var_update_scaler"], 1 << 30)

    def _move(self, rank: int, name: str, hyper: dict[str, Any]) -> None:
        flat = self.flat(rank, name)
        update = self.moments[rank][name] / (self.v[name].sqrt() + hyper["eps"]) + flat * hyper["weight_decay"]
        flat -= update * hyper["lr"]

    def _late(self, step: int, each: dict[str, list[torch.Tensor]]) -> None:
        local = self.policy["local_step_clipper"] > 1
        for name, grads in each.items():
            hyper = self.hyper(name)
            beta1 = hyper["betas"][0]
            for rank, grad in enumerate(grads):
                self.moments[rank][name] = self.moments[rank][name] * beta1 + grad * (1 - beta1)
            if not local:
                mean = self._average(name, [moments[name] for moments in self.moments])
                for moments in self.moments:
                    moments[name] = mean.clone()
            self.rates[name] += hyper["lr"]
            for rank in range(self.world):
                self.sums[rank][name] = self.sums[rank][name] + self.moments[rank][name] * hyper["lr"]
                self._move(rank, name, hyper)
        if local and step % self.every["talk"] == 0:
            self._talk()
        self._tick("talk", self.policy["local_step_scaler"], self.policy["local_step_clipper"])

    def _talk(self) -> None:
        for name, total in self.rates.items():
            if total == 0.0:
                continue
            hyper = self.hyper(name)
            mean = self._average(name, [sums[name] for sums in self.sums])
            self.anchor[name] = self.anchor[name] * (1 - hyper["weight_decay"] * total)
            self.anchor[name] -= mean / (self.v[name].sqrt() + hyper["eps"])
            for rank in range(self.world):
                self.moments[rank][name] = mean / total
                self.flat(rank, name).copy_(self.anchor[name])
                self.sums[rank][name] = torch.zeros_like(mean)
            self.rates[name] = 0.0


POLICIES: dict[str, dict[str, int]] = {
    "local": {"var_freeze_step": 5, "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 4},
    "talking": {"var_freeze_step": 5, "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 1},
}
VARIANCE = (1, 2, 4)
"""Steps, from 1, of a freeze at 5 with an update scaler of 2: each until two are done, then every second."""
TALKS = (6, 7, 8, 12)
"""The same of talking: at most every fourth step, counted from the first."""


def _zero_one(rank: int, world: int) -> None:
    for name, stage in (("local", 0), ("talking", 0), ("talking", 1)):
        model = _model()
        policy = POLICIES[name]
        _, optimizer = zeroshard.shard(model, zeroshard.ZeroOneAdam(_groups(model), **ADAM, **policy), plan=stage)
        simulation = _ZeroOne(zeroshard.plan_of(model), world, policy)
        for step in range(1, 13):
            forget_sent(model)
            _loss(model, Batch(step - 1, 0, rank)).backward()
            optimizer.step()
            if step not in (1, policy["var_freeze_step"]):
                local = name == "local" and step > 5 and step not in TALKS
                compressed = step not in VARIANCE and not local
                expected = step_traffic(zeroshard.plan_of(model), compressed=compressed, local=local)
                assert sent(model) == expected, (name, stage, step)
            simulation.step(step - 1)
            wanted = {key: value.detach() for key, value in simulation.models[rank].named_parameters()}
            assert_close(full_parameters(model), wanted, 2e-6, f"{name}, stage {stage}, step {step}")
            assert held_bytes(model) == replace(state_bytes(zeroshard.plan_of(model)), no_sync=0), (name, stage)
            if name == "talking" or step <= 5 or step in TALKS:
                same = [simulation.flat(r, key) for key in simulation.parameters for r in range(world)]
                assert all(torch.equal(a, b) for a, b in zip(same[::world], same[world - 1 :: world], strict=True))
        zeroshard.close(model)
    if world > 1:
        model = _model()
        with pytest.raises(PlanError, match="use stage 0, or set local_step_clipper to 1"):
            zeroshard.shard(model, zeroshard.ZeroOneAdam(model.parameters()), plan=1)


def test_zero_one_adam_equals_a_simulation_and_talks_as_often_as_it_should() -> None:
    run_ranks(2, _zero_one)


def _equal(rank: int, world: int) -> None:
    for name, make in MAKERS.items():
        for stage in (0, 1):
            model = _model()
            _, optimizer = zeroshard.shard(model, make(model), plan=stage)
            simulation = _Simulation(zeroshard.plan_of(model), world, name == "OneBitLamb")
            for step in range(STEPS):
                _loss(model, Batch(step, 0, rank)).backward()
                optimizer.step()
                simulation.step(step)
                expected = {key: value.detach() for key, value in simulation.model.named_parameters()}
                assert_close(full_parameters(model), expected, 2e-6, f"{name}, stage {stage}, step {step}")
                assert (zeroshard.get_global_grad_norm(model) is None) == (step >= FREEZE)
            zeroshard.close(model)


@pytest.mark.parametrize("world", sample([3, 2]))
def test_each_equals_a_simulation_of_all_ranks(world: int) -> None:
    run_ranks(world, _equal)


def _counted(rank: int, world: int) -> tuple[int, int]:
    found = (0, 0)
    for name, make in MAKERS.items():
        for stage in (0, 1):
            for accumulate in (False, True):
                model = _model()
                _, optimizer = zeroshard.shard(model, make(model), plan=stage, accumulate=accumulate)
                for step in range(STEPS):
                    forget_sent(model)
                    for micro in range(2 if accumulate else 1):
                        (model(Batch(step, micro, rank).normal(3, WIDTH)).square().mean()).backward()
                    optimizer.step()
                    plan, late = zeroshard.plan_of(model), step >= FREEZE
                    if step not in (
                        0,
                        FREEZE - 1,
                    ):  # the order is agreed upon in one, the momentum gathered in the other
                        expected = step_traffic(plan, micro_batches=2 if accumulate else 1, compressed=late)
                        assert sent(model) == expected, (name, stage, accumulate, step)
                        assert ("reduce-scatter" in expected.nbytes) == (not late)
                        found = (expected.nbytes["all-to-all"], plan.parameter_numel) if late else found
                assert held_bytes(model) == replace(state_bytes(plan), no_sync=0), (name, stage)
                assert Plan.from_json(plan.to_json()) == plan
                zeroshard.close(model)
    return found


def test_one_bit_per_parameter_is_sent_and_what_is_held_is_in_the_plan() -> None:
    nbytes, parameters = run_ranks(2, _counted)[0]
    assert nbytes < parameters / 8 * 1.6, "bits, scales and padding of a model of tiny matrices"


def test_bits_are_packed_eight_to_a_byte() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    values[5] = 0.0
    packed = pack(values)
    assert (packed.dtype, packed.numel()) == (torch.uint8, 512)
    assert torch.equal(unpack(packed), torch.where(values >= 0, 1.0, -1.0))


def _skips_and_resumes(rank: int, world: int, folder: str) -> None:
    for name, make in MAKERS.items():
        for stage in (0, 1):
            ends: list[dict[str, torch.Tensor]] = []
            for steps in (range(STEPS), (0, 1, -1, 2, 3, -1, -1, 4, 5, 6)):
                model = _model()
                policy = ExecutionPolicy(on_nonfinite=OnNonFinite.SKIP, cast_inputs="float16")
                recipe = Recipe(STAGES[stage], precision=Precision("float16"), policy=policy)
                scaler = LossScaler("cpu", dynamic=False, initial=64.0)
                _, optimizer = zeroshard.shard(model, make(model), plan=recipe, scaler=scaler)
                for step in steps:
                    loss = _loss(model, Batch(abs(step), 0, rank)) * float(scaler.scale)
                    (loss * math.inf if step < 0 and rank == 1 else loss).backward()
                    optimizer.step()
                ends.append(full_parameters(model))
                zeroshard.close(model)
            assert_same(ends[1], ends[0], f"{name}: a skipped step leaves no trace")
    for name in CONFIGURED:
        _resumes(rank, name, folder)


CONFIGURED: dict[str, tuple[str, int, dict[str, int]]] = {
    "OneBitAdam": ("OneBitAdam", 1, {"freeze_step": FREEZE}),
    "OneBitLamb": ("OneBitLamb", 1, {"freeze_step": FREEZE}),
    "talking": ("ZeroOneAdam", 1, {"var_freeze_step": FREEZE, "local_step_scaler": 1, "local_step_clipper": 1}),
    "local": ("ZeroOneAdam", 0, {"var_freeze_step": FREEZE, "local_step_scaler": 1, "local_step_clipper": 4}),
}
"""Type, stage and parameters. The ranks of "local" talk in steps 4, 8 and 12, counted from 1."""


def _resumes(rank: int, name: str, folder: str) -> None:
    """Saved in the warm-up or after it, training goes on as if nothing had happened."""
    ends: list[dict[str, torch.Tensor]] = []
    for saves in ((), (1, 3, FREEZE + 1, FREEZE + 2)):
        engine = _engine(name)
        for step in range(STEPS + 5):
            engine.backward(_loss(engine, Batch(step, 0, rank)))
            engine.step()
            if step in saves:
                engine.save_checkpoint(folder, tag=f"{name}{step}")
                engine.destroy()
                engine = _engine(name)
                engine.load_checkpoint(folder, tag=f"{name}{step}")
        assert engine.skipped_steps == 0
        ends.append(full_parameters(engine.module))
        if name == "local":
            _saved_between_local_steps(engine, folder, rank)
        engine.destroy()
    assert_same(ends[1], ends[0], f"{name} resumed")


def _engine(name: str) -> Engine:
    kind, stage, params = CONFIGURED[name]
    config = {
        "train_batch_size": dist.get_world_size(),
        "bf16": {"enabled": name == "local"},
        "optimizer": {"type": kind, "params": {"lr": 1e-3, "eps": 1e-2, **params}},
        "zero_optimization": {"stage": stage},
    }
    return zeroshard.initialize(model=_model(), config=config)[0]


def _saved_between_local_steps(engine: Engine, folder: str, rank: int) -> None:
    """Each rank gets its own parameters back, which differ, in bfloat16 and as master weights; then they talk again."""
    for step in range(STEPS + 5, STEPS + 7):
        engine.backward(_loss(engine, Batch(step, 0, rank)))
        engine.step()
    engine.save_checkpoint(folder, tag="apart")
    own = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    both: list[Any] = [None, None]
    dist.all_gather_object(both, own)
    assert any(not torch.equal(both[0][name], both[1][name]) for name in own)
    resumed = _engine("local")
    resumed.load_checkpoint(folder, tag="apart")
    assert_same({name: parameter.detach() for name, parameter in resumed.module.named_parameters()}, own, "own again")
    for each in (engine, resumed):
        for step in range(STEPS + 7, STEPS + 9):
            each.backward(_loss(each, Batch(step, 0, rank)))
            each.step()
    assert_same(full_parameters(resumed.module), full_parameters(engine.module), "after the next talk")
    engine.save_checkpoint(folder, tag="together")
    resumed.destroy()


def test_skipped_steps_leave_no_trace_and_checkpoints_resume_in_both_phases(tmp_path: Path) -> None:
    run_ranks(2, _skips_and_resumes, str(tmp_path))
    run_ranks(1, _on_one_rank, str(tmp_path))


def _on_one_rank(rank: int, world: int, folder: str) -> None:
    """What was saved between local steps is of so many ranks; what was saved after a talk, of any number."""
    engine = _engine("local")
    with pytest.raises(CheckpointError, match=r"between local steps of ZeroOneAdam.*load it at as many ranks"):
        engine.load_checkpoint(folder, tag="apart")
    engine.load_checkpoint(folder, tag="together")
    engine.backward(_loss(engine, Batch(0, 0, rank)))
    engine.step()
    engine.destroy()


def test_what_can_not_be_averaged_in_one_bit_is_refused_by_name() -> None:
    for stage in (2, 3):
        model = _model()
        with pytest.raises(PlanError, match=r"OneBitAdam sends compressed momentum .* stages 0 and 1 only"):
            zeroshard.shard(model, MAKERS["OneBitAdam"](model), plan=stage)
    model = _model()
    with pytest.raises(PlanError, match="OneBitLamb can't clip by the gradients' norm"):
        zeroshard.shard(model, MAKERS["OneBitLamb"](model), plan=1, clip_norm=1.0)
    with pytest.raises(PlanError, match="freeze_step 0: at least one step of warm-up"):
        zeroshard.shard(model, zeroshard.OneBitAdam(model.parameters(), freeze_step=0), plan=0)


def _finished_plans(rank: int, world: int) -> None:
    for recipe, words in (
        (Recipe(STAGES[3], moments=1), "1-bit optimizers run at stages 0 and 1"),
        (Recipe(STAGES[1], moments=1, policy=ExecutionPolicy(clip_norm=1.0)), "set clip_norm 0"),
    ):
        model = _model()
        plan = build_plan(find_units(model), recipe, dp=world)
        with pytest.raises(PlanError, match=words):
            zeroshard.shard(model, MAKERS["OneBitAdam"](model), plan=plan)


def test_a_finished_plan_that_divides_gradients_or_clips_is_refused() -> None:
    run_ranks(2, _finished_plans)


def _norm_late(rank: int, world: int) -> None:
    model = _model()
    _, optimizer = zeroshard.shard(model, MAKERS["OneBitAdam"](model), plan=0)
    for step in range(FREEZE):
        _loss(model, Batch(step, 0, rank)).backward()
        optimizer.step()
    _loss(model, Batch(0, 0, rank)).backward()
    with pytest.raises(UsageError, match="after the optimizer's warm-up they are never averaged"):
        zeroshard.clip_grad_norm_(model, 1.0)


def test_the_norm_is_refused_after_the_warm_up() -> None:
    run_ranks(2, _norm_late)
