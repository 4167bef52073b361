"""`initialize` on several ranks: stages agree, data is divided, a deferred model never is whole on any rank."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import zeroshard
from tests.support.distributed import run_ranks
from tests.test_initialize import CONFIG, Model, build, loss_of, parameters, same, start, train
from zeroshard.engine.core.handle import handle_of
from zeroshard.errors import UsageError
from zeroshard.plan.memory import state_bytes


def _stages(rank: int, world_size: int) -> list[str]:
    """What differs between the stages, and from the plain loop over the batches of all ranks."""
    found: list[str] = []
    expected: dict[str, torch.Tensor] = {}
    for stage in range(4):
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        engine, _ = start({**CONFIG, "zero_optimization": zero})
        assert engine.plan.units[1].sharded == (stage == 3)
        for step in range(3):
            engine.backward(loss_of(engine, step, 0, rank))
            engine.step()
        expected = expected or parameters(engine)
        found += [] if same(parameters(engine), expected) else [f"stage {stage}"]
        engine.destroy()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6, weight_decay=0)
    for step in range(3):
        for member in range(world_size):
            (loss_of(model, step, 0, member) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = dict(model.named_parameters())
    found += [name for name, value in expected.items() if float((value - plain[name]).abs().max()) > 1e-6]
    return found


def _no_sync(rank: int, world_size: int) -> None:
    results = []
    for inside in (False, True):
        config = {**CONFIG, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}
        engine, _ = start(config)
        if inside:
            with engine.no_sync():
                engine.backward(loss_of(engine, 0, 0, rank))
                with pytest.raises(UsageError, match="leave the context first"):
                    engine.step()
            engine.step()
        else:
            engine.backward(loss_of(engine, 0, 0, rank))
            engine.step()
        engine.backward(loss_of(engine, 0, 1, rank))
        engine.step()
        assert engine.global_steps == 1
        results.append(parameters(engine))
        engine.destroy()
    for name, value in results[0].items():
        assert float((value - results[1][name]).abs().max()) < 1e-6, name


def _loader(rank: int, world_size: int) -> list[int]:
    data = TensorDataset(torch.arange(16))
    engine, _, loader, _ = zeroshard.initialize(model=build(), config=CONFIG, training_data=data)
    assert loader is not None
    assert engine.train_batch_size() == 4 * world_size
    assert (engine.global_rank, engine.world_size) == (rank, world_size)
    engine.destroy()
    return [int(value) for (rows,) in loader for value in rows]


def _deferred(rank: int, world_size: int) -> None:
    torch.manual_seed(11)
    plain = Model()
    torch.manual_seed(11)
    with zeroshard.Init():
        model = Model()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine, _, _, _ = zeroshard.initialize(model=model, config={**CONFIG, "zero_optimization": zero})
    groups = [group for unit in handle_of(engine.module).runtime.units for group in unit.groups]
    held = sum(group.shard.untyped_storage().nbytes() for group in groups)
    padding = sum(group.plan.layout.numel for group in groups) * 4 // world_size
    assert held == padding
    assert all(parameter.numel() == 0 for parameter in engine.module.parameters())
    assert same(parameters(engine), dict(plain.named_parameters()))
    train(engine, 1)
    engine.destroy()


def _ranks(rank: int, world_size: int) -> tuple[list[str], list[int]]:
    _no_sync(rank, world_size)
    _deferred(rank, world_size)
    return _stages(rank, world_size), _loader(rank, world_size)


def test_on_two_ranks_stages_agree_no_sync_adds_up_data_is_divided_and_deferred_models_get_their_values() -> None:
    found = run_ranks(2, _ranks)
    assert [different for different, _ in found] == [[], []]
    assert sorted(number for _, numbers in found for number in numbers) == list(range(16))


_WIDE, _LAYERS = 512, 8


class _Live(TorchDispatchMode):
    """Watches the bytes of all storages that operations made and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type == "cpu":
            self._made = [ref for ref in self._made if ref() is not None] + [weakref.ref(out)]
            storages = [tensor.untyped_storage() for ref in self._made if (tensor := ref()) is not None]
            self.peak = max(self.peak, sum({one.data_ptr(): one.nbytes() for one in storages}.values()))
        return out


def _peak(rank: int, world_size: int) -> tuple[int, int, int]:
    """Largest live bytes while a deferred model is sharded; what the plan takes; one layer."""
    with zeroshard.Init():
        model = nn.Sequential(*(nn.Linear(_WIDE, _WIDE, bias=False) for _ in range(_LAYERS)))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    # Without an optimizer, whose state would hide a whole model that is there before it.
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero}
    with _Live() as live:
        engine, _, _, _ = zeroshard.initialize(model=model, config=config)
    total = state_bytes(engine.plan).total
    engine.destroy()
    return live.peak, total, _WIDE * _WIDE * 4


def test_sharding_a_deferred_model_takes_its_shards_and_one_tensor_at_a_time() -> None:
    for peak, planned, layer in run_ranks(2, _peak):
        assert planned <= peak <= planned + 1.1 * layer
