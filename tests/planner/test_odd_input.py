"""Models, batches and numbers that nobody should plan with: each ends in one error that says why, or in a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.planner.settings import BF16
from zeroshard.errors import ConfigError, PlanError
from zeroshard.planner.choose.configs import default_document, read_config, with_batch
from zeroshard.planner.machine.hardware import parse_cluster
from zeroshard.planner.predict.rows import Row, Setting, make_row
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.sources import module_source
from zeroshard.planner.trace.workload import Workload

CLUSTER = parse_cluster("2xH100-80GB")


class Stack(nn.Module):
    """Modules one after the other; the loss is the mean of what comes out."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.stack = nn.Sequential(*modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(x).float().mean()


class Nested(nn.Module):
    """Lists of lists, one module under two names, and a table that is its own head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.table.weight
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(3))
        self.same = self.blocks[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.table(x)
        for pair in [*self.blocks, self.same]:
            for layer in pair:  # pyright: ignore[reportGeneralTypeIssues]
                y = layer(y)
        return self.head(y).float().square().mean()


def _row(module: Callable[[], nn.Module], make: Any) -> Row:
    work = Workload(module_source("odd", lambda: (module(), make)), 2, 8)
    return make_row(work, BF16, Setting(3, Offload.NONE, Checkpointing.ON), CLUSTER)


def _ids(samples: int, length: int) -> dict[str, Any]:
    return {"x": torch.empty(samples, length, dtype=torch.int64)}


def _images(samples: int, length: int) -> dict[str, Any]:
    return {"x": torch.empty(samples, 3, 4 * length, 4 * length, dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("module", "make", "numel"),
    [
        (Nested, _ids, 50 * 8 + 6 * 72),
        (lambda: Stack(nn.EmbeddingBag(40, 8), nn.Linear(8, 4)), _ids, 40 * 8 + 36),
        (lambda: Stack(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 4, 3)), _images, 224 + 16 + 292),
    ],
    ids=["tied and nested", "bag", "convolutions"],
)
def test_odd_modules_are_planned(module: Callable[[], nn.Module], make: Any, numel: int) -> None:
    row = _row(module, make)
    assert row.plan.parameter_numel == numel
    assert row.memory.peak.total > 0


@pytest.mark.parametrize(
    ("module", "make", "said"),
    [
        (lambda: Stack(nn.Embedding(40, 8, sparse=True)), _ids, "sparse=False"),
        (lambda: Stack(nn.Linear(8, 8)), lambda *_: 3, "forward fails on a batch of 3: TypeError"),
        (lambda: Stack(nn.Linear(8, 8)), 3, "not a make_batch"),
        (lambda: Stack(nn.Linear(8, 8)), lambda *_: 1 // 0, r"make_batch\(2, 8\) failed: ZeroDivisionError"),
        (lambda: 1 // 0, _ids, "building the model without memory failed: ZeroDivisionError"),
        (lambda: 7, _ids, "gave a int, not a torch.nn.Module"),
        (lambda: Stack(nn.ReLU()), _images, "nothing of the model is trainable"),
    ],
)
def test_what_can_t_be_planned_says_why(module: Any, make: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        _row(module, make)


def test_nought_is_not_taken_for_nothing_given() -> None:
    with pytest.raises(PlanError, match="whole nodes of 0"):
        parse_cluster("4xH100", per_node=0)
    document = with_batch(default_document(CLUSTER.gpu), None, 0)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        read_config(document, CLUSTER)
