"""A checkpoint holds what training goes on from, whatever the plan that saved it and the plan that loads it."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.checkpoint.directory import find, whole
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.saving.checkpoints import saver_of
from zeroshard.errors import CheckpointError, ZeroShardError


class Centered(nn.Module):
    """Takes off a running mean, which each rank makes from its own data."""

    def __init__(self) -> None:
        super().__init__()
        self.running_mean = nn.Buffer(torch.zeros(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.running_mean.mul_(0.9).add_(x.detach().float().mean(0), alpha=0.1)
        return x - self.running_mean.to(x.dtype)


class Net(nn.Module):
    """Tied weights, a frozen bf16 part, a parameter without elements, a scalar one, and odd rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))
        self.frozen = nn.Linear(7, 7).to(torch.bfloat16).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.norm = Centered()
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        h = h + self.frozen(h.to(torch.bfloat16)).to(h.dtype)
        return self.head(self.norm(h) * self.scale) + self.empty.sum()


def _start(stage: int, *, seed: int = 1, accumulation: int = 1, low: str | None = None, **extra: Any) -> Any:
    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **({low: {"enabled": True}} if low else {}),
        **extra,
    }
    return zeroshard.initialize(model=Net(), config=config)[0]


def _steps(engine: Any, steps: range) -> list[float]:
    rank, losses = int(os.environ.get("RANK", "0")), []
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps()):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            x = torch.randint(0, 11, (6,), generator=generator)
            loss = nn.functional.cross_entropy(engine(x).float(), x)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
    return losses


def _save(rank: int, world_size: int, base: str) -> dict[str, Any]:
    """Save at stage 3, go on: at every other stage the next losses are the same, bit for bit."""
    engine = _start(3)
    _steps(engine, range(2))
    weights = {name: value.clone() for name, value in zeroshard.iterate_full_parameters(engine.module)}
    engine.save_checkpoint(base, tag="fp32", client_state={"best": float("inf"), "shape": (1, 2), 3: "x"})
    expected = _steps(engine, range(2, 4))
    engine.destroy()
    for stage in range(4):
        other = _start(stage, seed=5)
        _steps(other, range(9, 10))
        _, client = other.load_checkpoint(base, tag="fp32")
        assert client == {"best": float("inf"), "shape": (1, 2), 3: "x"}
        assert other.module.head.weight is other.module.embed.weight
        assert _steps(other, range(2, 4)) == expected, stage
        if stage == 1:
            other.save_checkpoint(base, tag="stage1")
        other.destroy()
    return {"weights": weights, "losses": expected}


def _load(rank: int, world_size: int, base: str, weights: dict[str, torch.Tensor]) -> list[str]:
    found: list[str] = []
    for stage, accumulation, low in ((3, 1, None), (1, 2, None), (0, 1, None), (2, 1, "bf16"), (3, 2, "bf16")):
        engine = _start(stage, seed=7, accumulation=accumulation, low=low)
        engine.load_checkpoint(base, tag="fp32")
        held = dict(zeroshard.iterate_full_parameters(engine.module))
        found += [
            f"{stage} {low} {name}" for name in weights if not torch.equal(held[name].float(), weights[name].float())
        ]
        assert engine.global_steps == 2
        assert all(torch.isfinite(torch.tensor(_steps(engine, range(2, 4)))))
        assert engine.global_steps == 4
        if (stage, low) == (3, None):
            engine.save_checkpoint(base, tag=f"from{world_size}")
        engine.destroy()
    return found


def test_a_checkpoint_loads_at_any_number_of_ranks_stage_dtype_and_accumulation(tmp_path: Path) -> None:
    saved = run_ranks(2, _save, str(tmp_path))
    weights = saved[0]["weights"]
    for ranks in (1, 3):
        assert run_ranks(ranks, _load, str(tmp_path), weights) == [[]] * ranks
    with CheckpointReader(tmp_path / "fp32") as one, CheckpointReader(tmp_path / "stage1") as other:
        assert one.aliases == {"head.weight": "embed.weight"}
        assert set(one.names()) == set(other.names())
        assert one.tensor("frozen.weight").dtype == torch.bfloat16
        assert any(name.startswith("rank.1.norm.running_mean") for name in one.names())
    # Torch's own reader, without zeroshard: the model, and the optimizer's state under torch's names.
    model = {name: torch.zeros_like(value) for name, value in weights.items()}
    dcp.load(model, storage_reader=HuggingFaceStorageReader(str(tmp_path / "fp32")))
    assert all(torch.equal(model[name], value) for name, value in weights.items())
    state = {"state": {"embed.weight": {"exp_avg_sq": torch.zeros(11, 7), "step": torch.zeros(())}}}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "fp32")))
    assert float(state["state"]["embed.weight"]["step"]) == 2.0
    assert state["state"]["embed.weight"]["exp_avg_sq"].abs().sum() > 0


