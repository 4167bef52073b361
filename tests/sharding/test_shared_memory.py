"""What shares memory with a parameter is refused before anything is changed; what only lies beside it is trained."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.errors import PlanError
from zeroshard.sharding.sharded_init import ShardedInit
from zeroshard.sharding.shared_memory import refuse_shared_memory, share_bytes, span_of

ROWS, WIDTH = 32, 16
CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


class _Top(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class _Two(nn.Module):
    """An embedding, and a head below another module that each case gives its weight."""

    def __init__(self, alias: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.emb = nn.Embedding(ROWS, WIDTH)
        self.top = _Top(alias(self.emb.weight.data))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.emb(x).square().mean() + self.top.weight.square().mean()


ALIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the whole": lambda w: w,
    "rows": lambda w: w[3:7],
    "columns": lambda w: w[:, 2:5],
    "the transpose": lambda w: w.t(),
    "flat": lambda w: w.view(-1),
    "every second row": lambda w: w[1::2],
    "every second column": lambda w: w[:, ::2],
    "the diagonal": lambda w: w.diagonal(),
    "one element": lambda w: w[-1, -1:],
    "another dtype": lambda w: w.view(torch.bfloat16),
}


@pytest.mark.parametrize("case", ALIASES)
def test_two_parameters_over_one_memory_are_refused_by_both_names_with_the_cure(case: str) -> None:
    model = _Two(ALIASES[case])
    with pytest.raises(PlanError) as caught:
        refuse_shared_memory(model)
    said = str(caught.value)
    assert "'emb.weight'" in said
    assert "'top.weight'" in said
    assert "top.weight = emb.weight" in said or "emb.weight = top.weight" in said
    assert "clone()" in said


def test_the_same_is_refused_before_a_model_on_the_meta_device_has_memory() -> None:
    with torch.device("meta"):
        model = _Two(lambda w: w.t())
    with pytest.raises(PlanError, match=r"'emb.weight' and 'top.weight'"):
        refuse_shared_memory(model)
    refuse_shared_memory(nn.Linear(4, 4, device="meta"))


def test_a_deferred_model_is_refused_when_it_is_sharded() -> None:
    with zeroshard.Init(device="cpu"):
        model = _Two(lambda w: w)
    with pytest.raises(PlanError, match=r"'emb.weight' and 'top.weight'"):
        zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=3)


_COPIES: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "attribute": (lambda weight: weight.t(), "copy"),
    "in a list": (lambda weight: [torch.zeros(1), weight[2:]], r"copy\[1\]"),
    "in a dict of lists": (lambda weight: {"old": [weight.detach()]}, r"copy\['old'\]\[0\]"),
    "NumPy": (lambda weight: weight.detach().numpy(), "copy"),
    "NumPy, flipped": (lambda weight: weight.detach().numpy()[::-1, 1:], "copy"),
    "NumPy, in a list": (lambda weight: [weight.detach().numpy()[3]], r"copy\[0\]"),
}


@pytest.mark.parametrize("how", _COPIES)
def test_an_attribute_over_a_parameter_is_refused(how: str) -> None:
    make, name = _COPIES[how]
    model = nn.Sequential(linear := nn.Linear(4, 4))
    linear.copy = make(linear.weight)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    with pytest.raises(PlanError, match=rf"attribute \S0.{name}\S shares memory with parameter '0.weight'.*clone\("):
        refuse_shared_memory(model)


def test_a_buffer_over_a_parameter_is_refused() -> None:
    model = nn.Sequential(linear := nn.Linear(4, 4))
    linear.register_buffer("copy", linear.weight.detach()[1:])
    with pytest.raises(PlanError, match=r"buffer '0.copy' shares memory with parameter '0.weight'.*clone\(\)"):
        refuse_shared_memory(model)


def _side_by_side() -> dict[str, nn.Module]:
    flat = torch.randn(3 * WIDTH * WIDTH)
    fused = nn.ParameterList(nn.Parameter(part.view(WIDTH, WIDTH)) for part in flat.chunk(3))
    matrix = torch.randn(WIDTH, 3 * WIDTH)
    columns = nn.ParameterList(nn.Parameter(part) for part in matrix.chunk(3, dim=1))
    comb = nn.ParameterList(nn.Parameter(matrix[:, first::3]) for first in range(3))
    heads = torch.randn(4, 3, 2, WIDTH)
    interleaved = nn.ParameterList(nn.Parameter(heads[:, number]) for number in range(3))
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    below = nn.Linear(4, 4)
    frozen = nn.Sequential(below, _Top(below.weight.data)).requires_grad_(False)
    frozen.register_buffer("table", below.weight.data)
    empty = nn.ParameterList(nn.Parameter(flat[:0]) for _ in range(2))
    spectral = nn.utils.spectral_norm(nn.Linear(4, 4))
    listed = nn.Linear(4, 4)
    listed.kept = [listed.weight, listed.weight.detach().clone(), listed.weight.detach().numpy().copy()]
    lstm = nn.LSTM(4, 4, num_layers=2)
    return {
        "slices of a flat buffer": fused,
        "columns": columns,
        "every third column": comb,
        "interleaved heads": interleaved,
        "tied": tied,
        "frozen": frozen,
        "no elements": empty,
        "torch's spectral norm": spectral,
        "LSTM": lstm,
        "the parameter itself and copies in a list": listed,
    }


@pytest.mark.parametrize("case", _side_by_side())
def test_what_only_lies_beside_each_other_is_fine(case: str) -> None:
    refuse_shared_memory(_side_by_side()[case])


def test_overlap_is_told_as_by_comparing_the_elements_of_random_views() -> None:
    choose = random.Random(0)
    answers = set[bool]()
    for _ in range(600):
        spans, bytes_of = [], []
        for _ in range(2):
            dims = choose.randint(1, 3)
            sizes = tuple(choose.randint(1, 4) for _ in range(dims))
            strides = tuple(choose.choice((1, 2, 3, 4, 6, 8, 12)) for _ in range(dims))
            width, start = choose.choice((1, 2)), choose.randint(0, 12)
            spans.append(span_of(start, sizes, strides, width))
            offsets = [
                sum(i * s for i, s in zip(at, strides, strict=True)) for at in itertools.product(*map(range, sizes))
            ]
            bytes_of.append({start + offset + byte for offset in offsets for byte in range(width)})
        expected = not bytes_of[0].isdisjoint(bytes_of[1])
        assert share_bytes(*spans) is expected, spans
        answers.add(expected)
    assert answers == {True, False}


def test_thousands_of_interleaved_parameters_are_compared_without_reading_them() -> None:
    with torch.device("meta"):
        table = torch.empty(1_000_000, 64)
        model = nn.ParameterList([nn.Parameter(table[:, column]) for column in range(64)])
        model.extend(nn.Parameter(part) for part in torch.empty(4000, 1000).unbind())
    refuse_shared_memory(model)


def _refused(rank: int, world: int) -> None:
    for stage in range(4):
        model = _Two(lambda w: w)
        before = {name: (parameter, parameter.data_ptr()) for name, parameter in model.named_parameters()}
        for attempt in (
            lambda: zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=stage),  # noqa: B023
            lambda: zeroshard.initialize(model=model, config={**CONFIG, "zero_optimization": {"stage": stage}}),  # noqa: B023
        ):
            with pytest.raises(PlanError, match=r"'emb.weight' and 'top.weight'"):
                attempt()
        assert {name: (p, p.data_ptr()) for name, p in model.named_parameters()} == before


def test_all_stages_refuse_it_and_leave_the_model_as_it_was() -> None:
    run_ranks(2, _refused)


def _columns_train(rank: int, world: int) -> None:
    for stage in range(4):
        torch.manual_seed(0)
        matrix = torch.randn(WIDTH, 2 * WIDTH)
        models = []
        for _ in range(2):
            fused = matrix.clone()
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
            model[0].weight, model[1].weight = (nn.Parameter(part) for part in fused.chunk(2, dim=1))
            models.append(model)
        plain, model = models
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        model, sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=stage)
        x = torch.randn(4, WIDTH)
        for _ in range(2):
            for each, step in ((plain, optimizer), (model, sharded)):
                each(x).square().mean().backward()
                step.step()
                step.zero_grad()
        with torch.no_grad():
            assert torch.equal(plain(x), model(x))


def test_parameters_that_are_columns_of_one_matrix_train_as_in_torch() -> None:
    run_ranks(2, _columns_train)


def _early(rank: int, world: int) -> None:
    config = {**CONFIG, "zero_optimization": {"stage": 3}}
    with pytest.raises(PlanError, match=r"'emb.weight' and 'top.weight'"), ShardedInit(device="cpu"):
        _Two(lambda w: w)
    with ShardedInit(device="cpu"):
        model = _Two(lambda w: w.clone())
    zeroshard.initialize(model=model, config=config)


def test_an_init_that_shards_refuses_it_when_it_ends() -> None:
    run_ranks(2, _early)
