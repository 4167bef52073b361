"""Ranks that name a checkpoint differently make one of rank 0's name, or an error: `checkpoint.tag_validation`."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.config import load_config
from zeroshard.errors import ConfigError, UsageError, ZeroShardWarning


def _save(rank: int, world_size: int, base: str, asked: str | None) -> list[str]:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        **({} if asked is None else {"checkpoint": {"tag_validation": asked}}),
    }
    engine, *_ = zeroshard.initialize(model=nn.Linear(4, 3), config=config)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if asked is not None and asked.lower() == "fail":
                with pytest.raises(UsageError, match=rf"rank 0: 'of-0', this rank: 'of-{rank}'.*tag_validation"):
                    engine.save_checkpoint(base, tag=f"of-{rank}")
                with pytest.raises(AssertionError):
                    engine.save_checkpoint(base, tag=f"of-{rank}")
            else:
                engine.save_checkpoint(base, tag=f"of-{rank}")
                assert str(engine.load_checkpoint(base)[0]).endswith("of-0")
            engine.save_checkpoint(base, tag="same")
        return [str(one.message) for one in said if one.category is ZeroShardWarning]
    finally:
        engine.destroy()


@pytest.mark.parametrize("asked", [None, "WARN", "Ignore", "FAIL"])
def test_the_tag_of_rank_0_counts_with_a_warning_or_an_error_as_the_config_says(
    asked: str | None, tmp_path: Path
) -> None:
    told = run_ranks(2, _save, str(tmp_path), asked)
    expected = {"same"} if asked == "FAIL" else {"same", "of-0"}
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == expected
    if asked in (None, "WARN"):
        assert [len(warned) for warned in told] == [1, 1]
        assert "rank 0: 'of-0', this rank: 'of-1'" in told[1][0]
    else:
        assert told == [[], []]


def test_another_way_to_validate_tags_is_no_config() -> None:
    with pytest.raises(ConfigError, match=r'checkpoint\.tag_validation .*"Ignore" or "Warn" or "Fail"'):
        load_config({"train_batch_size": 1, "checkpoint": {"tag_validation": "foo"}}, world_size=1)
