"""A config comes from a dict, a file or JSON text, with comments, and every value knows its line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from zeroshard.config import load_config
from zeroshard.errors import ConfigError, UsageError

TEXT = """{
  // two samples on each rank
  "train_micro_batch_size_per_gpu": 2, # as a shell would say it
  /* sharding
     of everything */
  "zero_optimization": {
    "stage": 3,
    "stage3_max_live_parameters": 5e8,
  },
}
"""


def test_comments_trailing_commas_and_whole_floats_are_read() -> None:
    config = load_config(TEXT, world_size=2)
    assert config.zero.stage == 3
    assert config.zero.max_live_parameters == 500_000_000
    assert type(config.zero.max_live_parameters) is int


@pytest.mark.parametrize("as_string", [True, False])
def test_a_file_gives_each_value_its_line(tmp_path: Path, as_string: bool) -> None:
    path = tmp_path / "ds.json"
    path.write_text(TEXT, encoding="utf-8-sig")
    config = load_config(str(path) if as_string else path, world_size=2)
    assert config.origins["train_micro_batch_size_per_gpu"] == "ds.json line 3"
    assert config.origins["zero_optimization.stage"] == "ds.json line 7"
    assert config.origins["zero_optimization.max_live_parameters"] == "ds.json line 8 as stage3_max_live_parameters"
    assert config.origins["gradient_clipping"] == "default"


def test_dict_text_and_file_give_the_same_config(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(TEXT)
    as_dict = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "max_live_parameters": 500_000_000},
    }
    configs = [load_config(source, world_size=2) for source in (TEXT, path, as_dict)]
    assert len({repr(config).split("origins=")[0] for config in configs}) == 1


def test_a_null_is_as_good_as_an_absent_key() -> None:
    config = load_config({"train_batch_size": 4, "optimizer": None, "gradient_clipping": None}, world_size=2)
    assert (config.optimizer, config.gradient_clipping) == (None, 1.0)


def test_duplicate_keys_are_errors_with_path_and_lines() -> None:
    text = '{"train_batch_size": 4,\n "bf16": {\n "enabled": true,\n "enabled": false},\n "train_batch_size": 8}'
    with pytest.raises(ConfigError) as caught:
        load_config(text, world_size=1)
    assert caught.value.problems == (
        "bf16.enabled (JSON text lines 3 and 4): the key is given twice; keep one of the two",
        "train_batch_size (JSON text lines 1 and 5): the key is given twice; keep one of the two",
    )


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ('{"bf16": {"enabled": True}}', "line 1 column 22", "write true"),
        ('{"a": None}', "line 1", "write null"),
        ('{"a": 1 "b": 2}', "line 1 column 7", "put strings in double quotes"),
        ('{"a" 1}', "line 1", "a colon is missing"),
        ('{"a": 1,,}', "line 1", "a comma without a value"),
        ('{"a": 1', "line 1", "the text ends"),
        ('{"a": [1, 2', "line 1", "the text ends"),
        ('{"a": "x\n"}', "line 1", "not closed"),
        ('{"a": "\\q"}', "line 1", "can't be read"),
        ('{"a": 01}', "line 1", "put strings in double quotes"),
        ('{"a": 1} {', "line 1", "goes on after the end"),
        ("/* {", "line 1", "never closed"),
        ('{"a": ' + "9" * 5000 + "}", "line 1", "5000 characters"),
        ("{" * 3, "line 1", "a key is expected"),
        ('{"a":' * 200 + "1" + "}" * 200, "line 1", "nested deeper"),
        ("", "line 1", "ends where a value is expected"),
    ],
)
def test_text_that_is_not_json_says_where_and_what_to_do(text: str, place: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(text, world_size=1)
    assert place in str(caught.value)
    assert what in str(caught.value)


@pytest.mark.parametrize("text", ["[{}]", '"{"', "\n3"])
def test_a_config_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be an object"):
        load_config(text, world_size=1)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        load_config(tmp_path / "missing.json", world_size=1)
    with pytest.raises(ConfigError, match="can't be read"):
        load_config(tmp_path, world_size=1)
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "latin.json", world_size=1)


@pytest.mark.parametrize(
    "config",
    [
        {"bf16": {"enabled": object()}},
        {3: 4},
        {"train_batch_size": 10**5000},
        {"train_batch_size": math.nan},
        {"gradient_clipping": math.inf},
        {"optimizer": {"type": "Adam", "params": {"lr": {1, 2}}}},
    ],
)
def test_python_values_without_a_json_counterpart_are_refused(config: dict[Any, Any]) -> None:
    with pytest.raises(ConfigError):
        load_config({"train_micro_batch_size_per_gpu": 1, **config}, world_size=1)


def test_a_dict_that_holds_itself_is_refused() -> None:
    config: dict[str, Any] = {"train_batch_size": 1}
    config["data_efficiency"] = config
    with pytest.raises(ConfigError):
        load_config(config, world_size=1)


@pytest.mark.parametrize("source", [3, None, b"{}", ["a"]])
def test_a_source_of_another_type_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="give a dict, the path of a JSON file, or JSON text"):
        load_config(source, world_size=1)


@pytest.mark.parametrize("world_size", [0, -1, True, 1.5])
def test_a_world_size_that_is_no_number_of_ranks_is_a_usage_error(world_size: Any) -> None:
    with pytest.raises(UsageError, match="world_size"):
        load_config({"train_batch_size": 1}, world_size=world_size)
