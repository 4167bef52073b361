"""Small helpers of DeepSpeed's beside the engine: groups of experts, generation, calls that are run again."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.distributed import run_ranks

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
    assert split_params_into_different_moe_groups_for_optimizer({"params": [weight, expert], "lr": 0.1}) == [
        {"params": [weight], "lr": 0.1},
        {"params": [expert], "lr": 0.1, "name": "", "moe": True},
    ]


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


def test_versions_and_operators_are_written_down() -> None:
    from deepspeed.git_version_info import compatible_ops, git_hash, installed_ops, torch_info, version

    assert version == deepspeed.__version__
    assert git_hash == deepspeed.__git_hash__
    assert torch_info["version"] == ".".join(torch.__version__.split(".")[:2])
    assert (torch_info["cuda_version"] == "0.0") == (torch.version.cuda is None)
    assert compatible_ops["cpu_adam"]
    assert set(installed_ops) == set(compatible_ops)
    assert not any(installed_ops.values())


def test_a_config_names_its_optimizer_and_levels_as_the_constants_do() -> None:
    from deepspeed.runtime import config, constants

    for name in ("ADAM", "ADAMW", "LAMB", "LION", "ADAGRAD", "MUON"):
        values = {"train_batch_size": 1, "optimizer": {"type": getattr(config, f"{name}_OPTIMIZER")}}
        assert deepspeed.DeepSpeedConfig(values).optimizer_name == name.lower()
    assert config.get_log_level({}) is constants.LOG_LEVEL_DEFAULT is None
    assert config.get_log_level({"log_level": "ERROR"}) == "ERROR"
    assert config.get_gradient_clipping({}) == constants.GRADIENT_CLIPPING_DEFAULT == 1.0
    assert config.get_gradient_clipping({"gradient_clipping": 0.5}) == 0.5


def test_a_level_is_set_by_its_name() -> None:
    from deepspeed.utils import set_log_level_from_string

    mine = logging.getLogger("tests.compat.helpers")
    set_log_level_from_string("error", mine)
    assert mine.level == logging.ERROR
    with pytest.raises(ValueError, match="'loud' is none of debug, info"):
        set_log_level_from_string("loud", mine)


def test_the_call_that_is_run_again_has_both_names() -> None:
    from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint, non_reentrant_checkpoint

    x = torch.ones(3, requires_grad=True)
    assert non_reentrant_checkpoint is checkpoint
    (gradient,) = torch.autograd.grad(non_reentrant_checkpoint(torch.sin, x).sum(), x)
    assert torch.equal(gradient, torch.cos(x))
