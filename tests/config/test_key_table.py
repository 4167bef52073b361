"""Every DeepSpeed key is known, and each of its statuses does what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zeroshard.config import load_config
from zeroshard.config.fields import LARGEST
from zeroshard.config.keys import Key, Node, Status, key_table, kind_matches
from zeroshard.config.models import ObeyedSections, Section
from zeroshard.config.resolve import resolve
from zeroshard.errors import ConfigError

KEYS = sorted(key_table().keys.values(), key=lambda key: key.path)
UPSTREAM = Path(__file__).with_name("deepspeed_keys.txt").read_text().split()
BATCH = {"train_micro_batch_size_per_gpu": 2}


def nested(path: str, value: Any) -> dict[str, Any]:
    *sections, name = path.replace("*", "anything").split(".")
    result: dict[str, Any] = {name: value}
    for section in reversed(sections):
        result = {section: result}
    return result


def load(path: str, value: Any) -> Any:
    config = nested(path, value)
    batch = {} if path in ("train_batch_size", "train_micro_batch_size_per_gpu") else BATCH
    return resolve({**batch, **config}, world_size=2)


def with_status(*statuses: Status) -> list[Key]:
    return [key for key in KEYS if key.status in statuses]


def ids(keys: list[Key]) -> list[str]:
    return [key.path for key in keys]


@pytest.mark.parametrize("path", UPSTREAM)
def test_every_upstream_key_is_in_the_table(path: str) -> None:
    node: Node | None = key_table().root
    for name in path.split("."):
        node = node.child(name) if node is not None else None
    assert node is not None


@pytest.mark.parametrize("key", KEYS, ids=ids(KEYS))
def test_a_row_is_complete(key: Key) -> None:
    assert key.note, "every row says what the key does, why it has no effect or what is missing"
    assert key.default is None or kind_matches(key.kind, key.default)
    assert all(kind_matches(key.kind, value) for value in key.inert)
    if key.status is Status.DEPRECATED:
        assert key.note in key_table().keys


def flattened(section: Section, prefix: str = "") -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in section:
        key = prefix + (type(section).model_fields[name].alias or name)
        fields.update(flattened(value, f"{key}.") if isinstance(value, Section) else {key: value})
    return {path: list(value) if isinstance(value, tuple) else value for path, value in fields.items()}


def test_the_models_hold_the_obeyed_keys_and_their_defaults_and_no_others() -> None:
    fields = flattened(ObeyedSections())
    table = {
        key.path: key.default
        for key in with_status(Status.OBEYED)
        if not key.path.startswith(("optimizer.", "scheduler."))
    }
    assert table == fields
    assert table["zero_optimization.model_persistence_threshold"] == LARGEST


@pytest.mark.parametrize("key", with_status(Status.INERT_ONLY), ids=lambda key: key.path)
def test_a_key_not_built_yet_passes_at_its_inert_values(key: Key) -> None:
    for value in [*key.inert, None]:
        assert load(key.path, value)


_ASKING: dict[str, Any] = {"bool": True, "int": 7, "number": 0.5, "str": "debug", "dict": {"x": 1}, "section": {}}


def asking_value(key: Key) -> Any:
    """A value that asks for the feature."""
    if key.kind == "bool":
        return not key.inert[0]
    if key.kind.startswith('"'):
        return next(v.strip('"') for v in key.kind.split("|") if v.strip('"') not in key.inert)
    return _ASKING[key.kind]


@pytest.mark.parametrize("key", with_status(Status.INERT_ONLY), ids=lambda key: key.path)
def test_a_key_not_built_yet_is_refused_by_name_at_any_other_value(key: Key) -> None:
    with pytest.raises(ConfigError) as caught:
        load(key.path, asking_value(key))
    (problem,) = caught.value.problems
    assert problem.startswith(key.path.replace("*", "anything"))
    assert "not built yet" in problem
    assert "unknown" not in problem


@pytest.mark.parametrize("key", with_status(Status.REMOVED), ids=lambda key: key.path)
def test_a_removed_key_is_refused_saying_so_unless_it_is_off(key: Key) -> None:
    for value in [*key.inert, None]:
        assert load(key.path, value)
    with pytest.raises(ConfigError, match="will not be built") as caught:
        load(key.path, asking_value(key))
    assert caught.value.problems[0].startswith(key.path)


def is_on_by_presence(key: Key) -> bool:
    """Whether the section of a key asks for a feature by being there."""
    return key.path.startswith(("weight_quantization.", "sparse_attention.", "zero_optimization.zenflow."))


ALONE = [key for key in with_status(Status.ACCEPTED) if not is_on_by_presence(key)]


@pytest.mark.parametrize("key", ALONE, ids=ids(ALONE))
def test_an_accepted_key_passes_and_its_reason_is_shown(key: Key) -> None:
    value = {"any": 1, "list": [], "dict": {}, "str": "x", "dtype": "bf16"}.get(key.kind, key.default)
    if value is None:
        value = {"bool": True, "int": 1, "number": 1.0}.get(key.kind, "symmetric")
        value = value if kind_matches(key.kind, value) else key.kind.split("|")[0].strip('"')
    settings = {s.path: s for s in load(key.path, value).settings}
    assert settings[key.path.replace("*", "anything")].note == key.note


@pytest.mark.parametrize(
    ("path", "value", "wanted"),
    [
        ("zero_optimization.contiguous_gradients", "true", "true or false"),
        ("zero_optimization.reduce_bucket_size", 0.5, "a whole number"),
        ("zero_optimization.leaf_module.names", 5, "a string or a list"),
        ("tensorboard.output_path", 3, "a string"),
        ("zero_optimization.offload_param.device", "disk", '"none" or "cpu" or "nvme"'),
    ],
)
def test_a_key_without_effect_still_has_its_type_checked(path: str, value: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"must be {wanted}"):
        load(path, value)


def test_a_section_with_a_switch_that_is_off_is_accepted_whatever_else_it_holds() -> None:
    config = {
        **BATCH,
        "tensorboard": {"enabled": False, "output_path": "logs", "job_name": "x"},
        "weight_quantization": {"enabled": False, "num_bits": 4},
        "amp": {"enabled": False, "opt_level": "O2"},
        "zero_optimization": {"offload_optimizer": {"device": "none", "pin_memory": True, "nvme_path": "/nvme"}},
    }
    assert load_config(config, world_size=1).optimizer is None


def test_the_data_parallel_size_may_only_be_the_world_size() -> None:
    load_config({**BATCH, "data_parallel_size": 4}, world_size=4)
    with pytest.raises(ConfigError, match="data_parallel_size"):
        load_config({**BATCH, "data_parallel_size": 2}, world_size=4)
