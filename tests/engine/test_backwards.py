"""Backwards in every way that scripts call them give the gradients of one plain backward of the mean loss.

The reference is plain torch in one process on the batches of all ranks, which are the same whoever draws them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.errors import UnscaledLossError, UsageError

WIDTH = 8
STEPS = 3


@dataclass
class Output:
    """An output class as transformers has it: the loss is made of the other one."""

    loss: torch.Tensor
    hidden: torch.Tensor


class Net(nn.Module):
    """Returns what it is asked for: a loss, or tensors that the script makes a loss of."""

    def __init__(self, returns: str = "loss") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.returns = returns

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        loss = x.float().square().mean()
        outputs = {"loss": loss, "tuple": (loss, x), "dict": {"hidden": x}, "class": Output(loss, x)}
        return outputs[self.returns]


def _loss(output: Any) -> torch.Tensor:
    """The loss of an output, where it is none itself made outside of the model, of one or two of its tensors."""
    if isinstance(output, Output):
        return output.loss + 0.5 * output.hidden.float().abs().mean()
    if isinstance(output, dict):
        return output["hidden"].float().pow(4).mean()
    return output[0] + output[1].float().mean() if isinstance(output, tuple) else output


def _config(stage: int, accumulation: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def _start(stage: int, accumulation: int = 1, returns: str = "loss", **more: Any) -> Any:
    torch.manual_seed(0)
    return zeroshard.initialize(model=Net(returns), config=_config(stage, accumulation, **more))[0]


def _batch(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def _reference(world: int, counts: list[int], returns: str = "loss", divide: bool = True) -> dict[str, torch.Tensor]:
    """Plain SGD on the mean over the micro-batches of all ranks; `divide` False is their sum over micro-batches."""
    torch.manual_seed(0)
    model = Net(returns)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step, count in enumerate(counts):
        for rank in range(world):
            for micro in range(count):
                loss = _loss(model(_batch(step, micro, rank)))
                (loss / world / (count if divide else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _assert_same(engine: Any, expected: dict[str, torch.Tensor], tolerance: float, what: object) -> None:
    for name, value in zeroshard.iterate_full_parameters(engine.module):
        gap = float((value.float() - expected[name]).abs().max())
        assert gap <= tolerance, (what, name, gap)


def _by_engine(engine: Any, loss: torch.Tensor, micro: int) -> None:
    engine.backward(loss)


def _by_loss(engine: Any, loss: torch.Tensor, micro: int) -> None:
    loss.backward()


def _by_scale(engine: Any, loss: torch.Tensor, micro: int) -> None:
    engine.scale(loss).backward()


def _by_turns(engine: Any, loss: torch.Tensor, micro: int) -> None:
    (_by_engine, _by_loss, _by_scale)[micro % 3](engine, loss, micro)


DIRECT = {"loss.backward": _by_loss, "engine.scale": _by_scale, "by turns": _by_turns}


def _direct(rank: int, world: int, backward: Callable[[Any, torch.Tensor, int], None]) -> None:
    for returns in ("loss", "tuple", "dict", "class") if backward is _by_loss else ("class",):
        for accumulation in (1, 3) if returns == "loss" else (3,):
            expected = _reference(world, [accumulation] * STEPS, returns)
            for stage in range(4):
                for low in ("fp32", "bf16"):
                    if low == "bf16" and (returns != "class" or stage == 1):
                        continue
                    more = {"bf16": {"enabled": True}} if low == "bf16" else {}
                    engine = _start(stage, accumulation, returns, **more)
                    for step in range(STEPS):
                        for micro in range(accumulation):
                            backward(engine, _loss(engine(_batch(step, micro, rank))), micro)
                            engine.step()
                    assert engine.global_steps == STEPS
                    assert engine.global_samples == STEPS * accumulation * 2 * world
                    tolerance = 1e-6 if low == "fp32" else 2e-2
                    _assert_same(engine, expected, tolerance, (returns, accumulation, stage, low))
                    engine.destroy()


@pytest.mark.parametrize("way", DIRECT)
def test_a_backward_by_torch_is_divided_by_the_accumulation_steps_once(way: str) -> None:
    run_ranks(2, _direct, DIRECT[way])


def _fp16(rank: int, world: int) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8}
    for stage in range(4):
        norms = []
        for backward in (_by_engine, _by_scale):
            engine = _start(stage, 2, fp16=fp16)
            for micro in range(2):
                loss = engine(_batch(0, micro, rank))
                assert float(engine.scale(loss).detach()) == 256.0 * float(loss.detach())
                backward(engine, loss, micro)
                engine.step()
            norms.append(engine.get_global_grad_norm())
            loss = engine(_batch(1, 0, rank))
            with pytest.raises(UnscaledLossError, match=r"engine\.backward\(loss\), or engine\.scale\(loss\)"):
                loss.backward()
            engine.backward(engine(_batch(1, 0, rank)))  # what was refused has left nothing behind
            engine.step()
            with pytest.raises(UsageError, match="would scale twice"):
                engine.backward(engine.scale(engine(_batch(1, 1, rank))))
            engine.destroy()
        assert norms[0] == norms[1]
    assert issubclass(UnscaledLossError, RuntimeError)
    with pytest.raises(UsageError, match=r"scale needs a scalar loss, got a tensor of shape \(2, 8\)"):
        _start(1, returns="dict").scale(torch.ones(2, WIDTH))


def test_under_a_loss_scale_a_backward_by_torch_is_scaled_by_the_engine_or_refused() -> None:
    run_ranks(2, _fp16)


def _joint(rank: int, world: int) -> None:
    """Two engines under one loss: each gets its own gradient, divided once, whoever calls the backward."""
    for stage in (1, 3):
        expected: dict[str, float] = {}
        for way in ("torch", "first", "scale"):
            engines = [_start(stage, 2), _start(stage, 2)]
            for micro in range(2):
                losses = [engine(_batch(number, micro, rank)) for number, engine in enumerate(engines)]
                loss = losses[0] + 2 * losses[1]
                if way == "torch":
                    loss.backward()
                elif way == "first":
                    engines[0].backward(loss)
                else:
                    engines[0].scale(loss).backward()
                for engine in engines:
                    engine.step()
            for number, engine in enumerate(engines):
                norm = engine.get_global_grad_norm()
                assert math.isclose(norm, expected.setdefault(str(number), norm), rel_tol=1e-6), (stage, way)
                engine.destroy()


def test_engines_under_one_loss_divide_it_once() -> None:
    run_ranks(2, _joint)


def _counts(rank: int, world: int) -> None:
    """Several backwards before one step, their number unknown to the config: of each kind that scripts know."""
    counts = [3, 1, 2]
    expected = _reference(world, counts, divide=False)
    for stage in range(4):
        for way in ("before", "after", "direct", "no_sync", "coalesced", "unmanaged"):
            engine = _start(stage, managed_gradient_accumulation=way != "unmanaged")
            assert engine.managed_gradient_accumulation() == (way != "unmanaged")
            for step, count in enumerate(counts):
                with engine.coalesce_grad_reduction() if way == "coalesced" else nullcontext():
                    for micro in range(count):
                        last = micro == count - 1
                        if way in ("before", "direct"):
                            engine.set_gradient_accumulation_boundary(last)
                        with engine.no_sync() if way == "no_sync" and not last else nullcontext():
                            loss = engine(_batch(step, micro, rank))
                            if way == "after":
                                engine.set_gradient_accumulation_boundary(last)
                                assert engine.plan.policy.accumulate == (stage < 3 or step > 0)
                            loss.backward() if way == "direct" else engine.backward(loss, scale_wrt_gas=False)
                engine.allreduce_gradients()
                engine.step()
            assert engine.global_steps == len(counts)
            assert engine.global_samples == 2 * world * (sum(counts) if way == "unmanaged" else len(counts))
            _assert_same(engine, expected, 1e-6, (stage, way))
            engine.destroy()


def test_several_backwards_before_one_step_are_summed_however_the_script_says_so() -> None:
    run_ranks(2, _counts)


def _own_gradients(rank: int, world: int) -> None:
    """Under no_sync: what a script reads of `parameter.grad` and changes of it, as plain torch on this rank has it."""
    for stage, precision in ((stage, precision) for stage in range(4) for precision in ("fp32", "bf16")):
        engine = _start(stage, bf16={"enabled": precision == "bf16"})
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        torch.manual_seed(0)
        alone = Net().to(dtype)
        with engine.no_sync():
            for micro in range(2):
                x = _batch(0, micro, rank).to(dtype)
                engine.backward(engine(x), scale_wrt_gas=False)
                alone(x).backward()
                for here, there in zip(engine.module.parameters(), alone.parameters(), strict=True):
                    close = torch.allclose(
                        here.grad.float(), there.grad.float(), atol=1e-6 if precision == "fp32" else 2e-3
                    )
                    assert close, (stage, precision, micro)
            weight = engine.module.layers[0].weight
            norm, gradient = float(weight.grad.norm()), weight.grad
            gradient *= 4
            gradient.data.mul_(0.5)
            assert gradient is weight.grad
            assert float(weight.grad.detach().norm()) == pytest.approx(2 * norm), (stage, precision)
            nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3)
            norms = torch.stack([parameter.grad.norm() for parameter in engine.module.parameters()])
            assert float(norms.norm()) == pytest.approx(1e-3, rel=1e-2), (stage, precision)
        with pytest.raises(UsageError, match="the gradients of this model are sharded"):
            weight.grad.norm()
        engine.step()
        norm = engine.get_global_grad_norm()
        assert norm is not None
        assert norm < 1e-3 * 1.1, (stage, precision)
        engine.destroy()


def test_under_no_sync_a_gradient_is_read_and_changed_as_torch_has_it_on_the_rank() -> None:
    run_ranks(2, _own_gradients)


def _unmanaged(rank: int, world: int) -> None:
    engine = _start(2, 4, managed_gradient_accumulation=False)
    assert not engine.is_gradient_accumulation_boundary()
    with pytest.raises(UsageError, match=r"set_gradient_accumulation_boundary\(\) with managed_gradient_acc"):
        engine.set_gradient_accumulation_boundary(True)
    with (
        pytest.raises(UsageError, match=r"coalesce_grad_reduction\(\) with managed_gradient"),
        engine.coalesce_grad_reduction(),
    ):
        pass
    engine = _start(2)
    with engine.coalesce_grad_reduction():
        engine.backward(engine(_batch(0, 0, rank)))
        with pytest.raises(UsageError, match=r"step\(\) inside no_sync\(\) or coalesce_grad_reduction"):
            engine.step()
        with pytest.raises(UsageError, match="leave the outer block"), engine.coalesce_grad_reduction():
            pass
        with pytest.raises(UsageError, match=r"no_sync\(\) inside of coalesce_grad_reduction"), engine.no_sync():
            pass
    engine.step()
    engine.empty_partition_cache()
    loss = engine(_batch(0, 0, rank))
    with pytest.raises(UsageError, match="call it after the backward"):
        engine.empty_partition_cache()
    engine.backward(loss)
    engine.step()


def test_what_contradicts_an_accumulation_is_refused() -> None:
    run_ranks(2, _unmanaged)


class _Fails(torch.autograd.Function):
    """The identity, whose backward fails while `armed`."""

    armed = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if _Fails.armed:
            raise ArithmeticError("of the model's own")
        return gradient


class _Failing(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](_Fails.apply(self.layers[0](x))).square().mean()


def _broken(rank: int, world: int) -> None:
    for stage in range(4):
        _Fails.armed = True
        engine, *_ = zeroshard.initialize(model=_Failing(), config=_config(stage, 1))
        first, second = engine(_batch(0, 0, rank)), engine(_batch(0, 0, rank))
        with pytest.raises(ArithmeticError, match="of the model's own"):
            first.backward()
        _Fails.armed = False
        with pytest.raises(UsageError, match=r"a backward after a backward that ended in an exception.*forward again"):
            second.backward()
        with pytest.raises(UsageError, match="a step after a backward that ended in an exception"):
            engine.step()
        engine.backward(engine(_batch(0, 0, rank)))
        engine.step()
        assert engine.was_step_applied()
        engine.destroy()
        with pytest.raises(UsageError, match="was closed"):
            engine.backward(torch.ones((), requires_grad=True))
        if stage == 3:
            with pytest.raises(UsageError, match=r"its engine was closed \(engine\.destroy\(\)"):
                engine(_batch(0, 0, rank))


def test_after_a_backward_that_failed_or_a_closed_engine_the_next_call_says_what_happened() -> None:
    run_ranks(2, _broken)


def _functional(rank: int, world: int) -> None:
    plain = _start_plain()
    x = _batch(0, 0, rank)
    expected = torch.func.grad(plain)(x)
    rows = torch.func.vmap(torch.func.grad(plain))(x)
    hessian = torch.func.hessian(plain)(x[:1])
    for stage in range(4):
        engine = _start(stage)
        if stage == 3:
            with pytest.raises(UsageError, match=r"torch\.func .* Use stage 2"):
                torch.func.grad(engine)(x)
            (by_input,) = torch.autograd.grad(engine(x.requires_grad_()), x)  # the cure that it names
            torch.testing.assert_close(by_input, expected)
            x = x.detach()
        else:
            torch.testing.assert_close(torch.func.grad(lambda value, run=engine: run(value))(x), expected)
            torch.testing.assert_close(torch.func.vmap(torch.func.grad(engine))(x), rows)
            torch.testing.assert_close(torch.func.hessian(engine)(x[:1]), hessian)
        engine.backward(engine(x))
        engine.step()
        assert engine.was_step_applied()


def _start_plain() -> Net:
    torch.manual_seed(0)
    return Net()


def test_transforms_of_torch_func_run_through_whole_parameters_and_are_refused_through_sharded_ones() -> None:
    run_ranks(2, _functional)


def _answers(rank: int, world: int) -> None:
    for stage in range(4):
        engine = _start(stage, bf16={"enabled": stage == 1}, gradient_clipping=0.7)
        assert engine.zero_optimization_stage() == stage
        assert engine.zero_optimization() == (stage > 0)
        assert engine.zero_optimization_partition_gradients() == (stage > 1)
        assert engine.zero_optimization_partition_weights() == (stage > 2)
        assert (engine.bfloat16_enabled(), engine.fp16_enabled()) == (stage == 1, False)
        assert engine.gradient_clipping() == 0.7
        assert engine.gradient_predivide_factor() == 1.0


def test_the_engine_answers_what_its_config_says() -> None:
    run_ranks(1, _answers)
