"""A run that goes on reads the sample that would have come next, whatever the number of ranks."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.engine.engine import Engine
from zeroshard.engine.loader import LoaderOptions, Position, TrainLoader, make_loader
from zeroshard.errors import ZeroShardWarning

SAMPLES = 44
Steps = list[list[int]]


class Reader:
    """An engine and its loader, read for ever; remembers which samples each step was made of."""

    def __init__(self, dropout: float = 0.0) -> None:
        torch.manual_seed(3)
        data = TensorDataset(torch.arange(SAMPLES))
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
        config = {
            "train_batch_size": 8,  # does not divide the epoch: steps go across its end
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 2},
        }
        self.engine: Engine = zeroshard.initialize(model=model, config=config)[0]
        self.loader = self.engine.deepspeed_io(data)
        self.steps: Steps = []
        self._step: list[int] = []
        self._batches = self._all()

    def _all(self) -> Any:
        while True:
            yield from self.loader

    def micro_batch(self) -> None:
        (numbers,) = next(self._batches)
        self._step += numbers.tolist()
        x = torch.stack([torch.sin(numbers * factor) for factor in (1.0, 2.0, 3.0, 5.0)], dim=1)
        self.engine.backward(self.engine(x).square().mean())
        before = self.engine.global_steps
        self.engine.step()
        if self.engine.global_steps > before:
            self.steps.append(self._step)
            self._step = []

    def train(self, steps: int) -> None:
        while self.engine.global_steps < steps:
            self.micro_batch()

    def weights(self) -> list[torch.Tensor]:
        return [value.clone() for _, value in zeroshard.iterate_full_parameters(self.engine.module)]


def _run(rank: int, world: int, directory: str, load: str | None, save: str | None) -> tuple[Steps, list[Any]]:
    """Train from `load` (or the start) to step 13; on the way, amid the accumulation after step 3 or 8, save."""
    reader = Reader()
    if load is not None:
        reader.engine.load_checkpoint(directory, load)
    if save is not None:
        reader.train(reader.engine.global_steps + 3)
        reader.micro_batch()
        reader.engine.save_checkpoint(directory, save)
    reader.train(13)
    weights = [value.tolist() for value in reader.weights()]
    reader.engine.destroy()
    return reader.steps, weights


def _together(results: list[tuple[Steps, list[Any]]]) -> Steps:
    """The samples of each step on all ranks."""
    return [sorted(chain(*parts)) for parts in zip(*(steps for steps, _ in results), strict=True)]


def _bit_equal(rank: int, world: int, directory: str) -> bool:
    """With dropout: a run that was not interrupted and one that was."""
    first = Reader(dropout=0.2)
    first.train(3)
    first.engine.save_checkpoint(directory, "same")
    first.train(7)
    second = Reader(dropout=0.2)
    second.engine.load_checkpoint(directory, "same")
    second.train(7)
    same = all(torch.equal(a, b) for a, b in zip(first.weights(), second.weights(), strict=True))
    assert second.steps == first.steps[3:]
    first.engine.destroy()
    second.engine.destroy()
    return same


def _on_two(rank: int, world: int, directory: str) -> tuple[bool, tuple[Steps, list[Any]]]:
    return _bit_equal(rank, world, directory), _run(rank, world, directory, None, "two")


def test_a_run_reads_on_where_it_was_at_any_number_of_ranks_amid_an_epoch_and_a_step(tmp_path: Any) -> None:
    results = run_ranks(2, _on_two, str(tmp_path))
    assert [same for same, _ in results] == [True, True]
    whole = [result for _, result in results]
    expected = _together(whole)
    assert len(expected) == 13
    read = Counter(chain(*expected))
    assert len(read) == SAMPLES
    assert min(read.values()) == 2, "two epochs, and a part of the third"

    on_one = run_ranks(1, _run, str(tmp_path), "two", "one")
    assert _together(on_one) == expected[3:], "from two ranks to one"
    on_two = run_ranks(2, _run, str(tmp_path), "one", None)
    assert _together(on_two) == expected[6:], "and back"
    for _, weights in (*on_one, *on_two):
        for value, other in zip(weights, whole[0][1], strict=True):
            torch.testing.assert_close(torch.tensor(value), torch.tensor(other), rtol=1e-5, atol=1e-6)


def _loader(drop_last: bool = False) -> TrainLoader:
    loader = make_loader(TensorDataset(torch.arange(10)), 4, LoaderOptions(drop_last=drop_last))
    assert isinstance(loader, TrainLoader)
    return loader


def _epoch(loader: TrainLoader) -> list[int]:
    return [int(value) for (batch,) in loader for value in batch]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_position_at_the_end_of_an_epoch_is_the_beginning_of_the_next(drop_last: bool) -> None:
    calm = _loader(drop_last)
    epochs = [_epoch(calm), _epoch(calm)]
    batches = len(calm)
    for read in range(1, batches + 1):
        first, second = _loader(drop_last), _loader(drop_last)
        for _, _batch in zip(range(read), first, strict=False):
            pass
        second.continue_at(first.position)
        rest = _epoch(second)
        assert rest == (epochs[0][4 * read :] if read < batches else epochs[1])
    assert _loader(drop_last).position == Position(0, 0)


def test_set_epoch_keeps_the_place_in_the_epoch_that_was_begun_and_no_other() -> None:
    epochs = _loader()
    first, second = _epoch(epochs), _epoch(epochs)
    for epoch, expected in ((0, first[4:]), (1, second)):
        loader = _loader()
        loader.continue_at(Position(0, 4))
        assert loader.sampler is not None
        loader.sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
        assert _epoch(loader) == expected


def test_other_data_is_read_from_its_beginning_with_a_warning(tmp_path: Any) -> None:
    first = Reader()
    first.train(2)
    first.engine.save_checkpoint(tmp_path)
    first.engine.destroy()
    second = Reader()
    second.engine.destroy()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 1))
    config = {"train_batch_size": 6, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
    engine, _, loader, _ = zeroshard.initialize(model=model, config=config, training_data=TensorDataset(torch.ones(9)))
    assert isinstance(loader, TrainLoader)
    with (
        pytest.warns(ZeroShardWarning, match="within a dataset of 44 samples, this one has 9"),
        pytest.warns(ZeroShardWarning, match="trained with 8 samples per step, this run takes 6"),
    ):
        engine.load_checkpoint(tmp_path)
    assert loader.position == Position(0, 0)
    engine.destroy()
