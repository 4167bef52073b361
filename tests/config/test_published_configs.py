"""Configs as tutorials print them load, or are refused for what is not built yet and for nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from zeroshard.config import load_config
from zeroshard.config.resolved import OffloadConfig
from zeroshard.errors import ConfigError, ZeroShardWarning

OFFLOAD = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme", "nvme_path": "/local_nvme"}

FP16_OFFLOAD = {
    "train_batch_size": 256,
    "gradient_accumulation_steps": 16,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": OFFLOAD,
        "offload_param": OFFLOAD,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 500000000,
        "stage3_prefetch_bucket_size": 500000000,
        "stage3_param_persistence_threshold": 1000000,
    },
}
MINIMAL_STAGE_3 = {
    "train_batch_size": 32,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": 5e8,
    },
    "fp16": {"enabled": True},
}
FINE_TUNE_8B = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": OFFLOAD,
        "offload_param": OFFLOAD,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "train_micro_batch_size_per_gpu": 1,
    "wall_clock_breakdown": False,
}
FINE_TUNE_70B = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": OFFLOAD,
        "offload_param": OFFLOAD,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "stage3_max_live_parameters": 2e9,
        "stage3_prefetch_bucket_size": 5e8,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": 8,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}},
}
PRETRAIN_13B = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 2e8,
        "allgather_bucket_size": 2e8,
    },
    "gradient_accumulation_steps": 1,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
    "activation_checkpointing": {"partition_activations": False},
}
PRETRAIN_175B = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1, "overlap_comm": True, "contiguous_gradients": True},
    "tensor_parallel": {"tp_size": 8},
    "pipeline_parallel": {"pp_size": 8},
    "gradient_accumulation_steps": 16,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1.5e-4}},
    "activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": True},
}
THREE_D = {"tensor_parallel.tp.tp_size", "pipeline_parallel.pp_size"}


@pytest.mark.parametrize(
    ("config", "world_size", "batch"),
    [(MINIMAL_STAGE_3, 8, (32, 4, 1)), (PRETRAIN_13B, 32, (128, 4, 1))],
    ids=["minimal-stage-3", "pretrain-13b"],
)
def test_a_config_of_built_features_loads(config: dict[str, Any], world_size: int, batch: tuple[int, int, int]) -> None:
    loaded = load_config(config, world_size=world_size).batch
    assert (loaded.train, loaded.micro, loaded.accumulation) == batch


def _with_nvme(config: dict[str, Any]) -> dict[str, Any]:
    zero = {**config["zero_optimization"], "offload_optimizer": NVME, "offload_param": NVME}
    return {**config, "zero_optimization": zero}


@pytest.mark.parametrize("config", [FP16_OFFLOAD, FINE_TUNE_8B, FINE_TUNE_70B])
def test_a_config_with_offload_to_the_host_loads(config: dict[str, Any]) -> None:
    assert load_config(config, world_size=8).zero.offload == OffloadConfig(ratio=1.0, param=True, pin_memory=True)


@pytest.mark.parametrize("config", [FP16_OFFLOAD, FINE_TUNE_70B])
def test_a_config_with_offload_to_disk_loads(config: dict[str, Any]) -> None:
    found = load_config(_with_nvme(config), world_size=8).zero.offload
    assert found == OffloadConfig(1.0, True, True, ("/local_nvme",), state_on_disk=True, param_on_disk=True)


@pytest.mark.parametrize(
    ("config", "world_size", "refused"),
    [
        (PRETRAIN_175B, 1, THREE_D),
    ],
    ids=["pretrain-175b"],
)
def test_a_config_is_refused_for_what_is_not_built_and_for_nothing_else(
    config: dict[str, Any], world_size: int, refused: set[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config, world_size=world_size)
    assert {problem.split(" ")[0] for problem in caught.value.problems} == refused
    assert all("not built yet" in problem for problem in caught.value.problems)


@pytest.mark.parametrize("config", [FP16_OFFLOAD, FINE_TUNE_8B, FINE_TUNE_70B])
def test_the_same_without_offload_loads(config: dict[str, Any]) -> None:
    zero = {name: value for name, value in config["zero_optimization"].items() if "offload" not in name}
    assert load_config({**config, "zero_optimization": zero}, world_size=8).zero.stage == 3


def test_bucket_sizes_beside_their_section_are_sent_there() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 8, "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8}, world_size=8)
    assert [problem.split("did you mean ")[1] for problem in caught.value.problems] == [
        "zero_optimization.reduce_bucket_size?",
        "zero_optimization.allgather_bucket_size?",
    ]


def test_an_old_config_with_cpu_offload_off_loads_with_a_warning() -> None:
    with pytest.warns(ZeroShardWarning, match="deprecated"):
        load_config({"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": False}}, world_size=8)
