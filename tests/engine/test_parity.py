"""The four stages compute the same numbers: each other's bit for bit, and those of unsharded training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.distributed import run_ranks
from tests.support.models import TRANSFORMER, Batch
from tests.support.training import (
    Outcome,
    Setting,
    adamw,
    assert_close,
    assert_same,
    build,
    train_reference,
    train_sharded,
)

STAGES = (0, 1, 2, 3)
CLIPPED = Setting(steps=10, clip=0.5)


def _every_stage(rank: int, world: int, setting: Setting) -> list[Outcome]:
    return [train_sharded(TRANSFORMER, setting.at(stage), rank) for stage in STAGES]


def _ddp(rank: int, world: int, setting: Setting) -> Outcome:
    model = DistributedDataParallel(build(TRANSFORMER))
    optimizer = adamw(model)
    outcome = Outcome()
    for step in range(setting.steps):
        loss = TRANSFORMER.loss(model, Batch(step, 0, rank))
        loss.backward()
        if setting.clip:
            outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), setting.clip)))
        optimizer.step()
        optimizer.zero_grad()
        outcome.losses.append(float(loss.detach()))
    outcome.parameters = {name: value.detach().clone() for name, value in model.module.named_parameters()}
    return outcome


def _stages_and_ddp(rank: int, world: int, setting: Setting) -> tuple[list[Outcome], Outcome]:
    return _every_stage(rank, world, setting), _ddp(rank, world, setting)


def _ranks_agree(per_rank: list[list[Outcome]]) -> list[Outcome]:
    """Rank 0's outcomes, after a check that the other ranks hold the same parameters."""
    for other in per_rank[1:]:
        for mine, theirs in zip(per_rank[0], other, strict=True):
            assert_same(theirs.parameters, mine.parameters, "rank against rank 0")
    return per_rank[0]


@pytest.mark.parametrize("world", [2, 3])
def test_stages_are_bit_identical_with_clipping(world: int) -> None:
    outcomes = _ranks_agree(run_ranks(world, _every_stage, CLIPPED))
    reference = train_reference(TRANSFORMER, CLIPPED, world)
    assert min(reference.norms) > CLIPPED.clip, "clipping must be at work"
    for stage, outcome in zip(STAGES, outcomes, strict=True):
        assert outcome.losses == outcomes[0].losses
        assert outcome.norms == outcomes[0].norms
        assert_same(outcome.parameters, outcomes[0].parameters, f"stage {stage}")
        assert_close(outcome.parameters, reference.parameters, what=f"stage {stage} against one process")


@pytest.mark.parametrize("world", [2, 3])
def test_accumulation_pairs_stages_and_matches_one_process(world: int) -> None:
    setting = replace(CLIPPED, steps=5, micro=4)
    outcomes = _ranks_agree(run_ranks(world, _every_stage, setting))
    reference = train_reference(TRANSFORMER, setting, world)
    assert_same(outcomes[1].parameters, outcomes[0].parameters, "stage 1 against 0")
    assert_same(outcomes[3].parameters, outcomes[2].parameters, "stage 3 against 2")
    for stage, outcome in zip(STAGES, outcomes, strict=True):
        assert_close(outcome.parameters, reference.parameters, what=f"stage {stage} against one process")


def test_stages_are_bit_identical_under_no_sync() -> None:
    setting = replace(CLIPPED, steps=5, micro=4, no_sync=True)
    outcomes = _ranks_agree(run_ranks(3, _every_stage, setting))
    for stage, outcome in zip(STAGES, outcomes, strict=True):
        assert_same(outcome.parameters, outcomes[0].parameters, f"stage {stage}")
    assert_close(outcomes[0].parameters, train_reference(TRANSFORMER, setting, 3).parameters)


def test_two_ranks_without_clipping_equal_ddp_bit_for_bit() -> None:
    for stages, ddp in run_ranks(2, _stages_and_ddp, replace(CLIPPED, clip=0.0)):
        for stage, outcome in zip(STAGES, stages, strict=True):
            assert outcome.losses == ddp.losses
            assert_same(outcome.parameters, ddp.parameters, f"stage {stage}")


def test_two_ranks_with_clipping_equal_ddp() -> None:
    for stages, ddp in run_ranks(2, _stages_and_ddp, CLIPPED):
        for stage, outcome in zip(STAGES, stages, strict=True):
            assert outcome.norms == pytest.approx(ddp.norms, rel=1e-5)
            assert_close(outcome.parameters, ddp.parameters, what=f"stage {stage}")


def _no_group(rank: int, world: int) -> tuple[list[Outcome], list[Outcome]]:
    with_group = _every_stage(rank, world, CLIPPED)
    dist.destroy_process_group()
    return with_group, _every_stage(rank, world, CLIPPED)


def test_one_rank_equals_unsharded_bit_for_bit_with_and_without_a_process_group() -> None:
    ((with_group, without),) = run_ranks(1, _no_group)
    plain = replace(CLIPPED, clip=0.0, steps=6)
    reference = train_reference(TRANSFORMER, CLIPPED, 1)
    for stage, (one, other) in enumerate(zip(with_group, without, strict=True)):
        assert_same(one.parameters, other.parameters, f"stage {stage}")
        assert_close(one.parameters, reference.parameters)
    for outcome in run_ranks(1, _every_stage, plain)[0]:
        assert_same(outcome.parameters, train_reference(TRANSFORMER, plain, 1).parameters)
