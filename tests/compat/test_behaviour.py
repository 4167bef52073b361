"""What only real use shows: how libraries call the engine."""

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

from tests.compat.small import ADAMW, CONFIG, batch, deepspeed, same_values, small_net, start, train, whole_values
from tests.support.distributed import run_ranks
from zeroshard.errors import ConfigError, UsageError


class Wrapper(nn.Module):
    """As adapters wrap a model: the outer forward calls the inner one past its hooks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.config = {"model": "its own"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.forward(x)


def _train_by_boundary(engine: Any, rank: int, steps: int) -> list[float]:
    """As accelerate does: the caller says which micro-batch is the last, and steps there only."""
    losses = []
    for step in range(steps):
        for micro in range(2):
            engine.set_gradient_accumulation_boundary(is_boundary=micro == 1)
            loss = engine(batch(rank, step * 2 + micro)).square().mean()
            engine.backward(loss / 2, scale_wrt_gas=False)
            if micro == 1:
                engine.step()
            losses.append(loss.item())
    return losses


def _accumulates(rank: int, world: int) -> None:
    for stage in range(4):
        config = {**CONFIG, "optimizer": ADAMW, "zero_optimization": {"stage": stage}}
        one, *_ = start(small_net(), config)
        two, *_ = start(small_net(), config)
        assert train(one, rank, 3) == _train_by_boundary(two, rank, 3), stage
        assert same_values(whole_values(one.module), whole_values(two.module))
        assert one.global_steps == two.global_steps == 3
        assert one.get_global_grad_norm() == two.get_global_grad_norm()
        two.zero_grad()  # after the step, as Trainer does: harmless


def _parameters_are_there_after_a_step(rank: int, world: int) -> None:
    """A callback that averages weights, or logs them, reads model.parameters() right after the step."""
    for stage in range(4):
        zero = {"stage": stage, "overlap_comm": True, "stage3_param_persistence_threshold": 10**6}
        engine, *_ = start(small_net(), {**CONFIG, "optimizer": ADAMW, "zero_optimization": zero})
        for _ in range(3):
            train(engine, rank, 1)
            read = {name: p.detach().clone() for name, p in engine.module.named_parameters() if p.numel()}
            whole = whole_values(engine.module)
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
    wrapped = Wrapper(small_net())
    engine, optimizer, loader, scheduler = start(wrapped, raw)
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
    before = whole_values(wrapped)
    optimizer.param_groups[0]["lr"] = 0.0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    train(engine, rank, 1)
    assert same_values(whole_values(wrapped), before)
    schedule.step()
    optimizer.param_groups[0]["lr"] = 1e-2
    train(engine, rank, 1)
    assert not same_values(whole_values(wrapped), before)
    # Forward of the module, and of a module inside that holds all units, past the engine.
    x = batch(rank, 50)
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
        assert set(state) == {f"inner.{name}" for name in small_net().state_dict()}


def _again_after_destroy(rank: int, world: int) -> None:
    for stage in range(4):
        for low in (False, True):
            config = {**CONFIG, "optimizer": ADAMW, "zero_optimization": {"stage": stage}, "bf16": {"enabled": low}}
            model = small_net()
            engine, *_ = start(model, config)
            train(engine, rank, 1)
            values = whole_values(model)
            engine.destroy()
            assert same_values(whole_values(model), values)
            engine, *_ = start(model, config)
            assert same_values(whole_values(model), values)
            train(engine, rank, 1)
            assert not same_values(whole_values(model), values)
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
    policy, reference = small_net(), small_net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frozen, optimizer, _, scheduler = start(reference, reference_config)
    assert (optimizer, scheduler) == (None, None)
    engine, *_ = start(policy)
    x = batch(rank, 9)
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
    trained, *_ = start(reference)
    assert trained.module is reference
    train(trained, rank, 1)


def _goes_from_one_engine_to_the_next(rank: int, world: int) -> None:
    """A model that is given to a second Trainer leaves the first with its weights; the first says so from then on."""
    model = small_net()
    first, *_ = start(model)
    train(first, rank, 1)
    values = whole_values(model)
    second, *_ = start(model, {**CONFIG, "optimizer": ADAMW, "zero_optimization": {"stage": 2}})
    assert same_values(whole_values(model), values)
    loss = first(batch(rank, 0)).mean()
    for use, given in ((first.backward, loss), (first.save_checkpoint, "it"), (first.load_checkpoint, "it")):
        with pytest.raises(UsageError, match="another engine has taken over"):
            use(given)
    first.destroy()
    train(second, rank, 1)
    assert not same_values(whole_values(model), values)
    del second
    train(start(model)[0], rank, 1)


def _evaluates_other_adapters(rank: int, world: int) -> None:
    """peft's set_adapter switches requires_grad: without a gradient what was frozen may be used like that."""
    model = small_net()
    model.head.requires_grad_(False)
    engine, *_ = start(model)
    train(engine, rank, 1)
    expected = engine(batch(rank, 0)).detach()
    for other in (True, False):
        model.head.requires_grad_(other)
        model.blocks.requires_grad_(not other)
        assert torch.equal(torch.no_grad()(model)(batch(rank, 0)), expected)
        with pytest.raises(UsageError, match="was frozen") if other else nullcontext():
            engine(batch(rank, 0))
    train(engine, rank, 1)


