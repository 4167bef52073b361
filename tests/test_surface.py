"""The engine's daily calls: batch sizes that change in mid-run, loaders, autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import zeroshard
from tests.support.distributed import run_ranks
from tests.test_initialize import CONFIG, build, loss_of, parameters, same, start, train
from zeroshard.config import load_config
from zeroshard.engine.batching import Batching, BatchSizes
from zeroshard.engine.loader import LoaderOptions, make_loader
from zeroshard.errors import ConfigError, UsageError, ZeroShardWarning
from zeroshard.plan.memory import state_bytes


def _steps(engine: Any, rank: int, accumulation: int, step: int) -> None:
    assert engine.gradient_accumulation_steps() == accumulation
    for micro in range(accumulation):
        assert engine.is_gradient_accumulation_boundary() == (micro == accumulation - 1)
        engine.backward(loss_of(engine, step, micro, rank))
        engine.step()
    assert engine.global_steps == step + 1


def _mid_run(rank: int, world: int) -> None:
    """1, 3, 2, then 1 micro-batches per step: as the plain loop over all of them, at every stage, in fp32 and bf16."""
    counts = [1, 3, 2, 1]
    model = build()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6, weight_decay=0)
    for step, count in enumerate(counts):
        for member in range(world):
            for micro in range(count):
                (loss_of(model, step, micro, member) / world / count).backward()
        plain.step()
        plain.zero_grad()
    expected = dict(model.named_parameters())
    for stage in range(4):
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        for bf16 in (False, True) if stage > 1 else (stage == 1,):
            engine, _ = start({**CONFIG, "zero_optimization": zero, "bf16": {"enabled": bf16}})
            assert engine.get_batch_info() == (4 * world, 4, 1)
            _steps(engine, rank, 1, 0)
            engine.set_train_batch_size(12 * world)
            assert engine.get_batch_info() == (12 * world, 4, 3)
            _steps(engine, rank, 3, 1)
            engine.set_gradient_accumulation_steps(2)
            assert engine.train_batch_size() == 8 * world
            _steps(engine, rank, 2, 2)
            engine.set_train_batch_size(4 * world)
            _steps(engine, rank, 1, 3)
            tolerance = 3e-2 if bf16 else 1e-6
            for name, value in parameters(engine).items():
                assert float((value - expected[name]).abs().max()) <= tolerance, (stage, bf16, name)
            born = start({**CONFIG, "zero_optimization": zero, "bf16": {"enabled": bf16}, **_TWO})[0]
            assert engine.plan == born.plan, "as the plan that accumulates from the start"
            assert state_bytes(engine.plan) == state_bytes(born.plan)
            engine.destroy()
            born.destroy()


_TWO = {"gradient_accumulation_steps": 2}


def test_the_accumulation_changes_in_mid_run_at_every_stage() -> None:
    run_ranks(2, _mid_run)


def test_a_change_amid_an_accumulation_or_to_what_does_not_divide_is_refused() -> None:
    engine, _ = start({**CONFIG, **_TWO})
    with pytest.raises(UsageError, match="train_batch_size 10 is no multiple of 4"):
        engine.set_train_batch_size(10)
    with pytest.raises(UsageError, match="train_micro_batch_size must be a whole number of at least 1, got 0"):
        engine.set_train_micro_batch_size(0)
    engine.backward(loss_of(engine, 0))
    engine.step()
    with pytest.raises(UsageError, match="within an accumulation"):
        engine.set_train_batch_size(4)
    engine.backward(loss_of(engine, 1))
    engine.step()
    engine.set_train_micro_batch_size(3)
    assert engine.get_batch_info() == (6, 3, 2)
    assert engine.train_micro_batch_size_per_gpu() == 3
    engine.destroy()


def test_the_boundary_is_counted_from_the_last_step_and_not_from_the_start() -> None:
    batching = Batching(BatchSizes(3, 1, 3), 1)
    assert [batching.count() for _ in range(6)] == [False, False, True] * 2
    batching.sizes = batching.with_accumulation(4)
    assert [batching.count() for _ in range(8)] == [False, False, False, True] * 2


def _samples(loader: Any) -> list[int]:
    return [int(value) for (part,) in loader for value in part]


def _loaders(rank: int, world: int) -> dict[str, list[list[int]]]:
    data = TensorDataset(torch.arange(11))
    config = {**CONFIG, "train_micro_batch_size_per_gpu": 2, "dataloader_drop_last": True}
    engine, _, loader, _ = zeroshard.initialize(model=build(), training_data=data, config=config)
    assert loader is not None
    found = {"dropped": [_samples(loader), _samples(loader)], "lengths": [[len(loader)]]}
    engine.destroy()
    engine, _, loader, _ = zeroshard.initialize(model=build(), training_data=data, config=CONFIG)
    assert loader is not None
    found["all"] = [_samples(loader)]
    evaluation = engine.deepspeed_io(data, batch_size=3, route="eval")
    found["evaluated"] = [_samples(evaluation), _samples(evaluation)]
    engine.destroy()
    return found


def test_each_rank_gets_its_part_and_each_epoch_its_order() -> None:
    first, second = run_ranks(2, _loaders)
    for epoch in (0, 1):
        seen = first["dropped"][epoch] + second["dropped"][epoch]
        assert len(set(seen)) == len(seen) == 8, "5 each, of which 2 full micro-batches"
    assert first["dropped"][0] != first["dropped"][1], "shuffled anew"
    assert first["lengths"] == [[2]]
    assert first["evaluated"] == [[0, 2, 4, 6, 8, 10]] * 2
    assert second["evaluated"] == [[1, 3, 5, 7, 9, 0]] * 2, "the first sample again, so that ranks have as many"
    assert set(first["all"][0] + second["all"][0]) == set(range(11))


def test_the_order_of_samples_is_the_seeds_alone() -> None:
    data = TensorDataset(torch.arange(20))
    orders = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        orders.append(_samples(make_loader(data, 4, LoaderOptions(seed=3))))
    assert orders[0] == orders[1] != sorted(orders[0])
    assert _samples(make_loader(data, 4, LoaderOptions(seed=4))) != orders[0]
    given = make_loader(data, 4, LoaderOptions(), sampler=torch.utils.data.SequentialSampler(data), collate_fn=list)
    assert [len(batch) for batch in given] == [4] * 5
    with pytest.raises(UsageError, match="route must be one of train, eval, predict, got 'test'"):
        make_loader(data, 4, LoaderOptions(), route="test")


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


def _streams(rank: int, world: int) -> list[int]:
    with pytest.warns(ZeroShardWarning, match="every rank reads the whole stream"):
        loader = make_loader(_Stream(), 3, LoaderOptions())
    return [int(value) for part in loader for value in part]


def test_an_iterable_dataset_is_read_by_every_rank_with_a_warning() -> None:
    assert run_ranks(2, _streams) == [[0, 1, 2]] * 2


def _autocast(rank: int, world: int) -> None:
    """As the plain loop under torch.autocast: parameters stay fp32, every stage gives the same."""
    model = build()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6, weight_decay=0)
    for step in range(3):
        for member in range(world):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, step, 0, member)
            (loss / world).backward()
        plain.step()
        plain.zero_grad()
    results = []
    for stage in range(4):
        config = {**CONFIG, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
        engine, _ = start({**config, "torch_autocast": {"enabled": True}})
        for step in range(3):
            out = engine(torch.ones(2, 6))
            assert out.dtype is torch.bfloat16
            engine.backward(loss_of(engine, step, 0, rank))
            engine.step()
        assert all(parameter.dtype is torch.float32 for parameter in engine.parameters())
        results.append(parameters(engine))
        engine.destroy()
    for name, value in model.named_parameters():
        assert float((results[0][name] - value).abs().max()) <= 2e-3, name
    assert all(same(results[0], other) for other in results[1:])


def test_autocast_trains_as_the_plain_loop_under_torch_autocast() -> None:
    run_ranks(2, _autocast)


def test_autocast_in_fp16_has_the_loss_scale_of_fp16() -> None:
    fp16 = {"initial_scale_power": 8, "hysteresis": 1}
    engine, _ = start({**CONFIG, "torch_autocast": {"enabled": True, "dtype": "torch.float16"}, "fp16": fp16})
    assert engine.loss_scale == 256.0
    train(engine, 1)
    assert engine.was_step_applied()
    engine.backward(loss_of(engine, 1) * float("inf"))
    engine.step()
    assert not engine.was_step_applied()
    assert engine.loss_scale == 128.0
    engine.destroy()


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"bf16": {"enabled": True}}, "torch_autocast.enabled (config): is true, and so is bf16.enabled"),
        ({"torch_autocast": {"enabled": True, "dtype": "fp32"}}, 'must be "bf16" or "fp16", not "fp32"'),
    ],
)
def test_autocast_beside_another_precision_is_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 1, "torch_autocast": {"enabled": True}, **section}, world_size=1)
    assert words in str(caught.value)


def test_the_cycled_momentum_is_told() -> None:
    engine, _ = start()
    assert engine.get_mom() == [(0.9, 0.999)]
    assert isinstance(engine.module, nn.Module)
    engine.destroy()


def test_the_momentum_of_an_optimizer_without_any_is_zero() -> None:
    """`get_mom()` is [0.0] for Adagrad under DeepSpeed 0.19.8, too."""
    engine, _ = start({**CONFIG, "optimizer": {"type": "Adagrad"}})
    assert engine.get_mom() == [0.0]
    engine.destroy()
