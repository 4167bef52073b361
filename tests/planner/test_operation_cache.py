"""What a trace remembers of earlier operations changes nothing of what it finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zeroshard.planner.trace.model_trace import Trace, trace
from zeroshard.planner.trace.operation_cache import OperationCache
from zeroshard.planner.trace.workload import loss_of
from zeroshard.sharding.units import find_units


class Mixed(nn.Module):
    """Convolutions, norms with running statistics, a bag of embeddings, expanded and broadcast tensors, in blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(32, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.GELU(), nn.Dropout(0.1))
            for _ in range(4)
        )
        self.head = nn.Linear(16, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.bag(ids).unsqueeze(1).expand(-1, 4, -1)
        for block in self.blocks:
            x = x + block(x) * x.mean(-1, keepdim=True)
        return self.head(x).softmax(-1).square().mean()


def _trace() -> Trace:
    with torch.device("meta"):
        model, ids = Mixed(), torch.empty(2, 8, dtype=torch.int64)
    return trace(model, find_units(model), (ids,), {}, loss=loss_of, tokens=16)


def test_a_trace_that_remembers_equals_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    recalled = OperationCache.find

    def counted(self: OperationCache, key: Any) -> Any:
        found.append(recalled(self, key))
        return found[-1]

    monkeypatch.setattr(OperationCache, "find", counted)
    remembered = _trace()
    monkeypatch.setattr(OperationCache, "find", lambda *_: None)
    assert _trace() == remembered
    assert sum(seen is not None for seen in found) > 10


def test_arguments_that_are_equal_and_not_the_same_are_told_apart() -> None:
    op = torch.ops.aten.add.Scalar
    x = torch.empty(3, device="meta")
    keys = [OperationCache().key(op, (x, value), {}) for value in (1, 1.0, True)]
    assert len(set(keys)) == 3
    assert OperationCache().key(op, (torch.empty((), device="meta"), 1), {}) is None
    assert OperationCache().key(torch.ops.aten.add_.Scalar, (x, 1), {}) is None
