"""Hyper-parameters, scheduler and counters come back as what they were, or are refused by name with nothing changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zeroshard
from tests.checkpoint.test_resume import Run, differences, state_of
from zeroshard.checkpoint import jsonfile
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.errors import CheckpointError, UsageError


def start(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": np.float64(0.5)}]
    client = torch.optim.AdamW(groups, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(client, 1, gamma=0.5)
    module, optimizer = zeroshard.shard(model, optimizer=client)
    return module, optimizer, scheduler


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", [torch.tensor, np.float32, np.float64, float])
def test_rates_that_are_tensors_or_numbers_of_numpy_are_kept_and_come_back_in_kind(
    tmp_path: Path, kind: Callable[[float], Any]
) -> None:
    module, optimizer, scheduler = start(lr=kind(0.125))
    step(module, optimizer)
    scheduler.step()
    optimizer.param_groups[1]["betas"] = (np.float32(0.5), 0.75)
    zeroshard.save(module, tmp_path, "one", scheduler=scheduler)
    module, optimizer, scheduler = start(lr=kind(0.75))
    rates = [group["lr"] for group in optimizer.param_groups]
    zeroshard.load(module, tmp_path, scheduler=scheduler)
    for group, before in zip(optimizer.param_groups, rates, strict=True):
        assert type(group["lr"]) is type(before)
        assert float(group["lr"]) == 0.0625
        if kind is torch.tensor:
            assert group["lr"] is before, "who holds the tensor, a graph say, sees the loaded value"
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.75)
    assert optimizer.param_groups[1]["weight_decay"] == 0.5
    assert [float(rate) for rate in scheduler.get_last_lr()] == [0.0625, 0.0625]
    step(module, optimizer)


def test_what_a_checkpoint_can_not_keep_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, optimizer, _ = start(lr=0.1)
    cases: list[tuple[str, Any, str]] = [
        ("hook", print, "optimizer group 1.hook is a builtin_function"),
        ("rates", torch.ones(2), "optimizer group 1.rates is a Tensor"),
        ("huge", 10**5000, "optimizer group 1.huge is a number of"),
    ]
    for key, value, said in cases:
        optimizer.param_groups[1][key] = value
        with pytest.raises(CheckpointError, match=said):
            zeroshard.save(module, tmp_path / "new", "one")
        del optimizer.param_groups[1][key]
    monkeypatch.setattr("zeroshard.checkpoint.saver._MAX_STATE_NBYTES", 10**6)
    for value, said in (("x" * 10**6, "keep less"), ({1, 2}, "a is a set"), (np.int64(1), "a is a int64")):
        with pytest.raises(CheckpointError, match=said):
            zeroshard.save(module, tmp_path / "new", "one", client_state={"a": value})
    for call in (lambda: zeroshard.save(module, "", "one"), lambda: zeroshard.load(module, "")):
        with pytest.raises(UsageError, match="directory is empty text"):
            call()
    assert not (tmp_path / "new").exists()


HOSTILE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda s: s["optimizer"]["groups"][0]["options"].update(lr="x"), "group 0.lr is 'x' there, which is text"),
    (lambda s: s["optimizer"]["groups"][0]["options"].update(lr=None), "group 0.lr is None"),
    (lambda s: s["optimizer"]["groups"][0]["options"].update(lr=[1.0]), r"group 0.lr is \[1.0\]"),
    (lambda s: s["optimizer"]["groups"][0]["options"].update(betas={"$tuple": [0.9, "y"]}), r"betas\[1\] is 'y'"),
    (lambda s: s["optimizer"]["groups"][0]["options"].update(betas={"$tuple": [0.9]}), "betas has 1 values there, 2"),
    (lambda s: s["optimizer"]["groups"][0]["options"].update(params=[]), "'params' is no hyper-parameter"),
    (lambda s: s["optimizer"]["groups"][0].update(options=[]), "group 0 is \\[\\] there"),
    (lambda s: s["optimizer"]["groups"][0]["options"].update(lr={"$odd": 1}), "marked '\\$odd'"),
    (lambda s: s["scheduler"]["state"].update(last_batch_iteration="x"), "scheduler.last_batch_iteration is 'x'"),
    (lambda s: s["scheduler"]["state"].update(step=5), "scheduler.step is a method"),
    (lambda s: s["scheduler"].update(state=7), "scheduler is 7"),
    (lambda s: s["scaler"].update(scale="x"), "scale = 'x'"),
    (lambda s: s["scaler"].pop("scale"), "lacks scale"),
    (lambda s: s["counters"].pop("micro_steps"), "counters.micro_steps is missing"),
    (lambda s: s["counters"].update(global_steps="x"), "counters.global_steps is 'x'"),
    (lambda s: s["counters"].update(data=[{"epoch": 1}]), "counters.data.offset is None"),
    (lambda s: s["ranks"][0]["generators"].update(torch="AAAA"), "random number generator"),
    (lambda s: s["ranks"][0]["generators"].update(numpy=["x"]), "random number generator"),
    (lambda s: s["ranks"].clear(), "'ranks'"),
]


def test_values_of_other_kinds_in_a_table_with_a_right_checksum_are_refused_with_file_and_key(tmp_path: Path) -> None:
    run = Run(low="fp16")
    engine = run.start()
    run.train(engine, range(1))
    engine.save_checkpoint(tmp_path, tag="one")
    run.train(engine, range(1, 2))
    table = tmp_path / "one" / MANIFEST
    whole, before = table.read_bytes(), state_of(engine)
    for change, said in HOSTILE:
        content = jsonfile.decode(whole, table)
        change({**content["state"], "ranks": content["ranks"]})
        table.write_bytes(jsonfile.encode(content))
        with pytest.raises(CheckpointError, match=rf"(?s){re.escape(str(table))}.*{said}"):
            engine.load_checkpoint(tmp_path)
        assert differences(before, state_of(engine)) == [], said
    table.write_bytes(whole)
    engine.load_checkpoint(tmp_path)
    engine.destroy()
