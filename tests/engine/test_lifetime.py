"""What a sharded model leaves behind, and that compiled code never runs without its gathers."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import Batch, Task, Transformer, language_loss, square_loss
from tests.support.training import (
    Setting,
    adamw,
    assert_close,
    assert_same,
    build,
    full_parameters,
    shard_task,
    train_reference,
)
from tests.support.zoo import Checkpointed, Stack
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.memory.guard import sharded_gradient
from zeroshard.errors import UsageError

TASK = Task(Stack, square_loss)


def _live() -> tuple[int, int]:
    """Live tensors of this process and their bytes."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
    return len(tensors), sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _settled(expected: tuple[int, int]) -> tuple[int, int]:
    """Live tensors and bytes, as `expected` or after ten seconds: Gloo's thread lets go of a dropped engine's
    last collective when it next runs, not when the collective is done."""
    limit = time.monotonic() + 10
    while (live := _live()) != expected and time.monotonic() < limit:
        time.sleep(0.02)
    return live


def _engine_once(rank: int, stage: int, close: bool) -> None:
    model, optimizer = shard_task(TASK, Setting(plan=stage))
    for step in range(2):
        square_loss(model, Batch(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if close:
        zeroshard.close(model)


def _five_engines(rank: int, world: int, close: bool) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    counts, watchdogs, native = [], [], []
    for stage in (3, 0, 1, 2, 3, 3):  # the first one fills what libraries cache on first use
        _engine_once(rank, stage, close)
        counts.append(_settled(counts[0] if counts else (0, 0)))
        torch.distributed.barrier()
        watchdogs.append(_watchdogs())
        native.append(len(os.listdir("/proc/self/task")))
    return counts, watchdogs, native


def _watchdogs() -> int:
    return sum(thread.name == "zeroshard-watchdog" and thread.is_alive() for thread in threading.enumerate())


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
def test_five_engines_in_one_process_leave_nothing(close: bool) -> None:
    for counts, watchdogs, native in run_ranks(2, _five_engines, close):
        assert len(set(counts)) == 1, counts
        assert watchdogs == [0] * 6
        if close:  # a model that is merely dropped can't tell when its communicators are idle
            assert len(set(native)) == 1, native


def _threads_and_files(most: tuple[int, int] | None) -> tuple[int, int]:
    """Those of this process, once there are no more than `most`, or after some seconds: a thread takes time to end."""
    deadline = time.monotonic() + 10
    while True:
        found = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        if most is None or (found[0] <= most[0] and found[1] <= most[1]) or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def _one_model(rank: int, world: int) -> list[tuple[int, int]]:
    """Threads and open files of the process after each of the engines that one model had."""
    model, held = Stack(), list[tuple[int, int]]()
    for _ in range(3):
        model, _ = zeroshard.shard(model, adamw(model))
        square_loss(model, Batch(0, 0, rank)).backward()
        zeroshard.close(model)
        gc.collect()
        held.append(_threads_and_files(held[-1] if held else None))
    return held


def test_engines_that_one_model_had_leave_nothing() -> None:
    for held in run_ranks(2, _one_model):
        # A thread of the first engine may end late, so that there are fewer after the second.
        assert all(later[0] <= first[0] and later[1] <= first[1] for first, later in pairwise(held)), held


def _closed(rank: int, world: int) -> None:
    model, _ = shard_task(TASK, Setting(plan=2))
    square_loss(model, Batch(0, 0, rank)).backward()
    zeroshard.close(model)
    zeroshard.close(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(UsageError, match="not sharded"):
        full_parameters(model)


def test_close_takes_the_hooks_off_and_may_be_repeated() -> None:
    run_ranks(2, _closed)


def _after_the_group(rank: int, world: int) -> None:
    model, optimizer = shard_task(TASK, Setting())
    square_loss(model, Batch(0, 0, rank)).backward()
    optimizer.step()
    torch.distributed.destroy_process_group()
    zeroshard.close(model)


def test_close_after_the_process_group_is_gone() -> None:
    run_ranks(2, _after_the_group)


def _twice(rank: int, world: int) -> None:
    model, _ = shard_task(TASK, Setting())
    with pytest.raises(UsageError, match="sharded already; for another engine close it first"):
        zeroshard.shard(model, adamw(model))
    square_loss(model, Batch(0, 0, rank)).backward()
    before = full_parameters(model)
    zeroshard.close(model)
    with pytest.raises(UsageError, match="or shard it again to train on"):
        zeroshard.full_state_dict(model)
    model, optimizer = zeroshard.shard(model, adamw(model))
    assert optimizer is not None
    assert_same(full_parameters(model), before, "sharded again")
    square_loss(model, Batch(0, 0, rank)).backward()
    optimizer.step()


def test_a_model_has_one_engine_at_a_time() -> None:
    run_ranks(2, _twice)


def _compile_blocks(model: nn.Module) -> None:
    assert isinstance(model, Stack)
    for block in model.blocks:
        block.compile(backend="eager")


def _compile_blocks_aot(model: nn.Module) -> None:
    assert isinstance(model, Stack)
    for block in model.blocks:
        block.compile(backend="aot_eager")


def _compile_whole(model: nn.Module) -> None:
    model.compile(backend="eager")


def _gathers(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, task: Task) -> tuple[int, int]:
    """All-gathers of one training step, and of one inference, after two steps of training."""
    log = handle_of(model).comm.log
    for step in range(3):
        log.reset_totals()
        task.loss(model, Batch(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = log.totals()["all-gather"][0]
    log.reset_totals()
    with torch.no_grad():
        task.loss(model, Batch(9, 0, rank))
    return trained, log.totals().get("all-gather", (0, 0))[0]


def _compile_orders(rank: int, world: int, compile_: Callable[[nn.Module], None], task: Task) -> None:
    reference = train_reference(task, Setting(steps=3), world, rank)
    plain_model, plain_optimizer = shard_task(task, Setting())
    expected = _gathers(plain_model, plain_optimizer, rank, task)
    for before in (True, False):
        model = build(task)
        if before:
            compile_(model)
            task.loss(model, Batch(0, 0, rank)).backward()  # compiled code exists by now, without any hook
            model.zero_grad()
        model, optimizer = zeroshard.shard(model, adamw(model), plan=3)
        if not before:
            compile_(model)
        assert optimizer is not None
        assert _gathers(model, optimizer, rank, task) == expected, f"compiled before: {before}"
        assert_close(full_parameters(model), reference.parameters, what=f"compiled before: {before}")


@pytest.mark.parametrize("compile_", [_compile_blocks, _compile_blocks_aot, _compile_whole], ids=lambda f: f.__name__)
def test_compiling_before_or_after_sharding_gathers_the_same(compile_: Callable[[nn.Module], None]) -> None:
    run_ranks(2, _compile_orders, compile_, TASK)


class _Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _compiled_deep(rank: int, world: int) -> None:
    """A model of more blocks (10) than torch.compile makes versions of one function for (8)."""
    records = _Records()
    logging.getLogger("torch._dynamo.convert_frame").addHandler(records)
    task = Task(partial(Transformer, depth=10), language_loss)
    model, optimizer = shard_task(task, Setting())
    model.compile(backend="eager")
    for step in range(2):
        task.loss(model, Batch(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            task.loss(model.eval(), Batch(step, 0, rank))
        model.train()
    assert not records.texts


def test_a_whole_model_that_is_compiled_stays_within_the_limit_however_many_blocks_it_has() -> None:
    run_ranks(1, _compiled_deep)


def _checkpointed() -> nn.Module:
    return Checkpointed(reentrant=False, segment=1)


def test_compiled_blocks_under_checkpointing() -> None:
    run_ranks(2, _compile_orders, _compile_blocks, Task(_checkpointed, square_loss))


def _wrapped(rank: int, world: int) -> None:
    """torch.compile(model) makes a wrapper: the loop calls the wrapper, zeroshard has the model."""
    reference = train_reference(TASK, Setting(steps=3), world, rank)
    model, optimizer = shard_task(TASK, Setting())
    compiled = torch.compile(model, backend="eager")
    for step in range(3):
        square_loss(compiled, Batch(step, 0, rank)).backward()  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
    assert_close(full_parameters(model), reference.parameters)


def test_the_wrapper_of_torch_compile_trains() -> None:
    run_ranks(2, _wrapped)


def test_code_is_compiled_amid_an_accumulation() -> None:
    """Parameters carry stand-ins then, which torch.compile describes beside them."""
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8))
    for parameter in model.parameters():
        parameter.grad = sharded_gradient(parameter, parameter.detach().clone())
    compiled = torch.compile(model, backend="aot_eager")
    for length in (3, 5):
        ids = torch.arange(length)
        assert torch.equal(compiled(ids), model(ids))


def _interrupted(rank: int, world: int) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for stage in (0, 1, 2, 3):
        found: list[dict[str, torch.Tensor]] = []
        for interrupts in (False, True):
            model, optimizer = shard_task(TASK, Setting(plan=stage))
            for step in range(2):
                if interrupts:
                    hook = model.get_submodule("blocks.1").register_forward_pre_hook(interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        square_loss(model, Batch(9, 0, rank))
                    hook.remove()
                square_loss(model, Batch(step, 0, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(full_parameters(model))
            zeroshard.close(model)
        assert_same(found[1], found[0], f"stage {stage}")


def test_training_goes_on_after_a_forward_that_was_interrupted() -> None:
    """torch runs no hooks after a KeyboardInterrupt, so the forward seemed to run for good: no backward was taken."""
    run_ranks(2, _interrupted)


class _Twice(Stack):
    """A model whose block calls the whole model once more, without gradients."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            with torch.no_grad():
                x = x + 0.1 * self(x)
        return super().run_blocks(x)


def _calls_itself(rank: int, world: int) -> None:
    task = Task(_Twice, square_loss)
    expected = train_reference(task, Setting(steps=2), world, rank).parameters
    for stage in (0, 3):
        model, optimizer = shard_task(task, Setting(plan=stage, steps=2))
        for step in range(2):
            square_loss(model, Batch(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_close(full_parameters(model), expected, 1e-6, f"stage {stage}")
        zeroshard.close(model)


def test_a_forward_that_calls_the_whole_model_again_is_one_pass() -> None:
    run_ranks(2, _calls_itself)
