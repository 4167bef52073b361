"""Small things that scripts for DeepSpeed rely on: helpers, sections as objects, what kind of optimizer comes back."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime import utils
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DEFAULT_LEAF_MODULE_CLASSES
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from deepspeed.runtime.zero.tiling import TiledLinear
from deepspeed.utils import safe_get_full_grad
from torch import nn

from tests.support.distributed import run_ranks
from zeroshard.errors import CheckpointError, UsageError, ZeroShardWarning


def _start(model: nn.Module, client: Any = None, **keys: Any) -> Any:
    parameters = list(model.parameters())
    return deepspeed.initialize(
        model=model, model_parameters=parameters, optimizer=client, config={"train_batch_size": 1, **keys}
    )


def test_at_stage_0_the_optimizer_is_of_the_class_that_was_asked_for() -> None:
    adam = torch.optim.Adam
    model = nn.Linear(3, 2)
    client = adam(model.parameters(), lr=0.1)
    engine, optimizer, *_ = _start(model, client)
    assert isinstance(optimizer, adam)
    assert optimizer == client
    assert client == optimizer
    assert optimizer != adam(nn.Linear(1, 1).parameters())
    before = model.weight.detach().clone()
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    assert torch.allclose(model.weight, before - 0.1)
    engine.destroy()
    assert isinstance(_start(nn.Linear(3, 2), lambda parameters: torch.optim.AdamW(parameters))[1], torch.optim.AdamW)
    for params, kind in (({}, FusedAdam), ({"torch_adam": True}, torch.optim.AdamW)):
        section = {"type": "AdamW", "params": params}
        assert isinstance(_start(nn.Linear(3, 2), optimizer=section)[1], kind)


def test_at_other_stages_the_optimizer_is_the_engines_alone() -> None:
    model = nn.Linear(3, 2)
    client = torch.optim.Adam(model.parameters())
    engine, optimizer, *_ = _start(model, client, zero_optimization={"stage": 1})
    assert not isinstance(optimizer, torch.optim.Adam)
    assert engine.basic_optimizer is optimizer.optimizer is client
    assert not optimizer.state
    with pytest.raises(UsageError, match=r"safe_get_full_optimizer_state\(parameter, 'exp_avg'\)"):
        optimizer.state[model.weight]["exp_avg"]


def test_the_moments_of_16_bit_parameters_are_16_bits_if_asked_for() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = DeepSpeedCPUAdam([weight], fp32_optimizer_states=False)
    weight.grad = torch.ones(3, dtype=torch.bfloat16)
    optimizer.step()
    assert {optimizer.state[weight][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}
    with pytest.raises(ValueError, match="float16"):
        DeepSpeedCPUAdam([nn.Parameter(weight.detach().half())], fp32_optimizer_states=False)
    model = nn.Linear(3, 2).bfloat16()
    client = DeepSpeedCPUAdam(model.parameters(), fp32_optimizer_states=False)
    with pytest.warns(ZeroShardWarning, match="bf16_optimizer_states"):
        _start(model, client, bf16={"enabled": True})


def _initialized_inside(rank: int, world_size: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "param_persistence_threshold": 0}}
    config |= {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "gradient_clipping": 0}
    torch.manual_seed(rank)
    with deepspeed.zero.Init(config_dict_or_path=config):
        with deepspeed.zero.Init(config_dict_or_path=config):
            first = nn.Linear(4, 4)
        assert vars(first.weight)["ds_shape"] == (4, 4)
        engine = deepspeed.initialize(model=first, model_parameters=first.parameters(), config=config)[0]
        with deepspeed.zero.Init(config_dict_or_path=config):
            second = nn.Linear(4, 4)
    for model in (first, second):
        with deepspeed.zero.GatheredParameters(model.weight):
            values = [torch.empty(4, 4) for _ in range(world_size)]
            torch.distributed.all_gather(values, model.weight.detach().clone())
            assert all(torch.equal(value, values[0]) for value in values)
            before = values[0]
        if model is second:
            engine.destroy()
            engine = deepspeed.initialize(model=second, model_parameters=second.parameters(), config=config)[0]
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        with deepspeed.zero.GatheredParameters(model.weight):
            assert torch.allclose(model.weight, before - 0.5)
    engine.destroy()


def test_a_model_of_an_inner_init_is_initialized_while_the_outer_one_is_open() -> None:
    run_ranks(2, _initialized_inside)


def test_sections_of_the_zero_config_are_objects() -> None:
    assert [DeepSpeedZeroConfig(stage=stage).overlap_comm for stage in range(4)] == [False, False, False, True]
    assert DeepSpeedZeroConfig(stage=3, overlap_comm=False).overlap_comm is False
    given = DeepSpeedZeroConfig(offload_param={}, offload_optimizer={}, leaf_module={"classes": "a.B", "names": ["c"]})
    assert isinstance(given.offload_param, DeepSpeedZeroOffloadParamConfig)
    assert isinstance(given.offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)
    assert (given.leaf_module.classes, given.leaf_module.names) == (["a.B"], ["c"])
    absent = DeepSpeedZeroConfig(offload_param=None)
    assert (absent.offload_param, absent.offload_optimizer) == (None, None)
    assert absent.leaf_module.classes == DEFAULT_LEAF_MODULE_CLASSES
    assert not DeepSpeedZeroOffloadOptimizerConfig().pipeline
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_write=True).pipeline


def test_the_parameters_of_an_engine_can_be_released_amid_an_accumulation(tmp_path: Path) -> None:
    zero = {"stage": 3, "param_persistence_threshold": 0}
    keys: dict[str, Any] = {"zero_optimization": zero, "optimizer": {"type": "AdamW"}, "gradient_accumulation_steps": 2}
    engine, *_ = _start(nn.Linear(4, 4), **(keys | {"train_batch_size": 2}))
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.empty_partition_cache()
    assert engine.save_16bit_model(tmp_path, "model.pt")
    loss = engine(torch.ones(1, 4)).sum()
    with pytest.raises(UsageError, match="call it after the backward"):
        engine.empty_partition_cache()
    engine.backward(loss)
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()


def test_in_a_coalesced_reduction_a_gradient_is_the_ranks_own() -> None:
    run_ranks(2, _coalesced)


def _coalesced(rank: int, world: int) -> None:
    zero = {"stage": 2}
    model = nn.Linear(2, 1)
    engine, *_ = _start(model, optimizer={"type": "SGD"}, zero_optimization=zero, train_batch_size=2)
    with engine.coalesce_grad_reduction():
        engine.backward(engine(torch.full((1, 2), 1.0 + rank)).sum())
        own = safe_get_full_grad(model.weight)
        assert own is not None
        assert torch.equal(own, model.weight.grad)
        assert own.tolist() == [[1.0 + rank] * 2]
    whole = safe_get_full_grad(model.weight)
    assert whole is not None
    assert whole.tolist() == [[1.5, 1.5]]
    engine.step()
    engine.destroy()


def test_without_an_optimizer_what_is_gathered_can_be_released_after_any_forward() -> None:
    zero = {"stage": 3, "param_persistence_threshold": 0}
    engine, *_ = _start(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), zero_optimization=zero)
    expected = engine(torch.ones(1, 4))
    engine.empty_partition_cache()
    assert torch.equal(engine(torch.ones(1, 4)), expected)
    engine.destroy()


def test_the_universal_format_is_a_copy_that_loads_at_another_stage(tmp_path: Path) -> None:
    from deepspeed.checkpoint import UNIVERSAL_CHECKPOINT_INFO
    from deepspeed.checkpoint.ds_to_universal import main

    keys: dict[str, Any] = {"optimizer": {"type": "Adam"}, "checkpoint": {"load_universal": True}}
    engine, *_ = _start(nn.Linear(4, 4), **keys, zero_optimization={"stage": 1})
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.save_checkpoint(tmp_path, "it", client_state={UNIVERSAL_CHECKPOINT_INFO: {}, "iteration": 1})
    expected = engine.module.weight.detach().clone()
    engine.destroy()
    arguments = SimpleNamespace(input_folder=tmp_path / "it", output_folder=tmp_path / "it_universal")
    main(arguments)
    with pytest.raises(CheckpointError, match="there already"):
        main(arguments)
    arguments.input_folder = tmp_path
    with pytest.raises(CheckpointError, match="zeroshard checkpoint import"):
        main(arguments)

    engine, *_ = _start(nn.Linear(4, 4), **keys, zero_optimization={"stage": 3, "param_persistence_threshold": 0})
    _, client = engine.load_checkpoint(tmp_path, "it_universal")
    assert client == {UNIVERSAL_CHECKPOINT_INFO: {}, "iteration": 1}
    with deepspeed.zero.GatheredParameters(engine.module.weight):
        assert torch.equal(engine.module.weight, expected)
    engine.destroy()


def test_parts_are_as_even_as_they_can_be() -> None:
    assert utils.partition_uniform(10, 4) == [0, 3, 6, 8, 10]
    assert utils.prefix_sum_inc([1, 2, 3]) == [1, 3, 6]
    random.seed(0)
    for _ in range(100):
        count = random.randint(1, 8)
        parts = random.randint(1, count)
        weights = [random.randint(0, 5) for _ in range(count)]
        cuts = utils.partition_balanced(weights, parts)
        heaviest = max(sum(weights[low:high]) for low, high in itertools.pairwise(cuts))
        every = itertools.combinations(range(1, count), parts - 1)
        assert heaviest == min(
            max(sum(weights[low:high]) for low, high in itertools.pairwise((0, *inner, count))) for inner in every
        )


def test_nested_values_are_moved_and_copied() -> None:
    item = {"a": [torch.ones(2), "text"], "b": (1, torch.zeros(1))}
    moved = utils.move_to_device(item, "cpu")
    assert moved["a"][0] is item["a"][0]
    copied = utils.copy_to_device(item, "cpu", torch.is_tensor)
    assert copied["a"][0] is not item["a"][0]
    assert copied["a"][1:] == ["text"]
    assert isinstance(copied["b"], tuple)


def test_small_helpers(tmp_path: Path) -> None:
    assert utils.call_to_str("name", 1, "a", key=2) == "name(1, 'a', key=2)"
    utils.ensure_directory_exists(tmp_path / "a" / "b" / "file")
    assert (tmp_path / "a" / "b").is_dir()
    utils.set_random_seed(3)
    first = torch.rand(2)
    utils.set_random_seed(3)
    assert torch.equal(torch.rand(2), first)
    with pytest.raises(UsageError, match="model parallelism"):
        utils.clip_grad_norm_([], 1.0, mpu=object())  # pyright: ignore[reportArgumentType]


def test_a_hook_counts_the_parameters_that_its_backward_reaches() -> None:
    used, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    seen: list[int] = []
    used.register_hook(lambda _: seen.append(utils.count_used_parameters_in_backward([used, unused])))
    (used * 2 + unused.detach()).sum().backward()
    assert seen == [1]


def test_too_many_tiles_are_a_runtime_error_as_in_deepspeed() -> None:
    for splits in (0, 33):
        with pytest.raises(RuntimeError, match="from 1 to the 32 features"):
            TiledLinear(32, 32, in_splits=splits)


def test_hooks_seem_to_be_off_while_a_model_is_unwrapped_for_generation() -> None:
    zero = {"stage": 3, "param_persistence_threshold": 0}
    engine, optimizer, *_ = _start(nn.Linear(4, 4), optimizer={"type": "Adam"}, zero_optimization=zero)
    offload = optimizer.parameter_offload
    assert len(offload.forward_hooks) == len(offload.backward_hooks) == 1
    with deepspeed.zero.unwrap_model_for_generation(engine) as model:
        assert (offload.forward_hooks, offload.backward_hooks) == ([], [])
        assert model.weight.numel() == 16
    for hook in offload.forward_hooks:
        hook.remove()
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.destroy()


def test_a_processor_counts_as_many_devices_as_its_launcher_starts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = deepspeed.get_accelerator()
    if accelerator.device_name() != "cpu":
        pytest.skip("counts GPUs")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    assert accelerator.device_count() == 2
    monkeypatch.setenv("LOCAL_SIZE", "4")
    assert accelerator.device_count() == 4


def test_scripts_write_events_of_their_own_to_the_monitors_of_a_config(tmp_path: Path) -> None:
    from deepspeed.monitor.monitor import MonitorMaster
    from deepspeed.runtime.config import DeepSpeedConfig

    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = DeepSpeedConfig({"train_batch_size": 1, "csv_monitor": section})
    monitor = MonitorMaster(config.monitor_config)
    assert monitor.enabled
    monitor.write_events([("Eval/loss", 1.5, 3)])
    assert (tmp_path / "job" / "Eval_loss.csv").read_text().split() == ["step,loss", "3,1.5"]
    assert not MonitorMaster(DeepSpeedConfig({"train_batch_size": 1}).monitor_config).enabled


def test_a_script_profiles_its_own_forwards() -> None:
    from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile

    model = nn.Linear(8, 4)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    for _ in range(3):
        model(torch.randn(2, 8))
    profiler.stop_profile()
    assert profiler.get_total_flops() == 3 * 2 * 2 * 8 * 4
    assert (profiler.get_total_params(), profiler.get_total_macs(as_string=True)) == (36, "192.00 MACs")
    profiler.end_profile()
    with pytest.raises(UsageError, match=r"call start_profile\(\), the model, and stop_profile\(\)"):
        profiler.get_total_flops()
    assert get_model_profile(model, (2, 8), print_profile=False) == ("128.00 FLOPs", "64.00 MACs", "36.00")
