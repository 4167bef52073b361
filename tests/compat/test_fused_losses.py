"""Losses that read `lm_head.weight` outside of the head's forward train at every stage as in plain torch, bit for bit.

Stage 3 runs always. `ZEROSHARD_HF_TESTS=1` adds the other stages, and the losses of Liger and TRL that run on a CPU,
where those are installed (Liger's head wants TRITON_INTERPRET=1); the GPU's turn is tests/gpu/test_fused_losses.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.compat import fused_libraries, tiny
from tests.compat.bits import Trainable, differences
from tests.compat.fused import HEAD_LOSSES, FusedHead
from tests.support.distributed import run_ranks
from tests.support.installed import need

need("transformers")

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1")
LIGER = {"use_liger_kernel": True, "liger_kernel_config": {"rope": False, "rms_norm": False, "swiglu": False}}
"""The other kernels don't run in Triton's interpreter."""
full = pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1")


def _cases() -> dict[str, Trainable]:
    cases: dict[str, Trainable] = {}
    for name, loss in HEAD_LOSSES.items():
        cases[name] = FusedHead(loss)
        cases[f"{name}, tied"] = FusedHead(loss, tied=True)
        cases[f"{name}, frozen"] = FusedHead(loss, frozen=True)
    return cases


def _train(
    rank: int, world: int, stages: Sequence[int], make: Callable[[], Mapping[str, Trainable]] = _cases
) -> list[str]:
    return [
        f"{name}, stage {stage}: {problem}"
        for name, case in make().items()
        for stage in stages
        for problem in differences(case, stage, rank, world)
    ]


def test_losses_that_read_the_heads_weight_train_as_in_plain_torch_at_stage_3() -> None:
    assert run_ranks(2, _train, (3,)) == [[], []]


@full
def test_losses_that_read_the_heads_weight_train_as_in_plain_torch_at_other_stages() -> None:
    assert run_ranks(2, _train, (0, 1, 2)) == [[], []]


def _liger() -> dict[str, Trainable]:
    cases: dict[str, Trainable] = {}
    for tied in (False, True):
        kinds = {"Liger's head": fused_libraries.liger(tied), **fused_libraries.liger_preferences(tied)}
        cases |= {f"{name}, {tied=}": case for name, case in kinds.items()}
    return cases


def _trl() -> dict[str, Trainable]:
    return {f"TRL's head, {tied=}": fused_libraries.trl(tied) for tied in (False, True)}


@full
@interpreted
def test_ligers_losses_train_as_in_plain_torch() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    assert run_ranks(2, _train, (0, 1, 2, 3), _liger, timeout=600) == [[], []]


@full
def test_trls_head_trains_as_in_plain_torch() -> None:
    pytest.importorskip("trl")
    assert run_ranks(2, _train, (0, 1, 2, 3), _trl, timeout=300) == [[], []]


def _trainer_with_liger(rank: int, world: int, base: str) -> list[float]:
    gaps: list[float] = []
    for changes in ({}, {"gradient_checkpointing": True}):
        runs: list[tiny.Run] = []
        for stage in (None, 0, 1, 2, 3):
            settings = {**LIGER, "eval_strategy": "no", **changes}
            model = tiny.model("llama")  # under arguments for stage 3 it would be built by other random numbers
            run = tiny.trainer(tiny.arguments(Path(base), stage, {}, **settings), model)
            run.train()
            runs.append(tiny.logged(run))
            tiny.forget()
        gaps += [run.largest_gap(runs[0]) for run in runs[1:]]
    return gaps


@full
@interpreted
def test_trainer_with_use_liger_kernel_trains_as_under_ddp(tmp_path: Path) -> None:
    for name in ("triton", "liger_kernel", "deepspeed", "accelerate"):
        pytest.importorskip(name)
    for gaps in run_ranks(2, _trainer_with_liger, str(tmp_path), timeout=600):
        assert max(gaps) < 2e-6, gaps
