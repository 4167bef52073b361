"""A valid config with anything done to it ends in a config or in one ConfigError, never in another exception."""

from __future__ import annotations

import copy
import json
import warnings
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.config.test_auto import TRAINER
from tests.config.test_published_configs import FP16_OFFLOAD, PRETRAIN_13B, PRETRAIN_175B
from tests.support.edits import put, sections_of
from zeroshard.config import Config, load_config
from zeroshard.config.keys import key_table
from zeroshard.config.resolve import resolve
from zeroshard.errors import ConfigError

VALID = [PRETRAIN_13B, FP16_OFFLOAD, PRETRAIN_175B, TRAINER]
PATHS = sorted(key_table().keys) + sorted(alias for key in key_table().keys.values() for alias in key.aliases)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["auto", "Adam", "WarmupDecayLR", "cosine", "cpu", "bf16", 10**400, 2**63, 5e8, 1e400, "\ud800"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
names = st.one_of(st.text(max_size=10), st.sampled_from(sorted({path.rsplit(".", 1)[-1] for path in PATHS})))


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    config = copy.deepcopy(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(0, 4))):
        section = draw(st.sampled_from(sections_of(config)))
        kind = draw(st.sampled_from(["value", "name", "drop", "known"]))
        if kind == "known":
            put(config, draw(st.sampled_from(PATHS)), draw(values))
        elif kind == "name" or not section:
            section[draw(names)] = draw(values)
        elif kind == "value":
            section[draw(st.sampled_from(sorted(section)))] = draw(values)
        else:
            del section[draw(st.sampled_from(sorted(section)))]
    return config


def load(source: Any, world_size: int, overrides: dict[str, Any] | None = None) -> Config | None:
    """The config, or None after one well-formed ConfigError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config, problems = None, None
        try:
            config = load_config(source, world_size=world_size, overrides=overrides)
        except ConfigError as error:
            problems = error.problems
    if config is None:
        assert problems
        assert all(problem.strip() and len(problem) < 2000 for problem in problems)
        return None
    assert config.batch.train == config.batch.micro * config.batch.accumulation * world_size
    return config


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated(), st.sampled_from([1, 2, 8]), st.sampled_from([None, {"bf16.enabled": True, "train_batch_size": 64}]))
def test_a_mutated_dict_ends_in_a_config_or_in_one_error(
    source: dict[str, Any], world_size: int, overrides: dict[str, Any] | None
) -> None:
    config = load(source, world_size, overrides)
    if config is not None:
        table = resolve(source, world_size=world_size, overrides=overrides).settings
        json.dumps([setting.value for setting in table])
        assert {setting.path for setting in table} <= set(config.origins)


@settings(max_examples=200, deadline=None)
@given(mutated(), st.data())
def test_mutated_text_ends_in_a_config_or_in_one_error(source: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(source, indent=1)
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 4)))
        text = text[:start] + data.draw(st.text('{}[]",:/*#0123eE+-.\\ntrue \n', max_size=4)) + text[end:]
    load("\n" + text, 2)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(PATHS) | names, values, max_size=4))
def test_any_overrides_end_in_a_config_or_in_one_error(overrides: dict[str, Any]) -> None:
    load(TRAINER, 2, overrides)


@settings(max_examples=100, deadline=None)
@given(mutated())
def test_a_dict_and_its_text_are_the_same_config(source: dict[str, Any]) -> None:
    try:
        text = json.dumps(source)
    except (TypeError, ValueError):
        return
    from_dict, from_text = load(source, 2), load(text, 2)
    if from_dict is not None and from_text is not None:
        assert repr(from_dict).split("origins=")[0] == repr(from_text).split("origins=")[0]
    else:
        assert from_dict is None
        assert from_text is None
