"""Names of DeepSpeed that scripts use beside those of libraries: classes, versions, the accelerator, collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.distributed import run_ranks
from zeroshard.errors import ConfigError, PlanError, UsageError, ZeroShardWarning

deepspeed = pytest.importorskip("deepspeed", reason="zeroshard-deepspeed (compat/deepspeed) is not installed")

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def _loss(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 4)).square().mean()


def test_versions_and_the_commit_are_there() -> None:
    parts = (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)
    assert deepspeed.__version__.startswith(".".join(str(part) for part in parts))
    assert deepspeed.__git_hash__ == deepspeed.__git_branch__ == "unknown"


def test_a_repeating_loader_never_ends() -> None:
    from deepspeed.utils import RepeatingLoader

    loader = RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    with pytest.raises(StopIteration):
        next(RepeatingLoader([]))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("name", ["FusedAdam", "DeepSpeedCPUAdam"])
def test_adams_are_classes_that_step_alone_and_sharded_as_torchs(name: str, decoupled: bool) -> None:
    kind = getattr(__import__("deepspeed.ops.adam", fromlist=[name]), name)

    class Derived(kind):
        """As scripts derive theirs."""

    mode = {"adam_w_mode" if name == "FusedAdam" else "adamw_mode": decoupled}
    like = torch.optim.AdamW if decoupled else torch.optim.Adam
    expected, alone, sharded = _net(), _net(), _net()
    reference = like(expected.parameters(), lr=0.1, weight_decay=0.1)
    optimizer = Derived(alone.parameters(), lr=0.1, weight_decay=0.1, **mode)
    assert isinstance(optimizer, kind)
    assert not isinstance(reference, kind)
    given = Derived(sharded.parameters(), lr=0.1, weight_decay=0.1, **mode)
    engine, wrapped, *_ = deepspeed.initialize(model=sharded, optimizer=given, config=CONFIG)
    assert wrapped.optimizer is given
    for _ in range(3):
        for model, own in ((expected, reference), (alone, optimizer)):
            own.zero_grad()
            _loss(model).backward()
            own.step()
        engine.backward(_loss(engine))
        engine.step()
    with deepspeed.zero.GatheredParameters(sharded.parameters()):
        for one, two, three in zip(expected.parameters(), alone.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(two, one, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(three, one, rtol=1e-6, atol=1e-7)
    engine.destroy()


def test_a_step_of_ones_own_is_refused_rather_than_left_out() -> None:
    from deepspeed.ops.adam import FusedAdam

    class Own(FusedAdam):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = _net()
    with pytest.raises(PlanError, match=r"Own overrides step\(\)"):
        deepspeed.initialize(model=model, optimizer=Own(model.parameters()), config=CONFIG)


def test_the_optimizer_says_its_loss_scale() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8}
    for section, scale, dynamic in (({"enabled": False}, 1.0, False), (fp16, 256.0, True)):
        model = _net()
        config = {**CONFIG, "fp16": section, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
        engine, optimizer, *_ = deepspeed.initialize(model=model, config=config)
        assert (optimizer.loss_scaler.loss_scale, optimizer.loss_scaler.cur_scale) == (scale, scale)
        assert optimizer.dynamic_loss_scale is optimizer.loss_scaler.dynamic is dynamic
        assert optimizer.optimizer is optimizer
        engine.destroy()


def _parts(rank: int, world: int) -> list[list[float]]:
    model = nn.Linear(4, 3)
    nn.init.constant_(model.weight, 2.0)
    with torch.no_grad():
        model.weight[0, 0] = 1.0
    before = [model.weight.detach().clone()]
    config = {**CONFIG, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert model.weight.ds_persist is False
    kept = [model.weight.ds_tensor.flatten().tolist()]
    status = deepspeed.zero.ZeroParamStatus
    assert model.weight.ds_status in {status.NOT_AVAILABLE, status.INFLIGHT}
    assert model.weight.ds_summary()["shape"] == (3, 4)
    model.weight.ds_tensor.data = torch.full_like(model.weight.ds_tensor.data, 1.0 + rank)
    with deepspeed.zero.GatheredParameters(model.weight):
        assert model.weight.flatten().tolist().count(1.0 + rank) == len(kept[0])
        assert model.weight.ds_status in {status.AVAILABLE}
    with pytest.raises(ValueError, match="elements of the parameter, not 50"):
        model.weight.ds_tensor.data = torch.zeros(50)
    engine.destroy()
    with deepspeed.zero.Init(config_dict_or_path=config):
        loose = nn.Linear(4, 3)
    with deepspeed.zero.GatheredParameters(loose.weight, modifier_rank=0), torch.no_grad():
        loose.weight.copy_(before[0])
    return [*kept, loose.weight.ds_tensor.tolist()]


def test_ds_tensor_is_what_this_rank_keeps_and_takes_other_data() -> None:
    results = run_ranks(2, _parts)
    for kind in range(2):
        assert [value for result in results for value in result[kind]] == [1.0] + [2.0] * 11


def test_gradients_are_replaced_by_a_function() -> None:
    from deepspeed.utils import safe_get_full_grad, safe_update_full_grad_vectorized

    model = _net()
    config = {**CONFIG, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.backward(_loss(engine))
    members = list(model.parameters())
    before = [safe_get_full_grad(member) for member in members]
    safe_update_full_grad_vectorized(members, lambda gradient: gradient * 2)
    safe_update_full_grad_vectorized(members[:1], lambda gradient, param: gradient + len(param.ds_shape))
    after = [safe_get_full_grad(member) for member in members]
    assert torch.equal(after[0], before[0] * 2 + 2)
    assert all(torch.equal(new, old * 2) for new, old in zip(after[1:], before[1:], strict=True))
    engine.destroy()


def test_the_accelerator_answers() -> None:
    accelerator = deepspeed.get_accelerator()
    assert accelerator._name == accelerator.device_name()
    assert torch.float32 in accelerator.supported_dtypes()
    state = accelerator.get_rng_state()
    first = torch.rand(2)
    accelerator.set_rng_state(state)
    assert accelerator._name != "cpu" or torch.equal(torch.rand(2), first)
    assert deepspeed.accelerator.is_current_accelerator_supported()


def _collectives(rank: int, world: int) -> list[list[float]]:
    import deepspeed.comm as comm

    value = torch.full((2,), float(rank + 1))
    comm.inference_all_reduce(value)
    outs = [torch.zeros(2), torch.zeros(4)]
    comm.all_gather_coalesced(
        outs, [torch.full((1,), float(rank)), torch.full((2,), float(rank))], async_op=True
    ).wait()
    both = [torch.ones(1), torch.full((2,), float(rank))]
    comm.all_reduce_coalesced(both)
    assert comm.get_all_ranks_from_group(comm.get_world_group()) == list(range(world))
    return [tensor.tolist() for tensor in (value, *outs, *both)]


def test_collectives_of_several_tensors() -> None:
    assert run_ranks(2, _collectives) == [[[3.0, 3.0], [0.0, 1.0], [0.0, 0.0, 1.0, 1.0], [2.0], [1.0, 1.0]]] * 2


def test_a_config_is_an_object_with_every_value() -> None:
    with pytest.raises(deepspeed.DeepSpeedConfigError):
        deepspeed.DeepSpeedConfig({"train_batch_sice": 4})
    assert deepspeed.DeepSpeedConfigError is ConfigError
    config = deepspeed.DeepSpeedConfig(
        {"train_batch_size": 8, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}}
    )
    assert (config.train_micro_batch_size_per_gpu, config.zero_optimization_stage) == (2, 2)
    assert config.zero_config.stage == 2
    assert config.zero_enabled


def test_the_zero_section_is_an_object_with_every_key() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

    config = DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=7, cpu_offload=True)
    assert (config.stage, config.prefetch_bucket_size, config.max_live_parameters) == (3, 7, 1_000_000_000)
    assert isinstance(config.offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)
    assert config.offload_optimizer.device == "cpu"
    assert config.offload_param is None
    with pytest.raises(ConfigError, match="stage3_prefetch"):
        DeepSpeedZeroConfig(stage3_prefetch=1)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("built", ["init", "engine"])
def test_a_change_that_would_be_lost_is_refused_where_sanity_checks_are_on(built: str, checked: bool) -> None:
    zero = {**CONFIG["zero_optimization"], "enable_sanity_checks": checked}
    config = {**CONFIG, "zero_optimization": zero, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    if built == "init":
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = nn.Linear(4, 4)
    else:
        model = nn.Linear(4, 4)
        engine, *_ = deepspeed.initialize(model=model, config=config)

    def change() -> None:
        with deepspeed.zero.GatheredParameters(model.weight), torch.no_grad():
            model.weight.fill_(3.0)

    if checked:
        with pytest.raises(UsageError, match="without modifier_rank"):
            change()
    else:
        with pytest.warns(ZeroShardWarning, match="without modifier_rank"):
            change()
        with deepspeed.zero.GatheredParameters(model.weight):
            assert model.weight.detach().abs().max() < 1.0
    if built == "engine":
        engine.destroy()


def test_variables_of_the_checkpointing_module_are_its_settings() -> None:
    module = deepspeed.checkpointing
    module.reset()
    assert (module.CPU_CHECKPOINT, module.deepspeed_checkpointing_enabled, module.num_layers) == (False, False, None)
    module.configure(checkpoint_in_cpu=True)
    assert (module.CPU_CHECKPOINT, module.deepspeed_checkpointing_enabled) == (True, True)
    module.CPU_CHECKPOINT, module.SYNCHRONIZE, module.PARTITION_ACTIVATIONS = False, True, False
    assert (module.CPU_CHECKPOINT, module.SYNCHRONIZE, module.PROFILE_TIME) == (False, True, False)
    with pytest.raises(UsageError, match=r"deepspeed.checkpointing.num_layers = 3: activations are not divided"):
        module.num_layers = 3
    module.deepspeed_checkpointing_enabled = False
    assert not module.is_configured()
