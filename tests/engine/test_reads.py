"""Who reads a parameter, and where: what a forward reads is there, and what nobody can read here says so.

Readers: a parent's forward, a sibling's, a custom autograd.Function that keeps the parameter or gives its gradient at
once, a functional call, a penalty over all parameters. Each at all stages, with accumulation, under both kinds of
activation checkpointing, compiled, with a frozen base, and against plain torch.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.support.cases import ALL_CASES
from tests.support.distributed import run_ranks
from tests.support.measure import held_bytes
from tests.support.models import VOCABULARY, WIDTH, Batch, Task, language_loss
from tests.support.training import (
    Setting,
    assert_close,
    assert_same,
    full_parameters,
    sgd,
    shard_task,
    shared_reference,
    train_reference,
    train_sharded,
)
from tests.support.zoo import Mlp
from zeroshard.engine.core.handle import handle_of
from zeroshard.errors import DivergenceError, UsageError
from zeroshard.plan.memory import state_bytes
from zeroshard.sharding.sharded_init import ShardedInit

STAGES = (0, 1, 2, 3)
Read = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class _Keeps(torch.autograd.Function):
    """Saves the parameter itself for its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class _AtOnce(torch.autograd.Function):
    """A loss that makes its gradients in the forward and keeps no parameter, as fused cross-entropies do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inner, taken = x.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = functional.linear(inner, taken).logsumexp(-1).mean()
        ctx.save_for_backward(*torch.autograd.grad(loss, (inner, taken)))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_x, of_weight = ctx.saved_tensors
        return of_x * gradients[0], of_weight * gradients[0]


class Reader(nn.Module):
    """Blocks, an embedding and a head; `read` makes something of the last hidden states in the model's own forward."""

    def __init__(self, read: Read, tied: bool = False, frozen: bool = False, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Mlp(), Mlp(), Mlp()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.head.requires_grad_(False)
            self.blocks[0].requires_grad_(False)
        self.read, self.reentrant = read, checkpoints

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        if self.reentrant is None:
            return self.read(self, x)
        found = checkpoint(self.read, self, x, use_reentrant=self.reentrant)
        assert isinstance(found, torch.Tensor)
        return found


def _linear(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, model.get_parameter("head.weight"))


def _keeps(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = _Keeps.apply(x, model.get_parameter("head.weight"))
    assert isinstance(found, torch.Tensor)
    return found


def _at_once(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = _AtOnce.apply(x, model.get_parameter("head.weight"))
    assert isinstance(loss, torch.Tensor)
    head = model.get_submodule("head")
    return head(x) + loss


def _block_of_long_ago(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = model.get_parameter("blocks.0.up.weight")
    return _linear(model, x + functional.linear(x, weight[:WIDTH]) * weight.detach().abs().mean())


def _functional(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    block = model.get_submodule("blocks.1")
    halved = {name: value * 0.5 for name, value in block.named_parameters()}
    found = torch.func.functional_call(block, halved, (x,))
    return _linear(model, found)


def _penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    penalty = sum(value.abs().sum() for value in model.parameters() if value.dim() > 1)
    return _linear(model, x) + 0.01 * penalty


def _copies(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = model.get_parameter("blocks.0.up.weight")
    copied = copy.deepcopy(weight)
    assert type(copied) is type(nn.Parameter(weight)) is nn.Parameter
    derivative = torch.func.jacfwd(torch.sin)(model.get_parameter("blocks.1.up.bias"))
    assert isinstance(derivative, torch.Tensor)
    return _linear(model, x) * copied.detach().abs().mean() + derivative.mean()


def _unused(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    head = model.get_submodule("head")
    return head(x) + 0 * sum(value.sum() for value in head.parameters())


READS: dict[str, Read] = {
    "linear": _linear,
    "function that keeps it": _keeps,
    "function that is done at once": _at_once,
    "block that ran before": _block_of_long_ago,
    "functional call": _functional,
    "penalty over all": _penalty,
    "copies": _copies,
    "zero times its own": _unused,
}


@dataclass(frozen=True)
class Around:
    """What is around a read."""

    tied: bool = False
    frozen: bool = False
    checkpoints: bool | None = None
    adapters: bool = False
    init: Callable[[], AbstractContextManager[object]] = nullcontext


AROUND = {
    "plain": Around(),
    "tied": Around(tied=True),
    "frozen": Around(frozen=True),
    "reentrant": Around(checkpoints=True),
    "not reentrant": Around(checkpoints=False),
    "adapters": Around(frozen=True, adapters=True),
    "deferred": Around(init=zeroshard.Init),
    "built in shards": Around(init=ShardedInit),
}


class _Adapted(nn.Module):
    """A frozen layer and a low-rank correction beside it, as LoRA has them; its weight is still found by its name."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight + self.up.weight @ self.down.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def _reader(read: Read, around: Around) -> nn.Module:
    model = Reader(read, around.tied, around.frozen, around.checkpoints)
    for block in model.blocks if around.adapters else ():
        assert isinstance(block, Mlp)
        block.down = _Adapted(block.down)  # pyright: ignore[reportAttributeAccessIssue]
    return model


def _task(read: Read, around: Around, *, deferred: bool = False) -> Task:
    def build() -> nn.Module:
        with around.init() if deferred else nullcontext():
            return _reader(read, around)

    return Task(build, language_loss)


def _matrix(rank: int, world: int, name: str) -> None:
    """Every stage with one micro-batch and nothing around; where parameters or gradients are divided, all the rest."""
    for what, around in AROUND.items():
        task, sharded = _task(READS[name], around), _task(READS[name], around, deferred=True)
        built_whole = around.init is nullcontext and not around.adapters
        for setting, stages in (
            (Setting(steps=3, optimizer=sgd), STAGES if ALL_CASES or what == "plain" else (3,)),
            (Setting(steps=2, micro=2, clip=0.5), (2, 3) if built_whole else (3,)),
        ):
            reference = shared_reference(task, setting, world)
            check = assert_same if setting.micro == 1 else assert_close
            for stage in stages:
                found = train_sharded(sharded, setting.at(stage), rank)
                check(found.parameters, reference.parameters, what=f"{name}, {what}, stage {stage}")


@pytest.mark.parametrize("name", READS)
def test_what_a_forward_reads_is_there_at_every_stage(name: str) -> None:
    run_ranks(2, _matrix, name)


def _compiled(rank: int, world: int) -> None:
    for name in ("linear", "block that ran before"):
        task = _task(READS[name], Around())
        setting = Setting(steps=3, plan=3)
        reference = train_reference(task, setting, world, rank)

        def compiled(model: nn.Module, batch: Batch) -> torch.Tensor:
            if not isinstance(model, torch._dynamo.OptimizedModule) and model._compiled_call_impl is None:
                model.compile(backend="aot_eager")
            return language_loss(model, batch)

        found = train_sharded(Task(task.build, compiled), setting, rank)
        assert_close(found.parameters, reference.parameters, what=name)


def test_compiled_models_read_the_same() -> None:
    run_ranks(2, _compiled)


def _planned(rank: int, world: int) -> None:
    """From the second step the plan has the unit, its bytes are held, and no gather comes unforeseen."""
    model, optimizer = shard_task(_task(_linear, Around()), Setting(plan=3))
    log = handle_of(model).comm.sent
    counted = []
    for step in range(3):
        zeroshard.drain(model)
        log.reset_totals()
        language_loss(model, Batch(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        zeroshard.drain(model)
        counted.append(log.totals()["all-gather"])
    plan = zeroshard.plan_of(model)
    assert [plan.units[unit].name for unit in plan.kept] == ["head"]
    assert zeroshard.Plan.from_json(plan.to_json()) == plan
    planned, held = state_bytes(plan), held_bytes(model)
    assert (held.gather_slots, held.at_rest, held.param) == (planned.gather_slots, planned.at_rest, planned.param)
    assert counted[1] == counted[2]
    with torch.no_grad():
        model(Batch(0, 0, rank).tokens())
    assert all(parameter.numel() == 0 for parameter in model.parameters())


def test_later_passes_foresee_what_the_first_one_read() -> None:
    run_ranks(2, _planned)


def _one_rank_reads(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if torch.distributed.get_rank() == 0:
        x = x + model.get_parameter("blocks.1.up.weight").norm()
    return model.get_submodule("head")(x)


def _diverges(rank: int, world: int) -> str:
    model, _ = shard_task(_task(_one_rank_reads, Around()), Setting(plan=3))
    with pytest.raises(DivergenceError) as caught:
        _three_passes(model, rank)
    return str(caught.value)


def _three_passes(model: nn.Module, rank: int) -> None:
    for step in range(3):
        language_loss(model, Batch(step, 0, rank)).backward()
        zeroshard.drain(model)


def test_a_read_that_one_rank_makes_alone_is_named() -> None:
    for said in run_ranks(2, _diverges):
        assert "blocks.1" in said, said
        assert "rank" in said


REFUSED: dict[str, Callable[[nn.Parameter], object]] = {
    "abs": lambda p: p.abs().sum(),
    "norm": lambda p: p.norm(),
    "linalg": lambda p: torch.linalg.vector_norm(p),
    "foreach": lambda p: torch._foreach_norm([p]),
    "times zero": lambda p: 0 * p.sum(),
    "detach": lambda p: p.detach().clone(),
    "data": lambda p: p.data.clone(),
    "data in place": lambda p: p.data.mul_(2),
    "copied from": lambda p: torch.zeros(3).copy_(p),
    "copied to": lambda p: p.data.copy_(torch.zeros(3)),
    "in place": lambda p: p.add_(1.0),
    "initialized": lambda p: nn.init.zeros_(p),
    "other data": lambda p: setattr(p, "data", torch.zeros(2)),
    "index": lambda p: p[0],
    "index set": lambda p: p.__setitem__(0, 1.0),
    "comparison": lambda p: p == 0,
    "truth": lambda p: bool(p),
    "number": lambda p: float(p.flatten()[0]),
    "zeros_like": lambda p: torch.zeros_like(p),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "numpy": lambda p: p.detach().numpy(),
    "list": lambda p: p.tolist(),
    "matrix product": lambda p: torch.ones(2, 2) @ p,
    "left operand": lambda p: torch.ones(2, 2) * p,
    "stack": lambda p: torch.stack([p, p]),
    "dtype": lambda p: p.double(),
    "copy": lambda p: copy.deepcopy(p),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "aten": lambda p: torch.ops.aten.mul.Tensor(p, 2),
    "as subclass": lambda p: p.as_subclass(torch.Tensor).norm(),
    "complex": lambda p: complex(p),
    "dlpack": lambda p: torch.from_dlpack(p),
    "parameter of it": lambda p: nn.Parameter(p).norm(),
    "parameter of its data": lambda p: nn.Parameter(p.data) * 2,
    "average": lambda p: torch.optim.swa_utils.AveragedModel(nn.ParameterList([p])),
    "iteration": lambda p: list(p),
    "equality": lambda p: torch.equal(p, torch.zeros(2)),
    "pickle": lambda p: pickle.dumps(p),
    "collective": lambda p: torch.distributed.all_reduce(p.data),
    "array": lambda p: np.asarray(p.data),
    "vmap": lambda p: torch.func.vmap(lambda row: row * 2)(p),
    "jacfwd": lambda p: torch.func.jacfwd(lambda value: value.sum())(p),
    "functional call": lambda p: torch.func.functional_call(nn.Linear(2, 2), {"weight": p.detach()}, (torch.ones(2),)),
    "drawn orthogonal": lambda p: nn.init.orthogonal_(p),
    "drawn sparse": lambda p: nn.init.sparse_(p, 0.5),
    "drawn constant": lambda p: nn.init.constant_(p.data, 0.5),
    "drawn to their deviation": lambda p: nn.init.kaiming_normal_(p),
    "drawn truncated": lambda p: nn.init.trunc_normal_(p),
}


def _refuses(rank: int, world: int) -> None:
    model, _ = shard_task(_task(_linear, Around()), Setting(plan=3))
    parameter = model.get_parameter("blocks.0.up.weight")
    assert isinstance(parameter, nn.Parameter)
    for name, use in REFUSED.items():
        with pytest.raises(UsageError) as caught:
            use(parameter)
        said = str(caught.value)
        assert "'blocks.0.up.weight'" in said, name
        assert "GatheredParameters" in said, name
    language_loss(model, Batch(0, 0, rank)).backward()  # and nothing has been harmed


def test_whatever_reads_a_resting_parameter_outside_of_a_forward_is_refused_by_name() -> None:
    run_ranks(2, _refuses)


def _forward_derivative(rank: int, world: int) -> None:
    def derivative(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        weight = model.get_parameter("blocks.0.up.weight")
        tangents = (torch.ones_like(weight),) if weight.numel() else (torch.zeros(2),)
        return torch.func.jvp(torch.sum, (weight,), tangents)[1] + x

    model, _ = shard_task(_task(derivative, Around()), Setting(plan=3))
    with pytest.raises(UsageError, match=r"forward derivatives .* of parameter 'blocks.0.up.weight' while it rests"):
        language_loss(model, Batch(0, 0, rank))


def test_a_forward_derivative_of_a_resting_parameter_is_refused_by_name() -> None:
    run_ranks(2, _forward_derivative)


def _answers(rank: int, world: int) -> None:
    model, _ = shard_task(_task(_linear, Around()), Setting(plan=3))
    parameter = model.get_parameter("head.weight")
    whole = (VOCABULARY, WIDTH)
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(parameter, torch.Tensor)
    assert (parameter.numel(), parameter.nbytes, parameter.data_ptr()) == (0, 0, 0)
    assert parameter.shape == torch.Size([0])  # as libraries ask whether it is sharded
    assert parameter.shape == whole
    assert (parameter.size(0), parameter.shape[1], parameter.ndim, parameter.dim(), len(parameter)) == (
        *whole,
        2,
        2,
        whole[0],
    )
    assert (parameter.dtype, parameter.device.type, parameter.is_leaf) == (torch.float32, "cpu", True)
    assert parameter.requires_grad
    assert parameter.grad is None
    assert parameter.to("cpu") is parameter
    assert parameter.untyped_storage().nbytes() == 0
    assert "head.weight" in repr(parameter)
    assert parameter in {parameter}
    assert parameter.register_hook(lambda gradient: gradient) is not None
    assert parameter.requires_grad_(True) is parameter
    view = parameter.expand_as(parameter)
    assert view.grad_fn is not None
    assert view.grad_fn.next_functions[0][0] is torch.autograd.graph.get_gradient_edge(parameter).node
    with pytest.raises(UsageError, match=r"'head\.weight'"):
        view.sum()
    assert [name for name, value in model.named_parameters() if value is parameter] == ["head.weight"]
    assert model.to("cpu") is model
    with zeroshard.GatheredParameters([parameter]):
        assert type(parameter) is nn.Parameter
        assert tuple(parameter.shape) == whole
        assert float(parameter.norm()) > 0
    assert parameter.numel() == 0


def test_a_resting_parameter_says_what_it_is() -> None:
    run_ranks(2, _answers)


def _after_a_trace(rank: int, world: int) -> None:
    """Whoever traces a forward refuses its collectives; the next one gathers again what it had begun to gather."""
    task, setting = _task(_linear, Around()), Setting(plan=3, optimizer=sgd)
    expected = train_reference(task, replace(setting, steps=1), world, rank)
    model, optimizer = shard_task(task, setting)
    with pytest.raises(UsageError, match=r"Export it before shard\(\)"):
        torch.jit.trace(model, Batch(0, 0, rank).tokens())
    with pytest.raises(UsageError, match=r"Export it before shard\(\)"):
        torch.export.export(model, (Batch(0, 0, rank).tokens(),))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Compile it without fullgraph=True"):
        torch.compile(model, backend="eager", fullgraph=True)(Batch(0, 0, rank).tokens())
    language_loss(model, Batch(0, 0, rank)).backward()
    optimizer.step()
    assert_same(full_parameters(model), expected.parameters)


def test_a_gather_that_failed_is_no_gather() -> None:
    run_ranks(2, _after_a_trace)


def _after_failures(rank: int, world: int) -> None:
    model, _ = shard_task(_task(_linear, Around()), Setting(plan=3))
    parameter = model.get_parameter("blocks.0.up.weight")
    for failing in (lambda: model.get_submodule("blocks.1")(torch.ones(3, WIDTH + 1)), lambda: model(torch.ones(2, 2))):
        with pytest.raises((RuntimeError, IndexError)):
            failing()
        if rank == 0:  # alone: a gather would wait for the others
            with pytest.raises(UsageError, match="GatheredParameters"):
                parameter.norm()
    language_loss(model, Batch(0, 0, rank)).backward()


def test_a_forward_that_failed_is_over_for_those_who_read() -> None:
    run_ranks(2, _after_failures)
