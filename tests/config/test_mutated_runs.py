"""A mutated config trains, or is refused in one error that says why: no other exception, and no hang.

Each config goes through `initialize` and two steps of a small model in this process alone. ZEROSHARD_CONFIGS=10000 runs
as many of them; each has a number, which a failure names.
"""

from __future__ import annotations

import collections
import os
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.config.mutated_runs import mutated_config
from zeroshard.errors import ConfigError, NonFiniteError, PlanError, UsageError

CONFIGS = int(os.environ.get("ZEROSHARD_CONFIGS", "200"))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)) for _ in range(2))
        self.out = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def train(config: dict[str, Any]) -> str:
    """How it ended: 'run', or the name of the error. Config and plan are refused before the engine is there."""
    model = Model()
    engine = None
    try:
        engine, optimizer, _, _ = zeroshard.initialize(model=model, config=config)
        for _ in range(3):
            loss = engine(torch.randn(2, 4)).float().square().mean()
            if optimizer is not None:
                engine.backward(loss)
                engine.step()
        return "run"
    except (ConfigError, PlanError) as error:
        return type(error).__name__ if engine is None else f"refused too late: {error}"
    except (UsageError, NonFiniteError) as error:
        return type(error).__name__
    except RuntimeError as error:
        if "zeroshard: some modules were kept in float32" not in str(error):
            raise
        return "explained"
    finally:
        zeroshard.close(model)


@pytest.mark.timeout(300 + CONFIGS)
def test_a_mutated_config_trains_or_is_refused_in_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where monitors leave their files
    ends: collections.Counter[str] = collections.Counter()
    faults: dict[str, list[str]] = collections.defaultdict(list)
    for number in range(CONFIGS):
        config = mutated_config(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                ends[train(config)] += 1
            except Exception as error:  # every other exception is a fault, whatever it is
                place = traceback.extract_tb(error.__traceback__)[-1]
                kind = f"{type(error).__name__} at {place.filename}:{place.lineno}: {error}"
                faults[kind].append(f"config {number}: {config}")
    print(dict(ends))
    assert not faults, "\n\n".join(f"{len(found)} x {kind}\n  {found[0]}" for kind, found in faults.items())
    assert not [end for end in ends if "too late" in end]
    assert ends["run"] > CONFIGS / 5
    assert ends["ConfigError"] > CONFIGS / 20
