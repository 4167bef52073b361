"""Optimizers that count in numbers of Python's are saved, loaded and divided anew as those that count in tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.engine.step.attached import stepper_of
from zeroshard.errors import CheckpointError

WIDTH = 6


class Counting(torch.optim.Optimizer):
    """SGD whose step shrinks with counts, a float and a switch: numbers of Python's, and one of NumPy's."""

    def __init__(self, params: Any, huge: int = 0) -> None:
        super().__init__(params, {"lr": 0.1, "huge": huge})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1 + group["huge"]
                state["seen"] = np.int64(state.get("seen", 0) + 1)
                state["decayed"] = state.get("decayed", 1.0) * 0.7
                state["odd"] = not state.get("odd", False)
                state.setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                rate = group["lr"] * state["decayed"] / float(state["seen"]) * (2 if state["odd"] else 1)
                p.add_(state["sum"], alpha=-rate)


def _start(stage: int, huge: int = 0) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return zeroshard.initialize(model=model, optimizer=Counting(model.parameters(), huge), config=config)[0]


def _steps(engine: Any, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x).square().mean())  # the same on all ranks, so their number changes nothing
        engine.step()


def _whole(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in zeroshard.iterate_full_parameters(engine.module)}


def _saved(rank: int, world: int, folder: Path) -> None:
    for stage in range(4):
        engine = _start(stage)
        _steps(engine, 0, 3)
        engine.save_checkpoint(folder / str(stage))
        engine.destroy()


def _loaded(rank: int, world: int, folder: Path) -> None:
    straight = _start(0)
    _steps(straight, 0, 5)
    expected = _whole(straight)
    for saved in range(4):
        engine = _start(3 - saved)
        engine.load_checkpoint(folder / str(saved))
        for part in stepper_of(engine.module).update.state_parts():
            kinds = {name: type(value) for name, value in part.scalars.items()}
            assert kinds == {"steps": int, "seen": int, "decayed": float, "odd": bool}
            assert part.scalars["steps"] == 3
        _steps(engine, 3, 5)
        for name, value in _whole(engine).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-7)


@pytest.mark.parametrize("ranks", [(2, 2), (2, 3), (3, 1)], ids=["same", "more", "fewer"])
def test_runs_go_on_with_numbers_of_python_at_any_stage_and_number_of_ranks(
    tmp_path: Path, ranks: tuple[int, int]
) -> None:
    run_ranks(ranks[0], _saved, tmp_path)
    run_ranks(ranks[1], _loaded, tmp_path)


def _refused(rank: int, world: int, folder: Path) -> None:
    engine = _start(2, huge=2**70)
    _steps(engine, 0, 1)
    with pytest.raises(CheckpointError, match=r"optimizer state 'steps' of .* which 64 bits can't hold"):
        engine.save_checkpoint(folder)


def test_a_number_beyond_64_bits_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(2, _refused, tmp_path)
