"""A checkpoint continues a run bit for bit, or is refused with nothing changed; a kill never costs the older one."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.checkpoint.basic import check_tag
from zeroshard.engine.engine import Engine
from zeroshard.errors import CheckpointError, UsageError

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.02}}
FP16 = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 1}


class Model(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.inp = nn.Linear(6, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
        self.seen = nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        return x


@dataclass(frozen=True)
class Run:
    """How to train."""

    stage: int = 3
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    scheduler: bool = True
    low: str | None = None
    width: int = 12
    overflow_at: int = -1
    extra: dict[str, Any] = field(default_factory=dict)

    def start(self, seed: int = 1) -> Engine:
        torch.manual_seed(seed)
        model = Model(self.width)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 20},
            **({} if self.optimizer else {"optimizer": ADAMW}),
            **({"scheduler": SCHEDULER} if self.scheduler else {}),
            **({self.low: FP16 if self.low == "fp16" else {"enabled": True}} if self.low else {}),
            **self.extra,
        }
        client = self.optimizer(model.parameters()) if self.optimizer else None
        return zeroshard.initialize(model=model, optimizer=client, config=config)[0]

    def train(self, engine: Engine, steps: range) -> None:
        rank = int(os.environ.get("RANK", "0"))
        for step in steps:
            for micro in range(2):
                generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
                loss = engine(torch.randn(4, 6, generator=generator)).float().square().mean()
                engine.backward(loss * float("inf") if step == self.overflow_at else loss)
                engine.step()


def state_of(engine: Engine) -> dict[str, Any]:
    """Everything that a run goes on from, as seen from this rank."""
    values = {name: value.clone() for name, value in zeroshard.iterate_full_parameters(engine.module)}
    update = engine._update()
    tensors = {} if update is None else {name: value.clone() for name, value in update.tensors().items()}
    return {
        "parameters": values,
        "moments": tensors,
        "counters": json.dumps(update.counters() if update is not None else None),
        "buffer": dict(engine.module.named_buffers())["seen"].clone(),
        "rates": engine.get_lr(),
        "scale": engine.loss_scale,
        "steps": (engine.micro_steps, engine.global_steps, engine.skipped_steps),
        "scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
    }


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two states differ, bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if torch.equal(one, other) else [path]
    return [] if one == other else [path]


def _rmsprop(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-2)


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def _radam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RAdam(parameters, lr=1e-2)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


RUNS = [
    *(Run(stage) for stage in range(4)),
    Run(3, low="bf16"),
    Run(0, low="bf16", scheduler=False),
    *(Run(stage, low="fp16", overflow_at=2) for stage in (1, 3)),
    *(Run(stage, optimizer=_rmsprop) for stage in (0, 3)),
    Run(2, optimizer=_momentum, scheduler=False),
]


def _resume(rank: int, world_size: int, directory: str) -> list[str]:
    """What differs from an uninterrupted run."""
    found: list[str] = []
    for number, run in enumerate(RUNS):
        whole = run.start()
        run.train(whole, range(6))
        expected = state_of(whole)
        whole.destroy()

        first = run.start()
        run.train(first, range(3))
        first.save_checkpoint(f"{directory}/{number}", client_state={"epoch": 7})
        first.destroy()
        # Other values and other moments to begin with: all of them must be replaced.
        second = run.start(seed=2)
        run.train(second, range(10, 10 + number % 2))
        folder, client = second.load_checkpoint(f"{directory}/{number}")
        assert folder == f"{directory}/{number}/global_step3"
        assert client == {"epoch": 7}
        run.train(second, range(3, 6))
        found += [f"{run}: {path}" for path in differences(expected, state_of(second))]
        second.destroy()
    return found


def test_a_resumed_run_is_an_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    assert run_ranks(2, _resume, str(tmp_path)) == [[], []]


def _before_the_first_step(rank: int, world_size: int, directory: str) -> list[str]:
    run = Run(optimizer=_rmsprop)
    engine = run.start()
    initial = state_of(engine)
    engine.save_checkpoint(directory, tag="start")
    run.train(engine, range(2))
    engine.load_checkpoint(directory, tag="start")
    found = differences(initial, state_of(engine))
    engine.destroy()
    return [path for path in found if "moments" not in path]


def test_a_run_goes_back_to_a_checkpoint_from_before_its_first_step(tmp_path: Path) -> None:
    assert run_ranks(2, _before_the_first_step, str(tmp_path)) == [[], []]


# What does not fit is refused.


def _refused(engine: Engine, directory: str, words: list[str], tag: str | None = None) -> None:
    before = state_of(engine)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(directory, tag)
    assert all(word in str(caught.value) for word in words), (words, str(caught.value))
    assert differences(before, state_of(engine)) == []


def _damage(directory: str, rank: int) -> None:
    """Every kind of damage to rank 1's file or to the state: all ranks refuse, and nothing is changed."""
    run = Run()
    engine = run.start()
    run.train(engine, range(1))
    engine.save_checkpoint(directory, tag="good")
    run.train(engine, range(1, 2))
    weights = Path(directory, "good", "rank-0001.safetensors")
    state = Path(directory, "good", "state.json")
    whole = {file: file.read_bytes() for file in (weights, state)}
    torch.distributed.barrier()

    def flipped(data: bytes, place: int) -> bytes:
        return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]

    def other_count(data: bytes) -> bytes:
        return data.replace(b'"global_steps": 1', b'"global_steps": 8')

    damages: list[tuple[Path, Callable[[bytes], bytes | None]]] = [
        (weights, lambda data: None),
        (weights, lambda data: b""),
        (weights, lambda data: data[: len(data) // 2]),
        (weights, lambda data: data[:-1]),
        (weights, lambda data: flipped(data, len(data) - 700)),
        (weights, lambda data: flipped(data, 30)),
        (weights, lambda data: flipped(data, 0)),
        (state, lambda data: None),
        (state, lambda data: b""),
        (state, lambda data: data[:-9]),
        (state, lambda data: b"[]"),
        (state, other_count),
    ]
    for file, damage in damages:
        if rank == 0:
            changed = damage(whole[file])
            file.unlink()
            if changed is not None:
                file.write_bytes(changed)
        torch.distributed.barrier()
        named = [str(file)] if rank == 1 or file == state else ["rank 1 failed", directory]
        _refused(engine, directory, named, "good")
        torch.distributed.barrier()
        if rank == 0:
            file.write_bytes(whole[file])
        torch.distributed.barrier()
    engine.load_checkpoint(directory, "good")
    engine.destroy()


def _misfit(directory: str) -> None:
    """A whole checkpoint of another run."""
    engine = Run().start()
    engine.save_checkpoint(directory, tag="fits")
    engine.destroy()
    for run, words in (
        (Run(width=14), ["another model, stage, precision or optimizer"]),
        (Run(stage=2), ["another model, stage, precision or optimizer"]),
        (Run(low="bf16"), ["another model, stage, precision or optimizer"]),
        (Run(scheduler=False), ["scheduler_type WarmupLR", "None"]),
        (Run(optimizer=_radam), ["FlatUpdate", "TorchUpdate", "another optimizer"]),
        (Run(optimizer=_adam), ["optimizer_type AdamW", "Adam;"]),
        (Run(optimizer=_momentum), ["another model, stage, precision or optimizer"]),
    ):
        other = run.start()
        run.train(other, range(1))
        _refused(other, directory, words)
        other.destroy()


def _misuse(directory: str, rank: int) -> None:
    engine = Run().start()
    _refused(engine, f"{directory}/nowhere", ["no finished checkpoint", "latest"])
    _refused(engine, directory, ["no checkpoint 'nothing'"], "nothing")
    _refused(engine, directory, ["../up"], "../up")
    with pytest.raises(CheckpointError, match=r"tag '\.\./up'"):
        engine.save_checkpoint(directory, tag="../up")
    with pytest.raises(CheckpointError, match="JSON"):
        engine.save_checkpoint(directory, tag="set", client_state={"set": {1}})
    # One rank alone fails: so do all.
    with pytest.raises(CheckpointError, match="JSON" if rank == 1 else "rank 1 failed"):
        engine.save_checkpoint(directory, tag="one", client_state={"set": {1}} if rank == 1 else {})
    with pytest.raises(UsageError, match="not built yet"):
        engine.load_checkpoint(directory, load_module_only=True)
    assert not [name for name in os.listdir(directory) if name in ("set", "one")]
    engine.destroy()


def _refusals(rank: int, world_size: int, directory: str) -> None:
    for name in ("damage", "misfit", "misuse"):
        os.makedirs(f"{directory}/{name}", exist_ok=True)
    _damage(f"{directory}/damage", rank)
    _misfit(f"{directory}/misfit")
    _misuse(f"{directory}/misuse", rank)


def test_what_is_damaged_missing_or_of_another_run_is_refused_on_all_ranks_and_nothing_changes(tmp_path: Path) -> None:
    run_ranks(2, _refusals, str(tmp_path))


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    run_ranks(1, _save_one, str(tmp_path))
    run_ranks(2, _load_two, str(tmp_path))


def _save_one(rank: int, world_size: int, directory: str) -> None:
    Run().start().save_checkpoint(directory)


def _load_two(rank: int, world_size: int, directory: str) -> None:
    _refused(Run().start(), directory, ["saved by 1 ranks", "same number"])


@pytest.mark.parametrize(
    "tag",
    ["", ".", "..", "a/b", "/etc", "../up", ".hidden", "a\\b", "a\n", "a\0", "-x", " a", "latest/", "ü", "a" * 300],
)
def test_tags_that_are_no_plain_names_are_refused(tag: str) -> None:
    with pytest.raises(CheckpointError, match="checkpoint tag"):
        check_tag(tag)


@pytest.mark.parametrize("tag", ["global_step10", "a", "1", "epoch-3.final", "a.b"])
def test_plain_names_are_tags(tag: str) -> None:
    check_tag(tag)


# Kills.


def _save_and_die(engine: Engine, directory: str, tag: str, at: int) -> bool:
    """Save in a child process that is killed at its file operation number `at`; whether it lived to the end."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"):
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    engine.save_checkpoint(directory, tag=tag, client_state={"step": engine.global_steps})
    os._exit(0)


def _kills(rank: int, world_size: int, directory: str, same_tag: bool) -> int:
    """Kill the second save at each of its file operations; afterwards the first or the second one is loaded, whole."""
    run = Run(scheduler=False)
    engine, kills, lived = run.start(), 0, False
    states = {}
    while not lived:
        base = f"{directory}/{kills}"
        run.train(engine, range(1))
        first = engine.global_steps
        states[first] = state_of(engine)
        engine.save_checkpoint(base, tag="run", client_state={"step": first})
        run.train(engine, range(1, 2))
        states[first + 1] = state_of(engine)
        lived = _save_and_die(engine, base, "run" if same_tag else "next", kills + 1)
        kills += not lived
        other = run.start(seed=9)
        _, client = other.load_checkpoint(base)
        assert client is not None
        assert differences(states[client["step"]], state_of(other)) == [], kills
        assert client["step"] == first + 1 if lived else client["step"] in (first, first + 1)
        # A kill leaves nothing that stands in the way of the next save.
        other.save_checkpoint(base, tag="run", client_state={"step": -1})
        assert other.load_checkpoint(base)[1] == {"step": -1}
        other.destroy()
    engine.destroy()
    return kills


def test_a_kill_at_any_moment_of_a_save_leaves_the_older_or_the_newer_one_whole(tmp_path: Path) -> None:
    assert run_ranks(1, _kills, str(tmp_path / "other"), False)[0] >= 5
    assert run_ranks(1, _kills, str(tmp_path / "same"), True)[0] >= 8
