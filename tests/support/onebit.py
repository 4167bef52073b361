"""A plain simulation of the 1-bit optimizers on all ranks at once, from their papers, for tests to compare with.

It keeps every rank's errors (and with 0/1 Adam every rank's model) as whole tensors and sends nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tests.support.models import WIDTH, Batch
from tests.support.zoo import Stack
from zeroshard.plan.plan import Plan

FREEZE = 3
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-4, "weight_decay": 0.1}
LAMB: dict[str, Any] = {**ADAM, "coeff_beta": 0.5, "factor_threshold": 0.2, "factor_max": 2.0, "max_coeff": 5.0}
BOUNDS: dict[str, Any] = {"min_coeff": 0.01, "factor_min": 0.5}


def frozen_model() -> nn.Module:
    torch.manual_seed(3)
    model = Stack(3)
    model.blocks[1].requires_grad_(False)
    return model


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for _, p in named if p.dim() > 1]},
        {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0, "lr": 5e-3},
    ]


def skipping_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Block 2 has no gradient in step 4, on no rank; on rank 1 it has none in step 5 either."""
    skip = batch.step == 4 or (batch.step == 5 and batch.rank == 1)
    return model(batch.normal(3, WIDTH), (0, 1) if skip else (0, 1, 2)).float().square().mean()


class Simulation:
    """All ranks in one process, each with its own gradients and errors, and no packing, slicing or sending."""

    def __init__(self, plan: Plan, world: int, lamb: bool) -> None:
        self.model, self.world, self.lamb = frozen_model(), world, lamb
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
            skipping_loss(self.model, batch).backward()
        return {name: p.grad.reshape(-1).clone() for name, p in self.parameters.items() if p.grad is not None}

    def _average(self, name: str, values: list[torch.Tensor]) -> torch.Tensor:
        found = torch.zeros_like(values[0])
        for cut in self.pieces[name]:
            mean = torch.zeros_like(values[0][cut])
            for rank, value in enumerate(values):
                mean += one_bit(value[cut], self.worker[rank][name][cut]) / self.world
            found[cut] = one_bit(mean, self.server[name][cut])
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


def one_bit(value: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Sign times root mean square of value and error; what that leaves out becomes the error."""
    whole = value + error
    found = torch.where(whole >= 0, 1.0, -1.0) * (whole.norm() / math.sqrt(len(whole)))
    error.copy_(whole - found)
    return found


class ZeroOneSimulation(Simulation):
    """0/1 Adam with a model for each rank."""

    def __init__(self, plan: Plan, world: int, policy: dict[str, int]) -> None:
        super().__init__(plan, world, lamb=False)
        self.policy = policy
        self.models = [frozen_model() for _ in range(world)]
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
