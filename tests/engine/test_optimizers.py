"""Every element-wise optimizer computes on shards what it computes on whole parameters; others are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.cases import only_with_all_cases
from tests.support.distributed import run_ranks
from tests.support.models import WIDTH, Batch, Task, square_loss
from tests.support.training import Setting, assert_close, assert_same, build, shared_reference, train_sharded
from tests.support.zoo import Stack
from zeroshard.errors import PlanError, UsageError, ZeroShardError
from zeroshard.optim.clients import ELEMENTWISE

OPTIONS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, object]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-6}),
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True, "eps": 1e-6}),
    "AdamW maximize": (torch.optim.AdamW, {"lr": 1e-3, "maximize": True, "eps": 1e-6}),
    "Adam with coupled decay": (torch.optim.Adam, {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-6}),
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "SGD dampening": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "Adagrad started": (torch.optim.Adagrad, {"lr": 0.01, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-3}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-3, "eps": 1e-6}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-3, "eps": 1e-6}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3}),
    "RMSprop maximize": (torch.optim.RMSprop, {"lr": 1e-3, "maximize": True}),
    "RMSprop centered momentum": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-3}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
}
CHAOTIC = ("Rprop",)
"""Its update depends on signs alone: one rounding error of a gradient near zero changes a whole step."""


def _frozen() -> nn.Module:
    model = Stack(3)
    model.blocks[1].requires_grad_(False)
    return model


def _skipping(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Block 2 has no gradient in step 1, so that its step count falls behind."""
    return model(batch.normal(3, WIDTH), (0, 1) if batch.step == 1 else (0, 1, 2)).square().mean()


TASK = Task(_frozen, _skipping)


