"""The JSON Schema takes the configs that zeroshard takes, and underlines mistyped keys and kinds."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.config.test_mutations import VALID
from zeroshard.config import load_config
from zeroshard.config.cli import app
from zeroshard.config.keys import Status, key_table
from zeroshard.config.schema import json_schema
from zeroshard.errors import ConfigError

SCHEMA = json_schema()
KINDS: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
}


def _is(kind: str, value: Any) -> bool:
    if kind == "integer":
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value)
    return isinstance(value, KINDS[kind]) and not (kind == "number" and isinstance(value, bool))


def faults(schema: Any, value: Any, path: str = "") -> list[str]:
    """The part of JSON Schema that ours uses, word by word from its specification."""
    if schema is False:
        return [path]
    found: list[str] = []
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        found += [] if any(_is(kind, value) for kind in kinds) else [path]
    if "anyOf" in schema and all(faults(choice, value) for choice in schema["anyOf"]):
        found.append(path)
    if "const" in schema and (value != schema["const"] or isinstance(value, bool) != isinstance(schema["const"], bool)):
        found.append(path)
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        found.append(path)
    if isinstance(value, dict):
        found += [f"{path}.{name}" for name in schema.get("required", ()) if name not in value]
        for name, inner in value.items():
            rule = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
            found += faults(rule, inner, f"{path}.{name}")
    for part in schema.get("allOf", ()):
        if not faults(part["if"], value):
            found += faults(part["then"], value, path)
    return found


@pytest.mark.parametrize("config", VALID, ids=range(len(VALID)))
def test_a_published_config_has_faults_only_where_zeroshard_refuses_it(config: dict[str, Any]) -> None:
    try:
        load_config(config, world_size=64)
        problems = ""
    except ConfigError as error:
        problems = str(error)
    for fault in faults(SCHEMA, config):
        assert fault[1:] in problems


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"zero_optimisation": {}}, ".zero_optimisation"),
        ({"zero_optimization": {"stge": 3}}, ".zero_optimization.stge"),
        ({"bf16": {"enabled": "true"}}, ".bf16.enabled"),
        ({"dump_state": True}, ".dump_state"),
        ({"optimizer": {"type": "Adma"}}, ".optimizer.type"),
        ({"optimizer": {"type": "adamw", "params": {"learning_rate": 1}}}, ".optimizer.params.learning_rate"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0}}}, ".scheduler.params.cycle_max_lr"),
    ],
)
def test_a_mistake_is_underlined_where_it_is(config: dict[str, Any], fault: str) -> None:
    assert faults(SCHEMA, config) == [fault]


def test_words_count_whatever_their_case_and_null_is_absence() -> None:
    config = {
        "train_batch_size": 2,
        "data_types": {"grad_accum_dtype": "torch.BFloat16"},
        "optimizer": {"type": "ADAM", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "NONE"}},
        "communication_data_type": None,
        "fp16": None,
    }
    assert faults(SCHEMA, copy.deepcopy(config)) == []
    load_config({k: v for k, v in config.items() if v is not None}, world_size=1)


def test_every_key_has_a_description_and_the_old_ones_are_deprecated() -> None:
    for key in key_table().keys.values():
        if "*" in key.path or key.path.startswith(("optimizer.", "scheduler.")):
            continue
        place: Any = SCHEMA
        for part in key.path.split("."):
            place = place["properties"][part]
        assert place["description"]
        assert place.get("deprecated", False) == (key.status is Status.DEPRECATED)


def test_the_command_prints_it_without_broken_lines_through_a_pipe() -> None:
    assert json.loads(CliRunner().invoke(app, ["schema"]).stdout) == json.loads(json.dumps(SCHEMA))
    command = [sys.executable, "-m", "zeroshard", "config", "schema"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["$schema"].endswith("2020-12/schema")