def _asynchronous(rank: int, world_size: int, base: str) -> None:
    engine = _start(2, checkpoint={"async": True, "keep": 2})
    losses: list[float] = []
    for step in range(4):
        losses += _steps(engine, range(step, step + 1))
        engine.save_checkpoint(base)  # waits for the one before, and training goes on while it is written
    _steps(engine, range(4, 6))
    engine.wait_for_checkpoint()
    assert saver_of(handle_of(engine.module)).staging_nbytes > 0
    assert [found.tag for found in whole(base)] == ["global_step3", "global_step4"]
    resumed = _start(0, seed=8)
    resumed.load_checkpoint(base)
    fresh = _start(2)
    _steps(fresh, range(4))
    assert _steps(resumed, range(4, 6)) == _steps(fresh, range(4, 6))
    # What can't be kept is an error of the call, not of the thread, on all ranks.
    engine.module.register_buffer("odd", torch.zeros(1, dtype=torch.complex128))  # which rank 0 alone would write
    words = "'odd' is torch.complex128" if rank == 0 else "rank 0 failed"
    for background in (True, False):
        with pytest.raises(CheckpointError, match=words):
            engine.save_checkpoint(base, tag="odd", background=background)
    del engine.module.odd
    assert find(base).name == "global_step4"
    with pytest.raises(CheckpointError, match="do not agree on tag, save_latest"):
        engine.save_checkpoint(base, tag="differing", save_latest=rank == 0)
    engine.save_checkpoint(base, tag="again", background=False)
    assert find(base).name == "again"
    for made in (engine, resumed, fresh):
        made.destroy()


def test_saves_in_the_background_are_whole_kept_by_count_and_refuse_what_they_can_not_keep(tmp_path: Path) -> None:
    run_ranks(2, _asynchronous, str(tmp_path))


def _alone(rank: int, world_size: int, base: str) -> str:
    engine = _start(2)
    try:
        if rank == 0:
            engine.save_checkpoint(base)
        else:
            for step in range(100):
                _steps(engine, range(step, step + 1))
    except ZeroShardError as error:
        return str(error)
    return "nothing"


def test_a_save_on_one_rank_only_is_an_error_in_seconds_that_says_so(tmp_path: Path) -> None:
    for message in run_ranks(2, _alone, str(tmp_path), timeout=40.0):
        assert "checkpoint" in message


def test_a_directory_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    run_ranks(1, _unwritable, str(tmp_path / "file"))
    tmp_path.chmod(0o755)
    run_ranks(1, _read_only, str(tmp_path / "read-only"))


def test_a_full_disk_is_named_and_costs_nothing_that_was_there(tmp_path: Path) -> None:
    run_ranks(1, _full, str(tmp_path))


def _save_and_wait(engine: Any, base: str, background: bool) -> None:
    engine.save_checkpoint(base, tag="second", background=background)
    engine.wait_for_checkpoint()


def _full(rank: int, world_size: int, base: str) -> None:
    engine = _start(3)
    engine.save_checkpoint(base, tag="first")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for background in (False, True):
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
        with pytest.raises(CheckpointError, match=r"00000-0.safetensors|too large"):
            _save_and_wait(engine, base, background)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert engine.load_checkpoint(base)[0] == f"{base}/first"
    engine.save_checkpoint(base, tag="second")
    assert engine.load_checkpoint(base)[0] == f"{base}/second"
    engine.destroy()


def _read_only(rank: int, world_size: int, base: str) -> None:
    """A directory without the right to write: the checkpoint in it stays as it was, and loads."""
    engine = _start(3)
    engine.save_checkpoint(base, tag="first")
    before = {path: path.stat().st_mtime_ns for path in Path(base).rglob("*")}
    Path(base).chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(65534)  # root may write anywhere
    for tag, background in (("second", False), ("first", False), ("second", True)):
        with pytest.raises(CheckpointError, match=rf"{base}/.*: Permission denied"):
            engine.save_checkpoint(base, tag=tag, background=background)
    assert engine.load_checkpoint(base)[0] == f"{base}/first"
    if os.getuid() == 0:
        os.seteuid(0)
    Path(base).chmod(0o755)
    assert {path: path.stat().st_mtime_ns for path in Path(base).rglob("*")} == before
    engine.destroy()


def _unwritable(rank: int, world_size: int, base: str) -> None:
    Path(base).write_text("")
    engine = _start(0)
    with pytest.raises(CheckpointError, match=base):
        engine.save_checkpoint(base)
    engine.destroy()