def grouped(name: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """The optimizer over three groups: matrices with decay, vectors without, and the last layer at half the rate."""
    kind, options = OPTIONS[name]

    def make(model: nn.Module) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        outer = [p for n, p in named if n.startswith("outer")]
        rest = [p for n, p in named if not n.startswith("outer")]
        decay = {} if kind is torch.optim.Rprop else {"weight_decay": 0.1}
        rate = options["lr"]
        assert isinstance(rate, float)
        groups = [
            {"params": [p for p in rest if p.dim() > 1], **decay},
            {"params": [p for p in rest if p.dim() <= 1]},
            {"params": outer, "lr": rate / 2},
        ]
        return kind(groups, **options)

    return make


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Changes the rate of each group in mid-run."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def _every_optimizer(rank: int, world: int, names: tuple[str, ...], stages: tuple[int, ...]) -> None:
    for name in names:
        setting = Setting(steps=5, optimizer=grouped(name), schedule=halving)
        reference = shared_reference(TASK, setting, world)
        # Over more than two ranks the stages take turns: the layout is the same for all optimizers.
        for stage in stages if world <= 2 else stages[names.index(name) % len(stages) :][:1]:
            outcome = train_sharded(TASK, setting.at(stage), rank)
            what = f"{name} at stage {stage}"
            if world <= 2:
                assert_same(outcome.parameters, reference.parameters, what)
            elif name not in CHAOTIC:
                assert_close(outcome.parameters, reference.parameters, 3e-6, what)


NAMES = tuple(OPTIONS)


@pytest.mark.parametrize("names", [NAMES[:9], NAMES[9:]], ids=["first", "second"])
def test_two_ranks_equal_unsharded_bit_for_bit_at_every_stage(names: tuple[str, ...]) -> None:
    run_ranks(2, _every_optimizer, names, (0, 1, 2, 3))


def test_one_rank_equals_unsharded_bit_for_bit() -> None:
    run_ranks(1, _every_optimizer, NAMES, (0, 3))


@only_with_all_cases
def test_three_ranks_equal_unsharded() -> None:
    run_ranks(3, _every_optimizer, NAMES, (1, 3))


def test_every_known_optimizer_is_tested() -> None:
    assert {kind for kind, _ in OPTIONS.values()} == set(ELEMENTWISE)


def _group_options(rank: int, world: int) -> None:
    """Writing to param_groups in mid-run counts, and the groups hold the user's own parameters."""
    for stage in (0, 3):
        model = build(TASK)
        parameters = list(model.parameters())
        _, optimizer = zeroshard.shard(model, grouped("AdamW")(model), plan=stage)
        assert isinstance(optimizer, torch.optim.Optimizer)
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        assert {id(parameter) for parameter in held} == {id(parameter) for parameter in parameters}
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        before = dict(zeroshard.iterate_full_parameters(model))
        before = {name: value.clone() for name, value in before.items()}
        square_loss(model, Batch(0, 0, rank)).backward()
        optimizer.step()
        assert_same(dict(zeroshard.iterate_full_parameters(model)), before, "lr 0")
        with pytest.raises(UsageError, match="can't be added"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        with pytest.raises(UsageError, match="closure"):
            optimizer.step(lambda: torch.zeros(()))


def test_param_groups_are_live_and_hold_the_users_parameters() -> None:
    run_ranks(2, _group_options)


def test_optimizers_that_are_not_elementwise_are_refused_also_when_the_user_allows_untested_ones() -> None:
    model = Stack()
    for optimizer in (
        torch.optim.LBFGS(model.parameters()),
        torch.optim.Adafactor(model.parameters()),
        torch.optim.SparseAdam(list(model.parameters())),
    ):
        for allowed in (False, True):
            with pytest.raises(PlanError, match=f"{type(optimizer).__name__} can't run on sharded state: "):
                zeroshard.shard(model, optimizer, allow_untested=allowed)


class _Normalized(torch.optim.Optimizer):
    """A user's own optimizer that is not element-wise: the step of a tensor has length lr."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])


def test_a_trial_finds_an_optimizer_that_was_allowed_but_is_not_elementwise() -> None:
    model = Stack()
    with pytest.raises(PlanError, match=r"_Normalized was allowed as untested, but a trial .* in two slices"):
        zeroshard.shard(model, _Normalized(model.parameters(), lr=0.1), allow_untested=True)
    config = {"train_batch_size": 1, "zero_allow_untested_optimizer": True}
    with pytest.raises(PlanError, match="_Normalized was allowed as untested"):
        zeroshard.initialize(model=model, optimizer=lambda p: _Normalized(p, lr=0.1), config=config)


class _Damped(torch.optim.Optimizer):
    """Keeps an option beside its groups."""

    def __init__(self, params: object, damping: float = 1.0, *, steps: int = 1) -> None:
        self.damping, self.steps = damping, steps
        super().__init__(params, {})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1 / self.damping)


class _Needy(_Damped):
    def __init__(self, params: object, damping: float) -> None:
        super().__init__(params, damping)


class _ByClosure(_Damped):
    def step(self, closure: object) -> None:  # type: ignore[override]
        raise AssertionError(closure)


def test_an_optimizer_that_would_be_another_one_on_slices_is_refused_by_what_is_lost() -> None:
    model = Stack()
    for optimizer, words in (
        (_Damped(model.parameters(), 50.0), r"_Damped has damping = 50.0 .* has 1.0 and would compute something else"),
        (_Needy(model.parameters(), 1.0), "_Needy can't be made and stepped .*'damping'"),
        (_ByClosure(model.parameters()), "_ByClosure can't be made and stepped .*'closure'"),
    ):
        with pytest.raises(PlanError, match=words):
            zeroshard.shard(model, optimizer, allow_untested=True)
    config = {"train_batch_size": 1, "zero_allow_untested_optimizer": True}
    engine = zeroshard.initialize(model=model, optimizer=_Damped(model.parameters()), config=config)[0]
    with pytest.raises(UsageError, match="groups of _Damped have no 'lr'"):
        engine.get_lr()
    engine.destroy()


def test_hooks_and_groups_of_the_optimizer_that_was_passed_are_its_own_still() -> None:
    model, seen = nn.Linear(2, 2), []
    client = torch.optim.SGD([model.weight], lr=0.1)
    client.register_step_pre_hook(lambda *_: seen.append("before"))
    _, optimizer = zeroshard.shard(model, client, plan=3)
    client.register_step_post_hook(lambda *_: seen.append("after"))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert seen == ["before", "after"]
    assert repr(optimizer).startswith("Sharded SGD (")
    client.add_param_group({"params": [model.bias]})
    with pytest.raises(UsageError, match="SGD that was passed has other parameter groups than when"):
        optimizer.step()
    zeroshard.close(model)


def test_a_factory_must_return_an_optimizer() -> None:
    def factory(parameters: object) -> Any:
        return list(parameters)  # type: ignore[call-overload]

    with pytest.raises(UsageError, match="callable returned a list: it must return"):
        zeroshard.shard(Stack(), factory)
    with pytest.raises(UsageError, match="callable returned a list"):
        zeroshard.initialize(model=Stack(), optimizer=factory, config={"train_batch_size": 1})


def test_an_optimizer_of_ours_does_not_step_before_it_is_sharded() -> None:
    optimizer = zeroshard.Lion(Stack().parameters())
    with pytest.raises(UsageError, match=r"Lion.step\(\): this optimizer is still unsharded"):
        optimizer.step()


class _SignSgd(torch.optim.Optimizer):
    """A user's own element-wise optimizer."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


def _own_optimizer(rank: int, world: int) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return _SignSgd(model.parameters(), lr=1e-3)

    reference = shared_reference(TASK, Setting(optimizer=make), world)
    for stage in (0, 3):
        model = build(TASK)
        with pytest.raises(PlanError, match="_SignSgd is not known"):
            zeroshard.shard(model, make(model), plan=stage)
        _, optimizer = zeroshard.shard(model, make(model), plan=stage, allow_untested=True)
        assert optimizer is not None
        for step in range(4):
            TASK.loss(model, Batch(step, 0, rank)).backward()
            optimizer.step()
        assert_same(dict(zeroshard.iterate_full_parameters(model)), reference.parameters, f"stage {stage}")


def test_own_elementwise_optimizer_is_accepted_on_request() -> None:
    run_ranks(2, _own_optimizer)


def test_foreign_parameters_a_used_optimizer_and_no_trainable_parameter_are_refused() -> None:
    model, other = Stack(), Stack()
    with pytest.raises(PlanError, match="not the model's"):
        zeroshard.shard(model, torch.optim.AdamW(other.parameters()))
    used = torch.optim.AdamW(model.parameters())
    square_loss(model, Batch(0, 0, 0)).backward()
    used.step()
    with pytest.raises(UsageError, match="has stepped already"):
        zeroshard.shard(model, used)
    model.requires_grad_(False)
    with pytest.raises(PlanError, match="no parameter that requires a gradient"):
        zeroshard.shard(model, torch.optim.AdamW(model.parameters()))
    assert all(parameter.numel() for parameter in model.parameters()), "a refused model must stay whole"


def test_optimizer_over_a_part_leaves_the_rest_alone() -> None:
    run_ranks(2, _partial)


def _partial(rank: int, world: int) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, Stack)
        return torch.optim.AdamW([*model.blocks[0].parameters(), model.outer.weight], lr=1e-3, weight_decay=0.1)

    setting = Setting(optimizer=make)
    reference = shared_reference(TASK, setting, world)
    for stage in (0, 1, 2, 3):
        assert_same(train_sharded(TASK, setting.at(stage), rank).parameters, reference.parameters, f"stage {stage}")


def _without(rank: int, world: int) -> list[str]:
    model, optimizer = zeroshard.shard(Stack(), plan=3)
    assert optimizer is None
    model(torch.ones(2, WIDTH)).sum().backward()
    texts = []
    for call in (zeroshard.get_global_grad_norm, lambda m: zeroshard.clip_grad_norm_(m, 1.0)):
        with pytest.raises(ZeroShardError) as caught:
            call(model)
        texts.append(str(caught.value))
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = zeroshard.initialize(model=Stack(), config=config)[0]
    loss = engine(torch.ones(2, WIDTH)).sum()
    for call in (lambda: engine.backward(loss), engine.step):
        with pytest.raises(UsageError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_no_optimizer_is_one_clear_error() -> None:
    for texts in run_ranks(2, _without):
        assert all("without an optimizer" in text or "there is no optimizer" in text for text in texts), texts
