"""The compat package answers every name that the libraries import, and says of others that they are not there."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zeroshard.errors
from tests.support.distributed import run_ranks

deepspeed = pytest.importorskip("deepspeed", reason="zeroshard-deepspeed (compat/deepspeed) is not installed")

# What transformers, accelerate, peft, TRL and Lightning import or reach through attributes.
USED = [
    "deepspeed.DeepSpeedEngine",
    "deepspeed.__version__",
    "deepspeed.initialize",
    "deepspeed.monitor.monitor.MonitorMaster",
    "deepspeed.profiling.flops_profiler.FlopsProfiler",
    "deepspeed.profiling.flops_profiler.get_model_profile",
    "deepspeed.init_distributed",
    "deepspeed.comm.is_initialized",
    "deepspeed.comm.init_distributed",
    "deepspeed.comm.get_rank",
    "deepspeed.comm.log_summary",
    "deepspeed.comm.get_world_size",
    "deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES",
    "deepspeed.runtime.lr_schedules.WARMUP_LR",
    "deepspeed.runtime.swap_tensor.MIN_SWAPPABLE_BYTES",
    "deepspeed.runtime.zero.utils.ZeRORuntimeException",
    "deepspeed.runtime.zero.leaf_module_config.DEFAULT_LEAF_MODULE_CLASSES",
    "deepspeed.runtime.base_optimizer.DeepSpeedOptimizer",
    "deepspeed.runtime.engine.DeepSpeedEngine",
    "deepspeed.checkpoint.utils.clone_tensors_for_torch_save",
    "deepspeed.ops.adam.DeepSpeedCPUAdam",
    "deepspeed.ops.adam.FusedAdam",
    "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad",
    "deepspeed.ops.lion.DeepSpeedCPULion",
    "deepspeed.ops.lamb.FusedLamb",
    "deepspeed.utils.set_z3_leaf_modules",
    "deepspeed.utils.safe_get_full_grad",
    "deepspeed.utils.safe_get_full_fp32_param",
    "deepspeed.utils.safe_get_full_optimizer_state",
    "deepspeed.utils.logger",
    "deepspeed.utils.logging.logger",
    "deepspeed.utils.is_initialized",
    "deepspeed.utils.groups",
    "deepspeed.utils.groups._get_sequence_parallel_group",
    "deepspeed.utils.groups._get_sequence_parallel_rank",
    "deepspeed.utils.groups._get_sequence_parallel_world_size",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.SequenceTiledCompute",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.TiledFusedLogitsLoss",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.TiledMLP",
    "deepspeed.sequence.layer.DistributedAttention",
    "deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum",
    "deepspeed.zero.GatheredParameters",
    "deepspeed.zero.Init",
    "deepspeed.zero.register_external_parameter",
    "deepspeed.zero.TiledLinear",
    "deepspeed.runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor",
    "deepspeed.runtime.zero.partition_parameters._orig_torch_arange",
    "deepspeed.runtime.zero.partition_parameters.get_accelerator",
    "deepspeed.runtime.zero.partition_parameters.ZeroParamStatus",
    "deepspeed.accelerator.get_accelerator",
    "deepspeed.launcher.runner.DEEPSPEED_ENVIRONMENT_NAME",
    "deepspeed.checkpointing.configure",
    "deepspeed.checkpoint.ds_to_universal.main",
    "deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint",
    "deepspeed.add_config_arguments",
    "deepspeed.PipelineModule",
    "deepspeed.PipelineEngine",
    "deepspeed.pipe.PipelineModule",
    "deepspeed.pipe.TiedLayerSpec",
    "deepspeed.runtime.pipe.LayerSpec",
    "deepspeed.runtime.pipe.engine.PipelineEngine",
    "deepspeed.runtime.pipe.module.PipelineModule",
    "deepspeed.runtime.pipe.topology.PipeModelDataParallelTopology",
    "deepspeed.runtime.utils.see_memory_usage",
    "deepspeed.runtime.utils.memory_status",
    "deepspeed.runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live",
    "deepspeed.runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_cold",
    "deepspeed.runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live",
    "deepspeed.runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold",
]
# What scripts import at their head and use in one branch, or in isinstance.
PLACEHOLDERS = {
    "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer": "the loss scale is the engine's",
    "deepspeed.runtime.fp16.onebit.lamb.OnebitLamb": "one-bit optimizers",
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer": "no counterpart",
    "deepspeed.monitor.tensorboard.TensorBoardMonitor": "MonitorMaster",
    "deepspeed.checkpoint.DeepSpeedCheckpoint": "load at any number of ranks",
    "deepspeed.runtime.zero.MiCS_Init": "Init builds models for mics_shard_size",
    "deepspeed.runtime.zero.partition_parameters.MultipleAllGatherHandles": "the plan gathers",
    "deepspeed.runtime.zero.partition_parameters.zero3_linear_wrap": "the plan gathers",
}
# What they ask for only with features that are not built.
REFUSED = {
    "deepspeed.utils.groups._get_some_new_group": "groups of data, of divided sequences and of experts",
    "deepspeed.sequence.fpdt_layer.FPDT_Attention": "attention in chunks on the host is not built",
    "deepspeed.init_inference": "zeroshard trains",
    "deepspeed.moe.mappings": "MoE of deepspeed.moe.layer is there",
    "deepspeed.some_new_thing": "zeroshard has no counterpart",
}


@pytest.mark.parametrize("name", USED)
def test_every_name_that_the_libraries_use_is_there(name: str) -> None:
    *path, last = name.split(".")[1:]
    parent = functools.reduce(getattr, path, deepspeed)
    scope: dict[str, object] = {}
    exec(f"from {parent.__name__} import {last}", scope)
    assert scope[last] is getattr(parent, last)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_there_says_so_by_attribute_and_by_import(name: str) -> None:
    *path, last = name.split(".")
    with pytest.raises(AttributeError, match=f"compat package.*{REFUSED[name]}"):
        functools.reduce(getattr, (*path[1:], last), deepspeed)
    with pytest.raises(ImportError, match=f"compat package.*{REFUSED[name]}"):
        exec(f"from {'.'.join(path)} import {last}", {})
    assert not hasattr(deepspeed, "some_new_thing")


@pytest.mark.parametrize("name", PLACEHOLDERS)
def test_a_placeholder_is_imported_and_refuses_when_it_is_made(name: str) -> None:
    *path, last = name.split(".")
    scope: dict[str, Any] = {}
    exec(f"from {'.'.join(path)} import {last}\nclass Derived({last}): pass", scope)
    assert scope[last] is functools.reduce(getattr, (*path[1:], last), deepspeed)
    assert not isinstance(torch.nn.Linear(1, 1), scope[last])
    for kind in (scope[last], scope["Derived"]):
        with pytest.raises(zeroshard.errors.UsageError, match=f"{name} is not there.*{PLACEHOLDERS[name]}"):
            kind([1], lr=1.0)
    with pytest.raises(ImportError, match="compat package"):
        exec(f"from {'.'.join(path)} import some_new_thing", {})


def test_operators_are_compatible_where_they_have_a_counterpart() -> None:
    from deepspeed.ops import aio, op_builder

    there = {name for name, compatible in deepspeed.ops.__compatible_ops__.items() if compatible}
    assert there == {"cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "fused_lamb", "fused_lion"}
    assert op_builder.CPUAdamBuilder().is_compatible()
    assert not aio.AsyncIOBuilder().is_compatible()
    with pytest.raises(AttributeError, match="compiles nothing at run time"):
        op_builder.CPUAdamBuilder().load()


def test_versions_of_torch_compare_as_numbers() -> None:
    from deepspeed.utils.torch import required_torch_version

    assert required_torch_version(min_version=1.8)
    assert required_torch_version(min_version="2.4")
    assert required_torch_version(min_version="2.10") == (tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10))
    assert not required_torch_version(max_version=1.13)
    with pytest.raises(ValueError, match="one of"):
        required_torch_version()


def test_the_names_of_schedules_are_those_of_a_config() -> None:
    from deepspeed.runtime import lr_schedules

    named = {getattr(lr_schedules, name) for name in ("LR_RANGE_TEST", "ONE_CYCLE", "WARMUP_LR", "WARMUP_DECAY_LR")}
    assert named < set(lr_schedules.VALID_LR_SCHEDULES)
    arguments = inspect.signature(lr_schedules.OneCycle).parameters
    assert {lr_schedules.CYCLE_MIN_LR, lr_schedules.CYCLE_MAX_MOM, lr_schedules.DECAY_STEP_SIZE} < set(arguments)


def test_metadata_is_found_under_the_import_name() -> None:
    from packaging.version import Version

    assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
    version = Version(importlib.metadata.version("deepspeed"))
    assert version == Version(deepspeed.__version__)
    assert version.local == "zeroshard"
    # accelerate's sequence parallelism and TRL's extra have the highest thresholds among the libraries.
    assert Version("0.18.6") <= version


@pytest.mark.parametrize("name", ["FusedLion", "DeepSpeedCPULion"])
def test_lion_by_deepspeeds_names_has_its_betas(name: str) -> None:
    """The default of both in DeepSpeed 0.19.8; `param_groups` under state in host memory say so, too."""
    made = getattr(importlib.import_module("deepspeed.ops.lion"), name)([torch.nn.Parameter(torch.zeros(3))])
    assert made.defaults == {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}


def test_copies_for_saving_keep_tied_weights_tied() -> None:
    weight = torch.arange(6.0)
    copied = deepspeed.checkpoint.utils.clone_tensors_for_torch_save({"a": weight, "b": [weight], "c": weight[:3]})
    assert copied["b"][0] is copied["a"]
    assert copied["c"].untyped_storage().nbytes() == 12
    assert torch.equal(copied["a"], weight)
    assert copied["a"].data_ptr() != weight.data_ptr()


def _copied_in_parts(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    whole = [torch.arange(8.0).reshape(4, 2) + number for number in range(3)]
    parts = [distribute_tensor(value, mesh, [Shard(number % 2)]) for number, value in enumerate(whole)]
    copied = deepspeed.checkpoint.utils.clone_tensors_for_torch_save({"all": parts, "tied": parts[1]})
    assert all(torch.equal(found, value) for found, value in zip(copied["all"], whole, strict=True))
    assert copied["tied"] is copied["all"][1]


def test_copies_for_saving_have_whole_tensors_in_place_of_parts() -> None:
    """Those of one shape, too: a DTensor has no address by which to tell it from others."""
    run_ranks(2, _copied_in_parts)


def test_imports_nothing_heavy_until_it_is_used() -> None:
    code = "import sys, deepspeed; print('torch' in sys.modules, 'zeroshard' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_refuses_beside_the_real_one(tmp_path: Path) -> None:
    real = tmp_path / "deepspeed-0.19.6.dist-info"
    real.mkdir()
    (real / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.6\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import deepspeed"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "deepspeed 0.19.6 is installed beside zeroshard-deepspeed" in done.stderr
    assert "pip uninstall" in done.stderr
