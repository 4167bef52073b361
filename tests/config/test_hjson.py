"""HJSON is read as JSON is: each value with its line, and what may have been meant otherwise is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroshard.config import load_config
from zeroshard.config.migrate import migrate
from zeroshard.errors import ConfigError

TEXT = """# two samples on each rank
{
  train_micro_batch_size_per_gpu: 2
  optimizer: {
    type: AdamW
    'params': {lr: 1e-4, betas: [0.9
      0.95]}
  }
  zero_optimization: {stage: 3
    leaf_module: {name_suffixes: [
      blocks.0
      out
    ]}
  }
  checkpoint: {
    directory: /runs/first-try/2024
  }
}
"""
WITHOUT_BRACES = TEXT.replace("{\n", "\n", 1).rstrip().removesuffix("}")


@pytest.mark.parametrize("text", [TEXT, WITHOUT_BRACES, TEXT.replace("\n", "\r\n")])
def test_a_file_gives_each_value_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ds.hjson"
    path.write_bytes(text.encode())
    config = load_config(path, world_size=2)
    assert config.optimizer is not None
    assert config.optimizer.type == "AdamW"
    assert (config.optimizer.params["lr"], config.optimizer.params["betas"]) == (1e-4, (0.9, 0.95))
    assert config.zero.leaf_modules.name_suffixes == ("blocks.0", "out")
    assert config.checkpoint.directory == "/runs/first-try/2024"
    assert config.origins["optimizer.type"] == "ds.hjson line 5"
    assert config.origins["zero_optimization.stage"] == "ds.hjson line 9"


def test_an_unknown_key_is_told_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r"zero_optimization.stag \(JSON text line 3\).*zero_optimization.stage"):
        load_config("train_batch_size: 2\nzero_optimization: {\n  stag: 2\n}\n", world_size=1)


def test_a_string_over_several_lines_loses_the_indentation_of_its_quotes() -> None:
    text = """{
      train_batch_size: 2
      checkpoint: {
        directory:
          '''
          first
            second
          '''
      }
    }"""
    assert load_config(text, world_size=1).checkpoint.directory == "first\n  second"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"'it\'s \"here\"'", 'it\'s "here"'),
        ("true story", "true story"),
        ("1 of 2", "1 of 2"),
        ("http://a/b", "http://a/b"),
    ],
)
def test_strings_are_what_hjson_says(text: str, value: str) -> None:
    config = load_config(f"train_batch_size: 2\ncheckpoint: {{\n directory: {text}\n}}", world_size=1)
    assert config.checkpoint.directory == value


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("{a: SGD, b: 1}", "line 1 column 5", "put strings in double quotes"),
        ("{\n a: SGD # plain\n}", "line 2 column 5", "holds #"),
        ("{\n a:\n b: 1\n}", "line 3 column 2", "holds :"),
        ("{\n a: '''x\n}", "line 2 column 5", "never closed"),
        ("{\n a: 'x\n}", "line 2 column 5", "close it with '"),
        ("{\n a b: 1\n}", "line 2 column 2", "a key is expected"),
        ("a: 1\n}", "line 2 column 1", "closes what is not open"),
        ("{a: [1\n}", "line 2 column 1", "close with ]"),
        ('{"a": "x" "b": 2}', "line 1 column 11", "a comma or } is missing"),
    ],
)
def test_what_is_unclear_or_broken_says_where_and_what_to_do(text: str, place: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(text, world_size=1)
    assert place in str(caught.value)
    assert what in str(caught.value)


def test_deprecated_keys_without_quotes_are_rewritten() -> None:
    old = "{\n  bfloat16: {enabled: true}\n  zero_optimization: {\n    stage: 2\n    cpu_offload: true\n  }\n}\n"
    migration = migrate(old)
    assert '"bf16": {enabled: true}\n' in migration.text
    assert '"offload_optimizer": {"device": "cpu"}\n  }' in migration.text
    assert load_config("train_batch_size: 1\n" + migration.text.strip()[1:-1], world_size=1).zero.offload is not None
