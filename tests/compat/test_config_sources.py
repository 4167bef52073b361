"""`deepspeed.initialize` and `zero.Init` read every form of a config that scripts pass, and say where it is wrong."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from zeroshard.errors import ConfigError

deepspeed = pytest.importorskip("deepspeed", reason="zeroshard-deepspeed (compat/deepspeed) is not installed")

COMMENTS = """{
  // batch
  "train_micro_batch_size_per_gpu": 2, /* of each rank */
  "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, # plain
  "bf16": {"enabled": true},
}
"""
HJSON = """
train_micro_batch_size_per_gpu: 2
optimizer: {
  type: SGD
  params: {lr: 0.1}
}
bf16: {enabled: true}
"""


LONG = json.dumps({"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "optimizer": {"type": "SGD"}})
LONG += " " * 999  # longer than a path may be


@pytest.mark.parametrize("text", [COMMENTS, HJSON, LONG])
@pytest.mark.parametrize("way", ["path", "text", "base64"])
def test_every_form_of_a_config_is_read(tmp_path: Path, text: str, way: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    source = {"path": str(path), "text": text, "base64": base64.urlsafe_b64encode(text.encode()).decode()}[way]
    with deepspeed.zero.Init(config_dict_or_path=source):
        built = nn.Linear(2, 2)
    assert built.weight.dtype is torch.bfloat16
    model = nn.Linear(2, 2)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=source)
    assert engine.config["optimizer"]["type"] == "SGD"
    engine.destroy()


def test_a_broken_file_is_told_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n  "train_batch_size": 2,,\n}')
    with pytest.raises(ConfigError, match=r"ds\.json line 2 column 25: a comma without a value"):
        deepspeed.initialize(model=nn.Linear(2, 2), config=path)


def test_an_unknown_key_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(COMMENTS.replace("train_micro", "train_macro"))
    with pytest.raises(ConfigError, match=r"train_macro_batch_size_per_gpu \(ds\.json line 3\).*did you mean"):
        deepspeed.initialize(model=nn.Linear(2, 2), config=path)
