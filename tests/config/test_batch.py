"""train = micro x accumulation x world size, from any one or two of them."""

from __future__ import annotations

from typing import Any

import pytest

from zeroshard.config import BatchConfig, load_config
from zeroshard.errors import ConfigError

NAMES = {
    "train": "train_batch_size",
    "micro": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
}


def load(world_size: int, overrides: dict[str, Any] | None = None, **given: Any) -> BatchConfig:
    config = {NAMES[name]: value for name, value in given.items()}
    return load_config(config, world_size=world_size, overrides=overrides).batch


@pytest.mark.parametrize(
    ("world_size", "given", "expected"),
    [
        (8, {"train": 256, "accumulation": 16}, (256, 2, 16)),
        (4, {"train": 32}, (32, 8, 1)),
        (4, {"micro": 3}, (12, 3, 1)),
        (2, {"micro": 3, "accumulation": 5}, (30, 3, 5)),
        (2, {"train": 24, "micro": 3}, (24, 3, 4)),
        (2, {"train": 24, "micro": 3, "accumulation": 4}, (24, 3, 4)),
        (2, {"train": 24.0, "micro": "auto", "accumulation": "auto"}, (24, 12, 1)),
        (2, {"train": "auto", "micro": 3, "accumulation": 4}, (24, 3, 4)),
        (1, {"train": "auto", "micro": 1}, (1, 1, 1)),
    ],
)
def test_the_missing_numbers_are_derived(
    world_size: int, given: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    assert load(world_size, **given) == BatchConfig(*expected)


def test_a_size_over_ranks_that_read_the_same_batch_counts_each_sample_once() -> None:
    given = {NAMES["micro"]: 3, NAMES["accumulation"]: 5}
    for train in (120, 30):  # 2 data ranks of 4 ranks each
        config = load_config({**given, NAMES["train"]: train}, world_size=2, same_batch=4)
        assert config.batch == BatchConfig(30, 3, 5)
    with pytest.raises(ConfigError, match="says 60, but"):
        load_config({**given, NAMES["train"]: 60}, world_size=2, same_batch=4)


@pytest.mark.parametrize(
    ("world_size", "given", "words"),
    [
        (3, {"train": 256, "accumulation": 16}, ["256", "gradient_accumulation_steps 16", "3 ranks", "240 or 288"]),
        (4, {"train": 30}, ["30", "4 ranks", "28 or 32"]),
        (4, {"train": 3}, ["3 doesn't divide", "4 would"]),
        (2, {"train": 10, "micro": 3}, ["10", "train_micro_batch_size_per_gpu 3", "6 or 12"]),
        (2, {"train": 10, "micro": 3, "accumulation": 2}, ["says 10", "3", "2", "= 12", "(config)"]),
        (2, {}, ["no batch size is given", "train_batch_size"]),
        (2, {"accumulation": 4}, ["only gradient_accumulation_steps is given"]),
        (2, {"train": "auto", "micro": "auto"}, ["no batch size is given"]),
        (2, {"train": 0}, ["at least 1, not 0"]),
        (2, {"micro": True}, ["a whole number", "not true"]),
        (2, {"micro": "4"}, ["a whole number", 'not "4"']),
        (2, {"micro": 1.5}, ["a whole number", "not 1.5"]),
    ],
)
def test_what_cannot_be_resolved_names_the_numbers(world_size: int, given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(world_size, **given)
    (problem,) = caught.value.problems
    assert all(word in problem for word in words)


def test_a_contradiction_says_where_each_number_comes_from() -> None:
    text = '{"train_batch_size": 64,\n"train_micro_batch_size_per_gpu": "auto",\n"gradient_accumulation_steps": 4}'
    with pytest.raises(ConfigError) as caught:
        load_config(text, world_size=2, overrides={"train_micro_batch_size_per_gpu": 4})
    assert caught.value.problems == (
        "train_batch_size (JSON text line 1): says 64, but train_micro_batch_size_per_gpu 4 (override) x "
        "gradient_accumulation_steps 4 (JSON text line 3) x 2 ranks = 32; correct one of them, or leave one out",
    )


def test_a_number_that_differs_from_the_scripts_arguments_says_both() -> None:
    with pytest.raises(ConfigError) as caught:
        load(2, micro=4, overrides={"train_micro_batch_size_per_gpu": 8})
    assert "the config says 4 but the script's arguments say 8" in caught.value.problems[0]


def test_the_origin_of_a_derived_number_shows_how_it_was_derived() -> None:
    config = load_config({"train_batch_size": 256, "gradient_accumulation_steps": 16}, world_size=8)
    assert config.origins["train_micro_batch_size_per_gpu"] == "derived: 256 / (16 accumulation x 8 ranks)"
