"""`migrate` takes deprecated keys out of a file and leaves everything else in it as it was."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.config.test_mutations import VALID
from zeroshard.config.cli import app
from zeroshard.config.document import read_document
from zeroshard.config.entries import gather_entries
from zeroshard.config.keys import Status, key_table
from zeroshard.config.migrate import migrate
from zeroshard.config.problems import Problems
from zeroshard.errors import ConfigError

OLD = """{
  // a job of last year
  "train_batch_size": 16, # samples
  "bfloat16": {"enabled": true},
  "zero_optimization": {
    "stage": 2,
    "cpu_offload": false,  /* ten GPUs */
    "cpu_offload_use_pin_memory": true,
    // weights
    "stage3_gather_fp16_weights_on_model_save": true
  }
}
"""
NEW = """{
  // a job of last year
  "train_batch_size": 16, # samples
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": {"pin_memory": true, "device": "none"},  /* ten GPUs */
    // weights
    "gather_16bit_weights_on_model_save": true
  }
}
"""


def zero(members: str) -> str:
    return f'{{"zero_optimization": {{{members}}}}}'


def test_keys_are_rewritten_and_comments_order_and_layout_stay() -> None:
    migration = migrate(OLD)
    assert migration.text == NEW
    assert [(change.old, change.new) for change in migration.changes] == [
        ("bfloat16", "bf16"),
        ("zero_optimization.cpu_offload: false", 'zero_optimization.offload_optimizer.device: "none"'),
        ("zero_optimization.cpu_offload_use_pin_memory: true", "zero_optimization.offload_optimizer.pin_memory: true"),
        (
            "zero_optimization.stage3_gather_fp16_weights_on_model_save: true",
            "zero_optimization.gather_16bit_weights_on_model_save: true",
        ),
    ]
    assert migrate(NEW).changes == ()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"cpu_offload": true', '"offload_optimizer": {"device": "cpu"}'),
        ('"cpu_offload": null, "stage": 1', '"stage": 1'),
        ('"stage": 1, "cpu_offload": null', '"stage": 1'),
        ('"cpu_offload": true, "offload_optimizer": {"device": "cpu"}', '"offload_optimizer": {"device": "cpu"}'),
        ('"offload_optimizer": {}, "cpu_offload": true', '"offload_optimizer": {"device": "cpu"}'),
        ('"offload_optimizer": null, "cpu_offload": true', '"offload_optimizer": {"device": "cpu"}'),
        (
            '"offload_optimizer": {"ratio": 1}, "cpu_offload": true, "stage": 2',
            '"offload_optimizer": {"device": "cpu", "ratio": 1}, "stage": 2',
        ),
        ('"stage": 1, /* why */ "cpu_offload": null', '"stage": 1, /* why */ '),
        ('"cpu_offload_param": true,', '"offload_param": {"device": "cpu"},'),
    ],
)
def test_one_key_at_any_place(before: str, after: str) -> None:
    assert migrate(zero(before)).text == zero(after)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (zero('"cpu_offload": "yes"'), 'cpu_offload (JSON text line 1): must be true or false, not "yes"'),
        (zero('"cpu_offload": true, "offload_optimizer": {"device": "nvme"}'), 'but that is "nvme"'),
        ('{"bfloat16": {}, "bf16": {}}', "there is bf16 too"),
        ("[1]", "it must be an object"),
        ('{"a": }', "line 1 column 7"),
    ],
)
def test_what_can_not_be_rewritten_is_said(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        migrate(text)
    assert words in str(caught.value)


def meaning(text: str) -> dict[str, Any]:
    problems = Problems()
    entries = gather_entries(read_document("\n" + text, problems), None, key_table(), problems)
    return {path: entry.value for path, entry in entries.items() if not isinstance(entry.value, dict)}


DEPRECATED = [key.path for key in key_table().with_status(Status.DEPRECATED)]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(VALID), st.dictionaries(st.sampled_from(DEPRECATED), st.booleans() | st.none()), st.data())
def test_the_meaning_stays_the_same(valid: dict[str, Any], old: dict[str, Any], data: st.DataObject) -> None:
    config = copy.deepcopy(valid)
    section = config.setdefault("zero_optimization", {})
    for path, value in old.items():
        section[path.rsplit(".", 1)[-1]] = value
    if "bf16" in config:
        config["bfloat16"] = config.pop("bf16")
    text = json.dumps(config, indent=data.draw(st.sampled_from([None, 2])))
    if data.draw(st.booleans()):
        text = text.replace("\n", "  // kept\n").replace('"stage"', '/* here too */ "stage"')
    try:
        migration = migrate(text)
    except ConfigError:
        return  # the old key contradicts the new one
    assert meaning(migration.text) == meaning(text)
    assert migration.text.count("/*") == text.count("/*")
    assert not any(f'"{path.rsplit(".", 1)[-1]}"' in migration.text for path in DEPRECATED)


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_shows_a_diff_and_writes_only_when_told(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(OLD)
    path.chmod(0o640)
    shown = run("migrate", path)
    assert shown.exit_code == 0
    assert '-  "bfloat16": {"enabled": true},\n+  "bf16": {"enabled": true},' in shown.stdout
    assert "4 keys to be rewritten; --write does it" in shown.stderr
    assert path.read_text() == OLD
    as_json = json.loads(run("migrate", path, "--json").stdout)
    assert (as_json["written"], len(as_json["changes"])) == (False, 4)
    assert run("migrate", path, "--write").exit_code == 0
    assert path.read_text() == NEW
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["ds.json"]
    assert run("migrate", path).stdout == "ds.json has no deprecated keys\n"


def test_a_file_that_can_not_be_migrated_leaves_with_status_1(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(zero('"cpu_offload": 3'))
    assert run("migrate", path).exit_code == 1
    assert "must be true or false" in run("migrate", path).stderr
    assert len(json.loads(run("migrate", path, "--json").stdout)["problems"]) == 1
