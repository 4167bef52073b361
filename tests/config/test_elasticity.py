"""One batch for many numbers of ranks, and every other number refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.config import load_config
from zeroshard.config.elastic_config import elastic_sizes
from zeroshard.config.elasticity import ElasticRange, elastic_batch
from zeroshard.errors import ConfigError


def _config(**changes: Any) -> dict[str, Any]:
    section = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4], "max_gpus": 16, **changes}
    return {"elasticity": section}


def test_the_published_example_has_its_published_batch_and_numbers_of_ranks() -> None:
    found = elastic_batch(ElasticRange(10000, (8, 12, 16, 17), 32, 1500))
    assert found is not None
    assert (found.train, len(found.sizes)) == (9792, 23)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 3000),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(1, 20),
    st.integers(1, 500),
    st.integers(1, 8),
    st.booleans(),
)
def test_every_allowed_number_of_ranks_has_the_same_batch(
    most: int, micro: list[int], low: int, high: int, nodes: int, larger: bool
) -> None:
    found = elastic_batch(ElasticRange(most, tuple(micro), low, high, nodes, larger))
    if found is None:
        return
    assert found.train <= most
    for size in found.sizes:
        assert low <= size <= high
        assert size % nodes == 0
        assert found.micro_batch(size) in micro
        assert found.train % (size * found.micro_batch(size)) == 0


def test_the_batch_stays_when_ranks_are_lost() -> None:
    sizes = elastic_sizes(_config())
    batches = {ranks: load_config(_config(), world_size=ranks).batch for ranks in sizes}
    assert len({batch.train for batch in batches.values()}) == 1
    assert all(batch.train == batch.micro * batch.accumulation * ranks for ranks, batch in batches.items())
    assert {1, 2, 3, 4} <= set(sizes)


def test_numbers_of_ranks_are_whole_nodes_in_version_0_2_only() -> None:
    assert all(size % 4 == 0 for size in elastic_sizes(_config(num_gpus_per_node=4)))
    assert 1 in elastic_sizes(_config(num_gpus_per_node=4, version=0.1))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (_config(min_gpus=17), "elasticity: allows no batch"),
        (_config(max_train_batch_size=1), "elasticity: allows no batch"),
        ({**_config(), "train_batch_size": 32}, "train_batch_size .*: is 32, but elasticity.enabled is true"),
        (_config(micro_batch_sizes=[]), "elasticity.micro_batch_sizes"),
        (_config(micro_batch_sizes=[0]), "elasticity.micro_batch_sizes"),
        (_config(version=0.3), "elasticity.version .*0.1 or 0.2"),
        (_config(model_parallel_size=2), "elasticity.model_parallel_size .*not built yet"),
    ],
)
def test_what_elasticity_can_not_give_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(config, world_size=2)


def test_a_number_of_ranks_that_does_not_fit_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"elasticity: does not allow 7 ranks; its batch of 48 allows .*6, 8"):
        load_config(_config(), world_size=7)
    with pytest.raises(ConfigError, match=r"elasticity.enabled is not true"):
        elastic_sizes({"train_batch_size": 4})


def test_a_batch_that_is_given_too_may_be_ignored() -> None:
    config = {**_config(ignore_non_elastic_batch_info=True), "train_batch_size": 32}
    assert load_config(config, world_size=2).batch.train == 48
