"""A parameter that is read outside of its unit's forward: the right numbers, or an error that says what to do.

And parts of a model that are called by themselves, as `generate` calls an encoder and a loss of one's own the head.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import VOCABULARY, WIDTH, Batch, Task, language_loss, square_loss
from tests.support.training import (
    Setting,
    assert_close,
    assert_same,
    full_parameters,
    sgd,
    shard_task,
    train_reference,
    train_sharded,
)
from tests.support.zoo import Mlp, SharedAcrossBlocks, Stack
from zeroshard.engine.core.handle import handle_of

STAGES = (0, 1, 2, 3)


class _ReadsAfter(Stack):
    """Its own forward reads a weight of a block that has run."""

    def forward(self, x: torch.Tensor, select: tuple[int, ...] | None = None) -> torch.Tensor:
        x = super().forward(x, select)
        block = self.blocks[1]
        assert isinstance(block, Mlp)
        return functional.linear(x, block.up.weight)


class _ReadsBefore(Stack):
    """Its own forward reads a weight of a block before the blocks run, so that gradients come late."""

    def forward(self, x: torch.Tensor, select: tuple[int, ...] | None = None) -> torch.Tensor:
        block = self.blocks[1]
        assert isinstance(block, Mlp)
        return super().forward(functional.linear(x, block.up.weight[:WIDTH]), select)


class _FunctionalHead(nn.Module):
    """Logits from the embedding's weight, as in many language models, without a module for the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Mlp(), Mlp(), Mlp()])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.linear(x, self.embedding.weight)


TASKS = {
    "after": Task(_ReadsAfter, square_loss),
    "before": Task(_ReadsBefore, square_loss),
    "functional head": Task(_FunctionalHead, language_loss),
}


def _by_name(rank: int, world: int, name: str) -> None:
    task = TASKS[name]
    units = ("blocks.0", "blocks.2") if name != "functional head" else ("blocks.0", "blocks.1", "blocks.2")
    for setting in (Setting(units=()), Setting(units=units)):
        reference = train_reference(task, setting, world, rank)
        for stage in STAGES:
            assert_same(train_sharded(task, setting.at(stage), rank).parameters, reference.parameters, f"{stage}")


@pytest.mark.parametrize("name", TASKS)
def test_named_units_make_it_right(name: str) -> None:
    run_ranks(2, _by_name, name)


def _by_default(rank: int, world: int, name: str) -> None:
    task = TASKS[name]
    for setting in (Setting(steps=3), Setting(steps=3, micro=2, clip=0.5)):
        reference = train_reference(task, setting, world, rank)
        check = assert_same if setting.micro == 1 else assert_close
        for stage in STAGES:
            check(train_sharded(task, setting.at(stage), rank).parameters, reference.parameters, what=f"{stage}")


@pytest.mark.parametrize("name", TASKS)
def test_the_units_that_are_found_are_as_right(name: str) -> None:
    run_ranks(2, _by_default, name)


def _other_errors(rank: int, world: int) -> None:
    model, _ = shard_task(TASKS["after"], Setting())
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, WIDTH + 1))
    assert "zeroshard" not in str(caught.value)
    plain, _ = zeroshard.shard(Stack(), plan=3)
    stranger = RuntimeError("of somebody else (0)")
    try:
        raise stranger
    except RuntimeError:
        with torch.no_grad():
            plain(Batch(0, 0, rank).normal(2, WIDTH))
    assert str(stranger) == "of somebody else (0)"


def test_other_errors_are_left_as_they_are() -> None:
    run_ranks(2, _other_errors)


class _Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Mlp(), Mlp(), Mlp()])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class _Headed(nn.Module):
    """Embedding and head share a weight, which is in the root unit with the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = _Backbone()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.backbone.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(tokens))


def _of_parts(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Backbone and head by themselves, also under no_grad and in a checkpoint, and the blocks one by one."""
    assert isinstance(model, _Headed)
    tokens, backbone = batch.tokens(), model.backbone
    with torch.no_grad():
        target = model.head(backbone(tokens)) + 1
    for wrong in (backbone, model.head):
        with pytest.raises((RuntimeError, IndexError)):
            wrong(batch.normal(2, WIDTH + 1))
    x = backbone.embedding(tokens)
    for block in backbone.blocks:
        x = block(x)
    again = checkpoint(model.head, backbone.norm(x), use_reentrant=False)
    return functional.mse_loss(model.head(backbone(tokens)), target) + again.square().mean()