def _names_weights_that_it_does_not_hand_out(rank: int, world: int) -> None:
    """`model.save_pretrained(folder)` of a sharded model, which would save nothing."""
    weight = start(small_net())[0].module.state_dict()["head.weight"]
    assert weight.shape == (3, 8)
    for use in (torch.Tensor.cpu, torch.Tensor.numpy, lambda value: torch.save(value, io.BytesIO())):
        with pytest.raises(UsageError, match=r"save_model\(\)"):
            use(weight.view(-1).contiguous())  # as ranks do that write nothing


def _names_files_as_they_look_for_them(rank: int, world: int, folder: str) -> None:
    engine, *_ = start(small_net())
    train(engine, rank, 2)
    engine.save_checkpoint(folder)
    expected = whole_values(engine.module)
    train(engine, rank, 1)
    path, client = engine.load_checkpoint(
        folder, load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True
    )
    assert Path(path) == Path(folder) / "global_step2"
    assert client == {}
    assert same_values(whole_values(engine.module), expected)
    assert engine.load_checkpoint(folder, "global_step2")[0] == path
    engine.save_checkpoint(folder, "pytorch_model", client_state={"epoch": 3})
    assert engine.load_checkpoint(folder, "pytorch_model")[1] == {"epoch": 3}
    dist.barrier()
    there = {item.name for item in Path(folder).iterdir()}
    assert there == {"global_step2", "pytorch_model", "latest", "zero_to_fp32.py"}


def _everything(rank: int, world: int, folder: str) -> None:
    checks: tuple[Callable[[int, int], None], ...] = (
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
            start(small_net(), {**CONFIG, "optimizer": ADAMW, **wrong})
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
    engine, *_ = start(small_net(), {**CONFIG, **injected})
    train(engine, 0, 1)
    assert "zero_optimization.stage3_param_persistence_threshold" in engine.config


def test_a_missing_optimizer_is_one_clear_error() -> None:
    engine, optimizer, *_ = start(small_net(), CONFIG)
    assert optimizer is None
    with pytest.raises(UsageError, match="there is no optimizer"):
        engine.backward(engine(batch(0, 0)).mean())


def test_accelerate_without_a_backend_on_several_cpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    if torch.cuda.is_available():
        pytest.skip("with a GPU the backend is clear")
    with pytest.raises(UsageError, match="use_cpu=True"):
        deepspeed.comm.init_distributed(dist_backend=None, auto_mpi_discovery=False)


def test_says_who_it_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    deepspeed.utils.logger.setLevel(logging.INFO)
    with caplog.at_level(logging.INFO, "zeroshard"):
        start(small_net())
    assert "DeepSpeed info" in caplog.text
