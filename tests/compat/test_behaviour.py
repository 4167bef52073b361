"""What only real use shows: how libraries call the engine, `zero.Init` and GatheredParameters beyond their manuals."""

from __future__ import annotations

import inspect
import io
import logging
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.distributed import run_ranks
from zeroshard.errors import ConfigError, UsageError

deepspeed = pytest.importorskip("deepspeed", reason="zeroshard-deepspeed (compat/deepspeed) is not installed")

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.scale, torch.Tensor)
        return x + torch.tanh(self.inner(x)) * self.scale.to(x.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Wrapper(nn.Module):
    """As adapters wrap a model: the outer forward calls the inner one past its hooks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.config = {"model": "its own"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.forward(x)


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * number + rank))


def _start(model: nn.Module, config: dict[str, Any] | None = None, **options: Any) -> Any:
    return deepspeed.initialize(
        model=model, config_params={**CONFIG, "optimizer": ADAMW} if config is None else config, **options
    )


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(model.parameters()):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# Parameters before there is an engine.


def _init_shards(rank: int, world: int) -> None:
    expected = dict(_net().state_dict())
    torch.set_default_dtype(torch.bfloat16)  # what the config says counts, not torch's default
    try:
        torch.manual_seed(0)
        with deepspeed.zero.Init(
            config_dict_or_path={**CONFIG, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
        ):
            with deepspeed.zero.Init():  # a model built inside of another one
                built = Net()
            assert built.head.weight.shape == (3, 8)
            identity, shape = built.head.weight.ds_id, built.head.weight.ds_shape
        assert (built.head.weight.ds_id, built.head.weight.ds_shape) == (identity, shape)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {parameter.dtype for parameter in built.parameters()} == {torch.float32}
    with deepspeed.zero.Init(config_dict_or_path={"bf16": {"enabled": True}}):
        low = Net()
    assert {parameter.dtype for parameter in low.parameters()} == {torch.bfloat16}
    with deepspeed.zero.Init(config_dict_or_path={}):
        torch.manual_seed(0)
        model = Net()
    identities = [id(parameter) for parameter in model.parameters()]
    for parameter in model.parameters():
        assert parameter.numel() == 0
        assert parameter.shape == (0,)
        assert not parameter.is_meta
        assert parameter.ds_numel == math.prod(parameter.ds_shape)
        assert parameter.partition_numel() == -(-parameter.ds_numel // world)
        assert parameter.ds_status != deepspeed.zero.ZeroParamStatus.AVAILABLE
    assert not model.blocks[0].scale.is_meta
    with deepspeed.zero.GatheredParameters(model.parameters()):
        assert all(p.ds_status == deepspeed.zero.ZeroParamStatus.AVAILABLE for p in model.parameters())
    assert _same(_whole(model), {n: t for n, t in expected.items() if "scale" not in n})
    with deepspeed.zero.GatheredParameters([model.head.weight], modifier_rank=1):
        if rank == 1:
            with torch.no_grad():
                model.head.weight.fill_(2.0)
    assert torch.equal(_whole(model)["head.weight"], torch.full((3, 8), 2.0))
    with deepspeed.zero.GatheredParameters(model.head.weight):  # changes that nobody asked to keep
        with torch.no_grad():
            model.head.weight.fill_(7.0)
    before = _whole(model)
    assert torch.equal(before["head.weight"], torch.full((3, 8), 2.0))
    one = nn.Module()
    one.value = nn.Parameter(torch.tensor(1.5))
    deepspeed.zero.Init(module=one)
    assert one.value.numel() == 0
    assert one.value.item() == 1.5
    engine, *_ = _start(model)
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert _same(_whole(model), before)
    _train(engine, rank, 2)
    assert not _same(_whole(model), before)


def _gathered(rank: int, world: int) -> None:
    plain, buffer = nn.Parameter(torch.ones(3)), torch.zeros(2)
    for sharded_by_engine in (False, True):
        with deepspeed.zero.Init(config_dict_or_path={}, enabled=not sharded_by_engine):
            model = _net()
        if sharded_by_engine:
            _start(model)
        gathered = deepspeed.zero.GatheredParameters
        weight = model.head.weight
        before = _whole(model)
        for members in (weight, [weight], (weight, weight), (p for p in [weight]), filter(None.__ne__, [weight, None])):
            with gathered(members):
                assert weight.shape == (3, 8)
            assert weight.numel() == 0
        with gathered([weight, None, plain, buffer], modifier_rank=0):
            assert weight.shape == (3, 8)
        for nothing in ([], [None], [plain], None, [buffer]):
            with gathered(nothing, modifier_rank=0):
                pass
        with gathered([weight], enabled=False):
            assert weight.numel() == 0
        # One rank opens an inner block by itself, as weight initialisation does; the outer one keeps the changes.
        with gathered(model.parameters(), modifier_rank=0):
            if rank == 0:
                with gathered([weight, model.head.bias], modifier_rank=0), torch.no_grad():
                    weight.zero_()
            assert weight.shape == (3, 8)
        after = _whole(model)
        assert not after["head.weight"].any()
        assert _same({**after, "head.weight": before["head.weight"]}, before)
        # Overlapping blocks: the first to come holds the parameter to its own end.
        first, second = gathered([weight]), gathered([weight, model.head.bias])
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert model.head.bias.shape == (3,)
        second.__exit__(None, None, None)
        assert weight.numel() == model.head.bias.numel() == 0
        copied = None
        with gathered(model.head.parameters(), modifier_rank=0):
            copied = __import__("copy").deepcopy(nn.ParameterList([weight])) if not sharded_by_engine else None
        if copied is not None:  # an ordinary parameter, as adapters that train a copy of a module want it
            assert copied[0].shape == (3, 8)
            assert not hasattr(copied[0], "ds_id")


# The engine.


def _train(engine: Any, rank: int, steps: int, accumulation: int = 2) -> list[float]:
    losses = []
    for step in range(steps):
        for micro in range(accumulation):
            loss = engine(_batch(rank, step * accumulation + micro)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def _train_by_boundary(engine: Any, rank: int, steps: int) -> list[float]:
    """As accelerate does: the caller says which micro-batch is the last, and steps there only."""
    losses = []
    for step in range(steps):
        for micro in range(2):
            engine.set_gradient_accumulation_boundary(is_boundary=micro == 1)
            loss = engine(_batch(rank, step * 2 + micro)).square().mean()
            engine.backward(loss / 2, scale_wrt_gas=False)
            if micro == 1:
                engine.step()
            losses.append(loss.item())
    return losses


def _accumulates(rank: int, world: int) -> None:
    for stage in range(4):
        config = {**CONFIG, "optimizer": ADAMW, "zero_optimization": {"stage": stage}}
        one, *_ = _start(_net(), config)
        two, *_ = _start(_net(), config)
        assert _train(one, rank, 3) == _train_by_boundary(two, rank, 3), stage
        assert _same(_whole(one.module), _whole(two.module))
        assert one.global_steps == two.global_steps == 3
        assert one.get_global_grad_norm() == two.get_global_grad_norm()
        two.zero_grad()  # after the step, as Trainer does: harmless


def _parameters_are_there_after_a_step(rank: int, world: int) -> None:
    """A callback that averages weights, or logs them, reads model.parameters() right after the step."""
    for stage in range(4):
        zero = {"stage": stage, "overlap_comm": True, "stage3_param_persistence_threshold": 10**6}
        engine, *_ = _start(_net(), {**CONFIG, "optimizer": ADAMW, "zero_optimization": zero})
        for _ in range(3):
            _train(engine, rank, 1)
            read = {name: p.detach().clone() for name, p in engine.module.named_parameters() if p.numel()}
            whole = _whole(engine.module)
            assert len(read) == len(whole) or (stage == 3 and read)
            assert all(torch.equal(read[name], whole[name]) for name in read), stage
        assert not engine.plan.policy.overlap_step
        engine.destroy()


def _engine_answers(rank: int, world: int) -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 30}  # the head alone stays gathered
    raw = {
        **CONFIG,
        "zero_optimization": zero,
        "optimizer": ADAMW,
        "steps_per_print": math.inf,
        "zero_allow_untested_optimizer": True,
    }
    wrapped = Wrapper(_net())
    engine, optimizer, loader, scheduler = _start(wrapped, raw)
    assert isinstance(engine, nn.Module)
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert (loader, scheduler) == (None, None)
    assert engine.config is raw
    assert engine.config.get("zero_optimization", {}).get("stage") == 3
    assert engine.module.config == {"model": "its own"}
    assert engine.get_global_grad_norm() is None
    assert "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters
    assert isinstance(optimizer, deepspeed.runtime.base_optimizer.DeepSpeedOptimizer)
    assert optimizer.overflow is False
    for parameter in optimizer.parameter_offload.module.named_parameters():
        assert parameter[1].ds_active_sub_modules == set()  # of small parameters that stay gathered, too
    # The list that a scheduler writes to is the one that the step reads.
    before = _whole(wrapped)
    optimizer.param_groups[0]["lr"] = 0.0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    _train(engine, rank, 1)
    assert _same(_whole(wrapped), before)
    schedule.step()
    optimizer.param_groups[0]["lr"] = 1e-2
    _train(engine, rank, 1)
    assert not _same(_whole(wrapped), before)
    # Forward of the module, and of a module inside that holds all units, past the engine.
    x = _batch(rank, 50)
    engine.eval()
    with torch.no_grad():
        assert torch.equal(engine(x), wrapped(x))
        assert torch.equal(engine(x), wrapped.inner(x))
        assert all(parameter.numel() == 0 for parameter in wrapped.inner.blocks.parameters())
        with pytest.raises(RuntimeError):
            wrapped.inner(torch.randn(2, 5))
        assert torch.equal(engine(x), wrapped.inner(x))
    engine.train()
    loss = wrapped.inner(x).square().mean()  # and a training step through it
    engine.backward(loss)
    engine.step()
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
    state = engine._zero3_consolidated_16bit_state_dict()
    assert (state is None) == (rank != 0)
    if state is not None:
        assert set(state) == {f"inner.{name}" for name in _net().state_dict()}


def _again_after_destroy(rank: int, world: int) -> None:
    for stage in range(4):
        for low in (False, True):
            config = {**CONFIG, "optimizer": ADAMW, "zero_optimization": {"stage": stage}, "bf16": {"enabled": low}}
            model = _net()
            engine, *_ = _start(model, config)
            _train(engine, rank, 1)
            values = _whole(model)
            engine.destroy()
            assert _same(_whole(model), values)
            engine, *_ = _start(model, config)
            assert _same(_whole(model), values)
            _train(engine, rank, 1)
            assert not _same(_whole(model), values)
            engine.destroy()
            engine.destroy()


def _several_models(rank: int, world: int) -> None:
    """A reference model beside the trained one, with what TRL puts into its config; then it is trained itself."""
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": 0}
    reference_config = {
        **CONFIG,
        "zero_optimization": zero,
        "zero_optimization.reduce_bucket_size": 64.0,
        "zero_optimization.stage3_prefetch_bucket_size": 0.9 * 64,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},  # without an optimizer
    }
    policy, reference = _net(), _net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frozen, optimizer, _, scheduler = _start(reference, reference_config)
    assert (optimizer, scheduler) == (None, None)
    engine, *_ = _start(policy)
    x = _batch(rank, 9)
    frozen.eval()
    for _ in range(2):
        with torch.no_grad():
            expected = frozen(x)
        engine.backward((engine(x) - expected).square().mean() + engine(x).square().mean())
        engine.step()
    engine.backward(engine(x).square().mean())
    with torch.no_grad():
        assert torch.equal(frozen(x), expected)
    engine.step()
    trained, *_ = _start(reference)
    assert trained.module is reference
    _train(trained, rank, 1)


def _goes_from_one_engine_to_the_next(rank: int, world: int) -> None:
    """A model that is given to a second Trainer leaves the first with its weights; the first says so from then on."""
    model = _net()
    first, *_ = _start(model)
    _train(first, rank, 1)
    values = _whole(model)
    second, *_ = _start(model, {**CONFIG, "optimizer": ADAMW, "zero_optimization": {"stage": 2}})
    assert _same(_whole(model), values)
    loss = first(_batch(rank, 0)).mean()
    for use, given in ((first.backward, loss), (first.save_checkpoint, "it"), (first.load_checkpoint, "it")):
        with pytest.raises(UsageError, match="another engine has taken over"):
            use(given)
    first.destroy()
    _train(second, rank, 1)
    assert not _same(_whole(model), values)
    del second
    _train(_start(model)[0], rank, 1)


def _evaluates_other_adapters(rank: int, world: int) -> None:
    """peft's set_adapter switches requires_grad: without a gradient what was frozen may be used like that."""
    model = _net()
    model.head.requires_grad_(False)
    engine, *_ = _start(model)
    _train(engine, rank, 1)
    expected = engine(_batch(rank, 0)).detach()
    for other in (True, False):
        model.head.requires_grad_(other)
        model.blocks.requires_grad_(not other)
        assert torch.equal(torch.no_grad()(model)(_batch(rank, 0)), expected)
        with pytest.raises(UsageError, match="was frozen") if other else nullcontext():
            engine(_batch(rank, 0))
    _train(engine, rank, 1)


def _names_weights_that_it_does_not_hand_out(rank: int, world: int) -> None:
    """`model.save_pretrained(folder)` of a sharded model, which would save nothing."""
    weight = _start(_net())[0].module.state_dict()["head.weight"]
    assert weight.shape == (3, 8)
    for use in (torch.Tensor.cpu, torch.Tensor.numpy, lambda value: torch.save(value, io.BytesIO())):
        with pytest.raises(UsageError, match=r"save_model\(\)"):
            use(weight.view(-1).contiguous())  # as ranks do that write nothing


def _names_files_as_they_look_for_them(rank: int, world: int, folder: str) -> None:
    engine, *_ = _start(_net())
    _train(engine, rank, 2)
    engine.save_checkpoint(folder)
    expected = _whole(engine.module)
    _train(engine, rank, 1)
    path, client = engine.load_checkpoint(
        folder, load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True
    )
    assert Path(path) == Path(folder) / "global_step2"
    assert client == {}
    assert _same(_whole(engine.module), expected)
    assert engine.load_checkpoint(folder, "global_step2")[0] == path
    engine.save_checkpoint(folder, "pytorch_model", client_state={"epoch": 3})
    assert engine.load_checkpoint(folder, "pytorch_model")[1] == {"epoch": 3}
    dist.barrier()
    there = {item.name for item in Path(folder).iterdir()}
    assert there == {"global_step2", "pytorch_model", "latest", "zero_to_fp32.py"}


def _everything(rank: int, world: int, folder: str) -> None:
    checks: tuple[Callable[[int, int], None], ...] = (
        _init_shards,
        _gathered,
        _accumulates,
        _parameters_are_there_after_a_step,
        _engine_answers,
        _again_after_destroy,
        _several_models,
        _goes_from_one_engine_to_the_next,
        _evaluates_other_adapters,
        _names_weights_that_it_does_not_hand_out,
    )
    for check in checks:
        check(rank, world)
    _names_files_as_they_look_for_them(rank, world, folder)


def test_behaves_as_the_libraries_expect(tmp_path: Path) -> None:
    run_ranks(2, _everything, str(tmp_path))


# One process is enough.


def test_a_typo_is_an_error_and_what_libraries_inject_is_not() -> None:
    for wrong, words in (
        ({"zero_optimisation": {"stage": 3}}, "zero_optimization"),
        ({"zero_optimization.reduce_bucket_sise": 1e6}, "unknown key"),
        ({"gradient_cliping": 1.0}, "gradient_clipping"),
    ):
        with pytest.raises(ConfigError, match=words):
            _start(_net(), {**CONFIG, "optimizer": ADAMW, **wrong})
    injected = {
        "steps_per_print": math.inf,
        "aio": {
            "block_size": 2**20,
            "queue_depth": 8,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
        },
        "fp16": {"enabled": False, "auto_cast": True},
        "zero_optimization.stage3_param_persistence_threshold": 640.0,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 1e6,
            "stage3_prefetch_bucket_size": "auto",
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-2}},
    }
    engine, *_ = _start(_net(), {**CONFIG, **injected})
    _train(engine, 0, 1)
    assert "zero_optimization.stage3_param_persistence_threshold" in engine.config


def test_a_missing_optimizer_is_one_clear_error() -> None:
    engine, optimizer, *_ = _start(_net(), CONFIG)
    assert optimizer is None
    with pytest.raises(UsageError, match="there is no optimizer"):
        engine.backward(engine(_batch(0, 0)).mean())


def test_accelerate_without_a_backend_on_several_cpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    if torch.cuda.is_available():
        pytest.skip("with a GPU the backend is clear")
    with pytest.raises(UsageError, match="use_cpu=True"):
        deepspeed.comm.init_distributed(dist_backend=None, auto_mpi_discovery=False)


def test_says_who_it_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    deepspeed.utils.logger.setLevel(logging.INFO)
    with caplog.at_level(logging.INFO, "zeroshard"):
        _start(_net())
    assert "DeepSpeed info" in caplog.text
