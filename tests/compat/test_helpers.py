"""Small helpers of DeepSpeed's beside the engine: groups of experts, generation, calls that are run again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.distributed import run_ranks
from zeroshard.errors import UsageError

deepspeed = pytest.importorskip("deepspeed", reason="zeroshard-deepspeed (compat/deepspeed) is not installed")


def test_groups_without_experts_stay_as_they_are() -> None:
    from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer

    weight, expert = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    group = {"params": [weight], "name": "parameters", "lr": 0.1}
    assert split_params_into_different_moe_groups_for_optimizer(group) == [group]
    assert split_params_into_different_moe_groups_for_optimizer(({"params": [weight]}, group))[1] is group
    vars(expert)["allreduce"] = False
    assert not is_moe_param(weight)
    assert is_moe_param(expert)
    with pytest.raises(UsageError, match="1 parameters are marked as one rank's own"):
        split_params_into_different_moe_groups_for_optimizer({"params": [weight, expert]})


def _generates_between_steps(rank: int, world: int, stage: int) -> None:
    from deepspeed.runtime.zero import unwrap_model_for_generation

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    assert engine.sparse_tensor_module_names == set()
    x = torch.ones(2, 6) * (rank + 1)
    for _ in range(2):
        engine.backward(engine(x).square().mean())
        engine.step()
        with torch.no_grad():
            expected = engine(torch.ones(1, 6))
            with unwrap_model_for_generation(engine) as whole:
                assert [tuple(p.shape) for p in whole.parameters()] == [(6, 6), (6,), (6, 6), (6,)]
                for _ in range(1 + rank):  # as generation does, each rank as often as it needs
                    assert torch.equal(whole(torch.ones(1, 6)), expected)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_generates_between_steps_each_rank_as_often_as_it_needs(stage: int) -> None:
    run_ranks(2, _generates_between_steps, stage)


def test_the_call_that_is_run_again_has_both_names() -> None:
    from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint, non_reentrant_checkpoint

    x = torch.ones(3, requires_grad=True)
    assert non_reentrant_checkpoint is checkpoint
    (gradient,) = torch.autograd.grad(non_reentrant_checkpoint(torch.sin, x).sum(), x)
    assert torch.equal(gradient, torch.cos(x))
