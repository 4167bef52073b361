"""Which layers a part of a pipeline has, and where ranks are in a topology."""

from __future__ import annotations

import itertools
import random

import pytest

from zeroshard.errors import UsageError
from zeroshard.pipeline.partition import partition, weights_of
from zeroshard.pipeline.topology import PipeDataParallelTopology, ProcessTopology


def _heaviest(weights: list[int], borders: tuple[int, ...] | list[int]) -> int:
    return max(sum(weights[low:high]) for low, high in itertools.pairwise(borders))


def test_no_other_partition_has_a_lighter_heaviest_part() -> None:
    chance = random.Random(0)
    for _ in range(60):
        weights = [chance.choice([0, 1, 2, 5, 40]) for _ in range(chance.randint(3, 8))]
        parts = chance.randint(1, 3)
        borders = partition(weights, parts)
        assert borders[0] == 0
        assert borders[-1] == len(weights)
        assert all(low < high for low, high in itertools.pairwise(borders))
        inner = itertools.combinations(range(1, len(weights)), parts - 1)
        assert _heaviest(weights, borders) == min(_heaviest(weights, (0, *cut, len(weights))) for cut in inner)


def test_equal_layers_are_spread_evenly() -> None:
    assert partition([1] * 9, 4) == [0, 2, 4, 6, 9] or sorted(
        high - low for low, high in itertools.pairwise(partition([1] * 9, 4))
    ) == [2, 2, 2, 3]
    assert partition([1] * 100, 5) == [0, 20, 40, 60, 80, 100]


def test_methods_weigh_layers() -> None:
    names = ["Embedding", "Block", "Block", "Head"]
    assert weights_of("uniform", names, [9, 1, 1, 9]) == [1, 1, 1, 1]
    assert weights_of("parameters", names, [9, 1, 1, 9]) == [9, 1, 1, 9]
    assert weights_of("type:block", names, [9, 1, 1, 9]) == [0, 1, 1, 0]
    with pytest.raises(
        UsageError, match=r"'type:Layer': no layer's class matches; the layers are Embedding, Block, Head"
    ):
        weights_of("type:Layer", names, [0] * 4)
    with pytest.raises(UsageError, match=r"partition_method 'best': there are uniform, parameters, type:REGEX"):
        weights_of("best", names, [0] * 4)
    with pytest.raises(UsageError, match=r"a pipeline of 3 layers can't have 4 parts"):
        partition([1, 1, 1], 4)


def test_a_topology_numbers_ranks_row_by_row() -> None:
    topology = ProcessTopology(["pipe", "data", "model"], [2, 2, 2])
    assert topology.get_rank(pipe=1, data=0, model=1) == 5
    assert topology.get_coord(5) == topology.ProcessCoord(pipe=1, data=0, model=1)
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_list("model", 1) == [1, 3, 5, 7]
    assert topology.filter_match(pipe=0, model=0) == [0, 2]
    assert topology.get_rank_repr(5) == "model_01"
    assert topology.get_dim("expert") == 0
    assert str(PipeDataParallelTopology(2, 4).mesh()) == "pp 2 x dp_replicate 1 x dp_shard 4"
    assert str(ProcessTopology(["data", "pipe"], [4, 2]).mesh()) == "dp_replicate 1 x dp_shard 4 x pp 2"
    with pytest.raises(UsageError, match=r"name each of \['pipe', 'data', 'model'\]"):
        topology.get_rank(pipe=1)
    with pytest.raises(UsageError, match=r"a pipeline's topology has the axes"):
        ProcessTopology(["data"], [2]).mesh()
