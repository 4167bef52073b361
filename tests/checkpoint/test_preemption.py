"""SIGTERM, to whichever rank, finishes the step on all, saves, and ends with a status; a resume goes on the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.launch.launcher import script, start
from tests.launch.launcher import zeroshard as command
from tests.support.distributed import run_ranks
from zeroshard.checkpoint.saver import SAVING_THREAD
from zeroshard.engine.engine import Engine
from zeroshard.engine.saving.preemption import FILES_VARIABLE, PREEMPTED
from zeroshard.errors import UsageError
from zeroshard.launch import runner


def _engine(directory: str | None = None, accumulation: int = 2) -> Engine:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 9), nn.Dropout(0.2), nn.Linear(9, 5))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6}},
        "zero_optimization": {"stage": 3},
        "checkpoint": {"async": True, "directory": directory} if directory else {},
    }
    return zeroshard.initialize(model=model, config=config)[0]


def _train(engine: Engine, steps: int, kill_at: int = -1) -> list[str]:
    """Losses up to step `steps`; at micro-batch 1 of step `kill_at` this rank gets SIGTERM."""
    rank, losses = int(os.environ["RANK"]), []
    while engine.global_steps < steps:
        for micro in range(2):
            if (engine.global_steps, micro) == (kill_at, 0):
                os.kill(os.getpid(), signal.SIGTERM)
            seed = 100 * engine.global_steps + 10 * micro + rank
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
            loss = (engine(x) - x).square().mean()
            losses.append(float(loss).hex())
            engine.backward(loss)
            engine.step()
    return losses


def _train_until_stopped(engine: Engine, losses: list[str], kill_at: int) -> object:
    try:
        while engine.global_steps < 10000:
            losses += _train(engine, engine.global_steps + 1, kill_at)
            time.sleep(0.02 if engine.global_steps > 3 else 0)  # the other rank looks each half second
    except SystemExit as stop:
        return stop.code
    return None


def _interrupted(rank: int, world_size: int, directory: str) -> int:
    handler = signal.getsignal(signal.SIGTERM)
    first = _engine(directory)
    assert first.resume() == (None, None), "nothing is there yet"
    losses: list[str] = []
    assert _train_until_stopped(first, losses, kill_at=3 if rank == 1 else -1) == PREEMPTED
    assert signal.getsignal(signal.SIGTERM) is handler, "the process hears SIGTERM as before"
    stopped_at = first.global_steps

    second = _engine(directory)
    folder, _ = second.resume()
    assert folder is not None
    assert second.global_steps == stopped_at
    later = _train(second, stopped_at + 5)
    second.destroy()

    calm = _engine()
    expected = _train(calm, stopped_at + 5)
    calm.destroy()
    # The losses of the step after which it ended were not returned.
    assert losses == expected[: len(losses)]
    assert later == expected[2 * stopped_at :]
    return stopped_at


def _native(rank: int, world_size: int, directory: str) -> int:
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan=2)
    preemption = zeroshard.Preemption(model)
    with pytest.raises(UsageError, match="has one already"):
        zeroshard.Preemption(model)
    for step in range(10000):
        if step == 5 and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if preemption.due():
            zeroshard.save(model, directory, f"step{step}")
            preemption.close()
            zeroshard.close(model)
            return step
        time.sleep(0.02)
    raise AssertionError("nobody stopped")


def _both(rank: int, world_size: int, directory: str) -> tuple[int, int]:
    return _interrupted(rank, world_size, f"{directory}/engine"), _native(rank, world_size, f"{directory}/native")


def test_a_signal_to_one_rank_stops_all_after_the_same_step_and_a_resume_is_bit_identical(tmp_path: Path) -> None:
    first, second = run_ranks(2, _both, str(tmp_path))
    assert first == second
    assert first[0] > 3, "the step in which the signal came was finished"
    assert (tmp_path / f"native/step{first[1]}/checkpoint.json").is_file()


_LOOP = """
    import os, sys, time, torch, zeroshard
    from torch import nn
    torch.manual_seed(0)
    engine = zeroshard.initialize(model=nn.Linear(4, 4), config={
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 1},
        "checkpoint": {"directory": "saved"},
    })[0]
    if os.environ["RANK"] == "0":
        # Its child must neither hear the signal for it nor ignore it.
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        os.kill(child, 15)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -15
    while True:
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        if engine.global_steps == 3:
            os.write(1, b"going\\n")
        time.sleep(0.02)
