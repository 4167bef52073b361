"""What the vertical schedule refuses, and what an exception in it leaves behind: nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import VOCABULARY, WIDTH
from tests.support.sequence import (
    Steps,
    TiedModel,
    Way,
    batches,
    cross_entropy,
    sequence,
    sharded,
    tied_blocks,
    trained,
)
from tests.support.training import assert_same
from zeroshard.errors import PlanError, UsageError
from zeroshard.plan.policy import ExecutionPolicy


class _Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.fails = nn.Parameter(torch.ones(WIDTH)), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails == "forward":
            raise RuntimeError("on purpose")
        x = x * self.scale
        if self.fails == "backward":
            x.register_hook(_fail)
        return x


def _fail(_: torch.Tensor) -> None:
    raise RuntimeError("on purpose")


def _failing() -> nn.Sequential:
    model = sequence()
    model[2] = _Fails()
    return model


def _after_an_exception(rank: int, world: int) -> None:
    for stage in (1, 3):
        way = Way(stage, 3, vertical=True, build=_failing)
        wanted = trained(way, rank)
        for fails in ("forward", "backward"):
            model, optimizer, _ = sharded(way)
            steps, broken = Steps(way, model, None), model.get_submodule("2")
            assert isinstance(broken, _Fails)
            for step in range(3):
                broken.fails = fails
                with pytest.raises(RuntimeError, match="on purpose"):
                    steps.run(batches(9, 3, rank))
                broken.fails = ""
                steps.run(batches(step, 3, rank))
                optimizer.step()
                optimizer.zero_grad()
            found = {name: one.clone() for name, one in zeroshard.iterate_full_parameters(model)}
            assert_same(found, wanted.parameters, f"stage {stage}, {fails}")
            zeroshard.close(model)


def test_an_exception_leaves_nothing_for_the_next_step() -> None:
    run_ranks(1, _after_an_exception)


class _Keeps(nn.Module):
    """Adds what the block before it computed last, which is another micro-batch's."""

    def __init__(self, source: list[torch.Tensor]) -> None:
        super().__init__()
        self.scale, self._source = nn.Parameter(torch.ones(WIDTH)), source

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale + (self._source[0] if self._source else 0)
        self._source[:] = [x]
        return x


def _refused(rank: int, world: int) -> None:
    source: list[torch.Tensor] = []
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), _Keeps(source), _Keeps(source), nn.Linear(WIDTH, VOCABULARY))
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=2)
    with pytest.raises(UsageError, match=r"block 1 computes with a tensor that .* another micro-batch"):
        zeroshard.VerticalSchedule(model, cross_entropy).step(batches(0, 2, rank))
    with pytest.raises(UsageError, match=r"no micro-batches"):
        zeroshard.VerticalSchedule(model, cross_entropy).step([])
    with torch.no_grad(), pytest.raises(UsageError, match=r"no_grad"):
        zeroshard.VerticalSchedule(model, cross_entropy).step(batches(0, 2, rank))
    zeroshard.close(model)

    tied = TiedModel()
    zeroshard.shard(tied, torch.optim.SGD(tied.parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"TiedModel does not say what its blocks are"):
        zeroshard.VerticalSchedule(tied, cross_entropy)
    schedule = zeroshard.VerticalSchedule(tied, cross_entropy, blocks=tied_blocks(tied))
    with pytest.raises(UsageError, match=r"shard\(..., micro_batches=3\)"):
        schedule.step(batches(0, 3, rank))
    detached = zeroshard.VerticalSchedule(tied, lambda *both: cross_entropy(*both).detach(), blocks=tied_blocks(tied))
    with pytest.raises(UsageError, match=r"the loss of micro-batch 0 has no graph"):
        detached.step(batches(0, 1, rank))

    def through(x: torch.Tensor) -> torch.Tensor:
        for block in tied.blocks:
            x = block(x)
        return x

    with pytest.raises(UsageError, match=r"block 1 holds the units \['blocks.0', .*\].* to the modules that it calls"):
        zeroshard.VerticalSchedule(tied, cross_entropy, blocks=[tied.embedding, through, tied.head])
    zeroshard.close(tied)


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    run_ranks(2, _refused)


def _usual_order(rank: int, world: int) -> None:
    model = sequence()
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=2, micro_batches=2)
    inputs, labels = batches(0, 1, rank)[0]
    cross_entropy(model(inputs), labels).backward()
    with pytest.raises(UsageError, match=r"VerticalSchedule.* accumulate=True in place of micro_batches"):
        cross_entropy(model(inputs), labels).backward()
    with pytest.raises(UsageError, match=r"accumulate=True\) in place of micro_batches"), zeroshard.no_sync(model):
        pass
    zeroshard.close(model)


def test_micro_batches_one_after_the_other_are_told_what_the_plan_is_for() -> None:
    run_ranks(1, _usual_order)


def test_a_policy_is_either_for_micro_batches_together_or_for_accumulation() -> None:
    with pytest.raises(PlanError, match="leave accumulate out"):
        ExecutionPolicy(micro_batches=2, accumulate=True)
    with pytest.raises(PlanError, match="whole number of at least 1"):
        ExecutionPolicy(micro_batches=0)