def _of_parts_and_the_whole(model: nn.Module, batch: Batch) -> torch.Tensor:
    assert isinstance(model, _Headed)
    before = model.backbone.embedding(batch.tokens())
    whole = model(batch.tokens())
    return before.square().mean() + whole.square().mean() + model.head(before).square().mean()


def _parts(rank: int, world: int) -> None:
    for loss in (_of_parts, _of_parts_and_the_whole):
        for setting in (Setting(steps=3, optimizer=sgd), Setting(steps=2, micro=2, clip=0.5)):
            task = Task(_Headed, loss)
            reference = train_reference(task, setting, world, rank)
            for stage in STAGES:
                outcome = train_sharded(task, setting.at(stage), rank)
                assert_close(outcome.parameters, reference.parameters, what=f"{loss.__name__}, stage {stage}")
    model, _ = shard_task(Task(_Headed, _of_parts), Setting())
    assert isinstance(model, _Headed)
    log = handle_of(model).comm.log
    tokens = Batch(0, 0, rank).tokens()
    with torch.no_grad():
        model(tokens)
        log.reset_totals()
        model.backbone.embedding(tokens)
    assert log.totals().get("all-gather", (0, 0))[0] <= 1  # of the root unit, and no block
    assert all(parameter.numel() == 0 for parameter in model.parameters())


def _amid_an_accumulation(rank: int, world: int) -> None:
    model, _ = shard_task(Task(_Headed, language_loss), Setting(micro=2))
    seen: list[bool] = []
    for module in (model, *model.modules()):
        module.register_forward_pre_hook(
            lambda module, _: seen.extend(
                parameter.grad is None or parameter.grad.shape == parameter.shape
                for parameter in module.parameters(recurse=False)
            )
        )
    for micro in range(2):
        language_loss(model, Batch(0, micro, rank)).backward()
    assert len(seen) > 20
    assert all(seen)


def test_whole_parameters_have_whole_stand_ins_for_gradients_as_torch_compile_wants_them() -> None:
    run_ranks(2, _amid_an_accumulation)


def test_parts_called_by_themselves_train_as_they_do_unsharded() -> None:
    run_ranks(2, _parts)


def _of_units(model: nn.Module, batch: Batch) -> torch.Tensor:
    assert isinstance(model, SharedAcrossBlocks)
    x = batch.normal(2, WIDTH)
    return sum((model.blocks[index](x).square().mean() for index in (3, 0, 1)), torch.zeros(()))


def _units(rank: int, world: int) -> None:
    blocks = tuple(f"blocks.{index}" for index in range(4))
    setting = Setting(steps=3, optimizer=sgd, units=blocks)
    task = Task(SharedAcrossBlocks, _of_units)
    reference = train_reference(task, setting, world, rank)
    for stage in STAGES:
        outcome = train_sharded(task, setting.at(stage), rank)
        assert_close(outcome.parameters, reference.parameters, what=f"stage {stage}")
    model, optimizer = shard_task(task, setting)
    failing = task.loss(model, Batch(9, 0, rank))
    model.blocks[1].register_full_backward_hook(lambda *_: pytest.fail("in the middle"))  # pyright: ignore
    with pytest.raises(pytest.fail.Exception, match="in the middle"):
        (failing + task.loss(model, Batch(9, 0, rank))).backward()
    model.blocks[1]._backward_hooks.clear()  # pyright: ignore
    for step in range(setting.steps):
        task.loss(model, Batch(step, 0, rank)).backward()
        optimizer.step()
    assert_close(full_parameters(model), reference.parameters, what="after a backward that failed")


def test_units_called_by_themselves_have_weights_of_the_root_and_drop_what_a_failed_backward_left() -> None:
    run_ranks(2, _units)
