"""Loops that don't follow forward, backward, step: each gives the numbers of unsharded training, or a clear error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import WIDTH, Batch, Task
from tests.support.training import (
    Setting,
    adamw,
    assert_close,
    assert_same,
    build,
    full_parameters,
    shard_task,
    train_reference,
    train_sharded,
)
from tests.support.zoo import Stack
from zeroshard.engine.core.handle import handle_of
from zeroshard.errors import UsageError

STAGES = (0, 1, 2, 3)
ORDERED = (0, 1, 2, 3)


class _PlantedError(Exception):
    pass


class _Explodes(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        raise _PlantedError


def _output_loss(model: nn.Module, batch: Batch, scale: float = 1.0) -> torch.Tensor:
    return model(batch.normal(3, WIDTH) * scale).square().mean()


def two_forwards(model: nn.Module, batch: Batch) -> torch.Tensor:
    return _output_loss(model, batch) + _output_loss(model, batch, 0.5)


def discarded_forward(model: nn.Module, batch: Batch) -> torch.Tensor:
    _output_loss(model, batch, 2.0)
    return _output_loss(model, batch)


def kept_but_unused_forward(model: nn.Module, batch: Batch) -> torch.Tensor:
    model.kept = _output_loss(model, batch, 2.0)
    return _output_loss(model, batch)


def inference_between(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss = _output_loss(model, batch)
    model.eval()
    with torch.no_grad():
        _output_loss(model, batch, 3.0)
    model.train()
    return loss


def error_in_forward(model: nn.Module, batch: Batch) -> torch.Tensor:
    with pytest.raises(RuntimeError):
        model(batch.normal(3, WIDTH), (0, 1)).view(-1, 10**6)
    with pytest.raises(IndexError):
        model(batch.normal(3, WIDTH), (0, 1, 99))
    return _output_loss(model, batch)


def error_in_backward(model: nn.Module, batch: Batch) -> torch.Tensor:
    assert isinstance(model, Stack)
    hidden = model(batch.normal(3, WIDTH), (0, 1))
    again = model(_Explodes.apply(hidden), (2, 3))
    with pytest.raises(_PlantedError):
        again.square().mean().backward()
    model.zero_grad()
    return _output_loss(model, batch)


def retained_graph(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss = _output_loss(model, batch)
    loss.backward(retain_graph=True)
    return loss


def submodule_alone(model: nn.Module, batch: Batch) -> torch.Tensor:
    assert isinstance(model, Stack)
    return model.blocks[1](batch.normal(3, WIDTH)).square().mean()


def submodule_beside(model: nn.Module, batch: Batch) -> torch.Tensor:
    return submodule_alone(model, batch) + _output_loss(model, batch)


def submodule_after(model: nn.Module, batch: Batch) -> torch.Tensor:
    return _output_loss(model, batch) + submodule_alone(model, batch)


def another_order(model: nn.Module, batch: Batch) -> torch.Tensor:
    order = ((0, 1, 2, 3), (3, 2, 1, 0), (1, 1, 0), (2, 0, 3))[batch.step % 4]
    return model(batch.normal(3, WIDTH), order).square().mean()


def no_block_at_all(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch.normal(3, WIDTH), () if batch.rank else ORDERED).square().mean()


def gradient_penalty(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Double backward: the gradient of the input's gradient."""
    x = batch.normal(3, WIDTH).requires_grad_()
    loss = model(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


def parts_of_outputs(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Only one row of the output has a gradient."""
    return model(batch.normal(3, WIDTH))[1].square().mean()


def detached_in_the_middle(model: nn.Module, batch: Batch) -> torch.Tensor:
    """No gradient reaches the first blocks."""
    assert isinstance(model, Stack)
    hidden = model.run_blocks(batch.normal(3, WIDTH)).detach()
    return functional.mse_loss(model(hidden), hidden)


def _within_itself(model: nn.Module, batch: Batch, *, under_grad: bool, before: bool) -> torch.Tensor:
    """A hook of a block calls the whole model, before or after the block has run."""
    assert isinstance(model, Stack)
    running: list[bool] = []

    def call(module: nn.Module, inputs: tuple[torch.Tensor], *output: torch.Tensor) -> object:
        if running:
            return None
        running.append(True)
        with torch.set_grad_enabled(under_grad):
            found = model(inputs[0]).mean()
        running.clear()
        return (output[0] + found) if output else (inputs[0] + found,)

    block = model.blocks[1]
    handle = block.register_forward_pre_hook(call) if before else block.register_forward_hook(call)
    try:
        return _output_loss(model, batch)
    finally:
        handle.remove()


def model_called_before_a_block(model: nn.Module, batch: Batch) -> torch.Tensor:
    return _within_itself(model, batch, under_grad=False, before=True)


def model_called_after_a_block(model: nn.Module, batch: Batch) -> torch.Tensor:
    return _within_itself(model, batch, under_grad=True, before=False)


FLOWS: tuple[Callable[[nn.Module, Batch], torch.Tensor], ...] = (
    two_forwards,
    discarded_forward,
    kept_but_unused_forward,
    inference_between,
    error_in_forward,
    error_in_backward,
    submodule_alone,
    submodule_beside,
    submodule_after,
    another_order,
    no_block_at_all,
    parts_of_outputs,
    detached_in_the_middle,
    model_called_before_a_block,
    model_called_after_a_block,
)


def _compare(
    rank: int,
    world: int,
    flow: Callable[[nn.Module, Batch], torch.Tensor],
    setting: Setting,
    stages: tuple[int, ...] = STAGES,
) -> None:
    task = Task(Stack, flow)
    reference = train_reference(task, setting, world, rank)
    for stage in stages:
        outcome = train_sharded(task, setting.at(stage), rank)
        assert_close(outcome.parameters, reference.parameters, what=f"stage {stage}")
        if setting.micro == 1:
            assert_same(outcome.parameters, reference.parameters, f"stage {stage}")


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
def test_flow_trains_as_unsharded(flow: Callable[[nn.Module, Batch], torch.Tensor]) -> None:
    run_ranks(2, _compare, flow, Setting())


def test_two_backwards_through_a_retained_graph_train_as_unsharded() -> None:
    run_ranks(2, _compare, retained_graph, Setting(micro=2))


def _dropped(rank: int, world: int) -> None:
    task = Task(Stack, _output_loss)
    expected = train_sharded(task, Setting(), rank)
    for stage in STAGES:
        for accumulate in (False, True):
            model = build(task)
            model, optimizer = zeroshard.shard(model, adamw(model), plan=stage, accumulate=accumulate)
            assert optimizer is not None
            for step in range(4):
                _output_loss(model, Batch(step, 0, rank), 7.0).backward()
                model.zero_grad()
                optimizer.step()
                _output_loss(model, Batch(step, 0, rank), 5.0).backward()
                optimizer.zero_grad()
                _output_loss(model, Batch(step, 0, rank)).backward()
                optimizer.step()
            assert_same(full_parameters(model), expected.parameters, f"stage {stage}, accumulate {accumulate}")


def test_gradients_dropped_through_model_or_optimizer_are_gone() -> None:
    run_ranks(2, _dropped)


def _double_backward(rank: int, world: int) -> None:
    _compare(rank, world, gradient_penalty, Setting(micro=2), (0, 1, 2))
    model, _ = shard_task(Task(Stack, gradient_penalty), Setting(micro=2))
    with pytest.raises(UsageError, match="create_graph"):
        gradient_penalty(model, Batch(0, 0, rank))
    assert torch.isfinite(_output_loss(model, Batch(0, 0, rank)))


def test_double_backward_works_on_whole_parameters_and_is_refused_on_sharded_ones() -> None:
    run_ranks(2, _double_backward)


def _second_backward(rank: int, world: int) -> list[str]:
    texts = []
    for stage in STAGES:
        model, optimizer = shard_task(Task(Stack, retained_graph), Setting(plan=stage))
        loss = retained_graph(model, Batch(0, 0, rank))
        with pytest.raises(UsageError) as caught:
            loss.backward()
        texts.append(str(caught.value))
        optimizer.zero_grad()
        _output_loss(model, Batch(0, 0, rank)).backward()
        optimizer.step()
    return texts


def test_second_backward_without_accumulator_is_refused_and_training_goes_on() -> None:
    for texts in run_ranks(2, _second_backward):
        for text in texts:
            assert "second backward before the step" in text
            assert "accumulate=True" in text


def _foreign_clip(rank: int, world: int) -> None:
    for stage in STAGES:
        model, optimizer = shard_task(Task(Stack, _output_loss), Setting(plan=stage))
        _output_loss(model, Batch(0, 0, rank)).backward()
        with pytest.raises(UsageError, match=r"zeroshard\.clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with pytest.raises(UsageError, match=r"zeroshard\.clip_grad_norm_"):
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.shape == parameter.shape
        with pytest.raises(UsageError, match="sharded"):
            next(model.parameters()).grad + 1  # type: ignore[operator]
        optimizer.step()


def test_foreign_clipping_meets_an_error() -> None:
    run_ranks(2, _foreign_clip)


def _own_clip(rank: int, world: int) -> None:
    task, limit = Task(Stack, _output_loss), 0.02
    expected = train_reference(task, Setting(clip=limit), world, rank)
    for stage in STAGES:
        model, optimizer = shard_task(task, Setting(plan=stage))
        norms = []
        for step in range(4):
            task.loss(model, Batch(step, 0, rank)).backward()
            norms.append(zeroshard.clip_grad_norm_(model, limit))
            optimizer.step()
            optimizer.zero_grad()
        assert norms == pytest.approx(expected.norms, rel=1e-6)
        assert_close(full_parameters(model), expected.parameters, what=f"stage {stage}")


def test_own_clipping_clips_and_returns_the_norm() -> None:
    run_ranks(2, _own_clip)


def _reference_model_beside(rank: int, world: int) -> None:
    task = Task(Stack, _output_loss)
    alone = train_sharded(task, Setting(), rank)
    trained, optimizer = shard_task(task, Setting())
    frozen, none = zeroshard.shard(build(task).requires_grad_(False), plan=3)
    assert none is None
    other, other_optimizer = shard_task(task, Setting(plan=2))
    before = full_parameters(frozen)
    for step in range(4):
        batch = Batch(step, 0, rank)
        with torch.no_grad():
            _output_loss(frozen, batch)
        (_output_loss(trained, batch) + 0 * _output_loss(frozen, batch)).backward()
        _output_loss(other, batch).backward()
        other_optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(full_parameters(frozen), before, "the frozen model")
    assert_same(full_parameters(trained), alone.parameters, "the trained model")
    assert_same(full_parameters(other), alone.parameters, "the model of another stage")


def test_several_models_in_one_process() -> None:
    run_ranks(2, _reference_model_beside)


def _teacher_and_student(rank: int, world: int) -> None:
    """One loss over two sharded models that are trained together."""

    def joint(models: list[nn.Module], batch: Batch) -> torch.Tensor:
        x = batch.normal(3, WIDTH)
        for model in models:
            x = model(x)
        return x.square().mean()

    plain = [build(Task(Stack, joint)) for _ in range(2)]
    plain_optimizers = [adamw(model) for model in plain]
    for step in range(3):
        for member in range(world):
            (joint(plain, Batch(step, 0, member)) / world).backward()
        for optimizer in plain_optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for stage in STAGES:
        pairs = [shard_task(Task(Stack, joint), Setting(plan=stage)) for _ in range(2)]
        for step in range(3):
            joint([model for model, _ in pairs], Batch(step, 0, rank)).backward()
            for _, optimizer in pairs:
                optimizer.step()
                optimizer.zero_grad()
        for (model, _), reference in zip(pairs, plain, strict=True):
            assert_close(full_parameters(model), dict(reference.named_parameters()), what=f"stage {stage}")


def test_two_models_in_one_graph() -> None:
    run_ranks(2, _teacher_and_student)


def _read_after_step(rank: int, world_size: int) -> int:
    stale = 0
    for stage in (1, 2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
        sharded, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=stage)
        for _ in range(5):
            sharded(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            read = [parameter.detach().clone() for parameter in sharded.parameters()]
            zeroshard.drain(sharded)
            stale += any(not torch.equal(a, b) for a, b in zip(read, sharded.parameters(), strict=True))
        zeroshard.close(sharded)
    return stale


def test_parameters_that_rest_whole_are_current_when_a_step_returns() -> None:
    assert run_ranks(2, _read_after_step) == [0, 0]


def _reduces_early(rank: int, world_size: int) -> list[int]:
    """Reduce-scatters issued when the backward reaches the first block, while the losses of all steps are kept."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(5)))
    sharded, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=3)
    log, losses, issued = handle_of(sharded).comm.log, [], []
    for _ in range(3):
        first = sharded[0](torch.ones(2, 8))
        before = log.totals().get("reduce-scatter", (0, 0))[0]
        losses.append(sharded(torch.ones(2, 8) + 0 * first).square().mean())
        first.register_hook(lambda _, before=before: issued.append(log.totals()["reduce-scatter"][0] - before))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    zeroshard.close(sharded)
    return issued


def test_a_kept_loss_does_not_hold_up_the_reduces_of_later_backwards() -> None:
    for issued in run_ranks(2, _reduces_early):
        assert issued[0] == issued[1] == issued[2] > 0