"""


LONG = pytest.mark.skipif(
    "ZEROSHARD_LAUNCH_TESTS" not in os.environ,
    reason="long: ZEROSHARD_LAUNCH_TESTS=1; tests/launch has the launcher's part, with scripts that only speak to it",
)


@LONG
def test_a_launcher_that_is_told_to_stop_lets_its_ranks_save_and_restarts_nothing(tmp_path: Path) -> None:
    words = ["run", "--nproc", "2", "--max-restarts", "3", script(tmp_path, _LOOP)]
    launcher = start(tmp_path, *words, stderr=subprocess.PIPE)
    assert launcher.stdout is not None
    assert [launcher.stdout.readline() for _ in range(2)] == ["going\n"] * 2
    launcher.send_signal(signal.SIGTERM)
    out, said = launcher.communicate(timeout=60)

    assert launcher.returncode == PREEMPTED, said
    assert out == ""
    assert "SIGTERM received: the ranks finish their step, save and end" in said
    assert said.splitlines()[-1] == "zeroshard: the ranks were told to stop and have saved; status 75"
    shown = command(tmp_path, "checkpoint", "verify", "saved")
    assert shown.returncode == 0, shown.stderr


_ELASTIC = """
    import os, signal, sys, torch, torch.distributed as dist, zeroshard
    from torch import nn
    zeroshard.init_distributed()
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(40, 4))
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    engine, _, loader, _ = zeroshard.initialize(model=model, training_data=data, config="ds.json")
    engine.resume(sys.argv[1])
    total = torch.zeros(())
    while engine.global_steps < 9:
        for (x,) in loader:
            loss = (engine(x) - x).square().mean()
            total += loss.detach() / engine.gradient_accumulation_steps() / dist.get_world_size()
            engine.backward(loss)
            before = engine.global_steps
            engine.step()
            if engine.global_steps == before:
                continue
            dist.all_reduce(total)
            os.write(1, f"{engine.global_steps} {float(total):.6f}\\n".encode() if os.environ["RANK"] == "0" else b"")
            total.zero_()
            if engine.global_steps % 2 == 0:
                engine.save_checkpoint(sys.argv[1])
            # Only the first life ends so.
            if sys.argv[1] == "killed" and engine.global_steps == 5 and os.environ["RANK"] == "1":
                if not os.path.exists("once"):
                    open("once", "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
            if engine.global_steps == 9:
                break
    engine.destroy()
    dist.destroy_process_group()
"""


@LONG
@pytest.mark.parametrize("elastic", [True, False], ids=["with-fewer-ranks", "with-as-many"])
def test_a_job_whose_rank_is_killed_restarts_and_goes_on_with_the_same_losses(tmp_path: Path, elastic: bool) -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
        "elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2], "max_gpus": 4},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    name = script(tmp_path, _ELASTIC)
    words = ["run", "--nproc", "2", "--max-restarts", "1", *(["--elastic", "ds.json"] if elastic else []), name]
    killed, calm = command(tmp_path, *words, "killed"), command(tmp_path, *words, "calm")
    assert (killed.returncode, calm.returncode) == (0, 0), killed.stderr + calm.stderr
    assert "killed by signal SIGKILL" in killed.stderr
    assert ("restart 1 of 1\nzeroshard: 1 rank on" in killed.stderr) == elastic
    losses = [[line.split() for line in done.stdout.splitlines()] for done in (killed, calm)]
    assert [step for step, _ in losses[0]] == [*"12345", *"56789"], "it goes on after the checkpoint of step 4"
    expected = dict(losses[1])
    assert all(float(loss) == pytest.approx(float(expected[step]), abs=2e-6) for step, loss in losses[0])


def test_the_launcher_and_the_engine_mean_the_same_by_status_variable_and_thread() -> None:
    assert (runner.PREEMPTED, runner.FILES_VARIABLE) == (PREEMPTED, FILES_VARIABLE)
    assert runner.SAVING_THREAD == SAVING_THREAD
    assert "torch" in sys.modules
