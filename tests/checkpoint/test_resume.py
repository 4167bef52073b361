"""A checkpoint continues a run bit for bit, or is refused with nothing changed; a kill never costs the older one."""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.checkpoint.directory import check_tag
from zeroshard.checkpoint.jsonfile import decode, encode
from zeroshard.engine.engine import Engine
from zeroshard.engine.step.attached import stepper_of
from zeroshard.errors import CheckpointError, UsageError

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.02}}
FP16 = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 1}


class Model(nn.Module):
    def __init__(self, width: int = 12, depth: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(6, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
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
    depth: int = 3
    overflow_at: int = -1
    extra: dict[str, Any] = field(default_factory=dict)

    def start(self, seed: int = 1) -> Engine:
        torch.manual_seed(seed)
        model = Model(self.width, self.depth)
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
    update = stepper_of(engine.module).update
    moments = {
        f"{part.region}.{part.index}.{name}": value.clone()
        for part in update.state_parts()
        for name, value in {**{name: row.values() for name, row in part.elements.items()}, **part.scalars}.items()
    }
    return {
        "parameters": values,
        "moments": moments,
        "random": torch.get_rng_state(),
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
    Run(1, low="bf16"),
    Run(3, low="fp16", overflow_at=2),
    Run(0, low="bf16", scheduler=False),
    Run(3, optimizer=_rmsprop),
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
    assert all(re.search(word, str(caught.value), re.MULTILINE) for word in words), (words, str(caught.value))
    assert differences(before, state_of(engine)) == []


def _damage(directory: str, rank: int) -> None:
    """Every kind of damage to a file or to the table: all ranks refuse, and nothing is changed."""
    run = Run()
    engine = run.start()
    run.train(engine, range(1))
    engine.save_checkpoint(directory, tag="good")
    run.train(engine, range(1, 2))
    folder = Path(directory, "good")
    weights, moments = folder / "model-00001-0.safetensors", folder / "optimizer-00001-0.safetensors"
    table = folder / "checkpoint.json"
    whole = {file: file.read_bytes() for file in (weights, moments, table)}
    torch.distributed.barrier()

    def flipped(data: bytes, place: int) -> bytes:
        return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]

    def other_count(data: bytes) -> bytes:
        return data.replace(b'"global_steps": 1', b'"global_steps": 8')

    def edited(data: bytes) -> bytes:
        value = decode(data, table)
        value["state"]["counters"]["global_steps"] = -1
        return encode(value)

    damages: list[tuple[Path, Callable[[bytes], bytes | None], str]] = [
        (weights, lambda data: None, "tensor|hold"),
        (weights, lambda data: b"", "0 bytes"),
        (weights, lambda data: data[:-1], "cut off"),
        (weights, lambda data: flipped(data, len(data) - 70), "checksum"),
        (weights, lambda data: flipped(data, 30), "header"),
        (weights, lambda data: flipped(data, 0), "header"),
        (moments, lambda data: flipped(data, len(data) - 70), "'state."),
        (table, lambda data: None, "no checkpoint"),
        (table, lambda data: data[:-9], "JSON"),
        (table, other_count, "checksum"),
        (table, edited, r"counters\.global_steps is -1"),
    ]
    for file, damage, word in damages:
        if rank == 0:
            changed = damage(whole[file])
            file.unlink()
            if changed is not None:
                file.write_bytes(changed)
        torch.distributed.barrier()
        # A rank reads what it needs: where only another rank meets the damage, this one names that rank.
        _refused(engine, directory, [f"(?s)(?=.*{file})(?=.*({word}))|rank [01] failed"], "good")
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
        (Run(width=14), ["'inp.weight' has shape \\[12, 6\\], this run needs \\[14, 6\\]", "checkpoint.json"]),
        (Run(depth=4), ["'blocks.3.0.weight' is missing", "group 0: 'blocks.3.0.bias'"]),
        (Run(depth=2), ["'blocks.2.0.bias' is there, but this model has no such parameter"]),
        (Run(optimizer=_radam), ["optimizer is AdamW, this run's RAdam"]),
        (Run(optimizer=_adam), ["optimizer is AdamW, this run's Adam$"]),
        (Run(optimizer=_momentum, scheduler=False), ["is exp_avg, exp_avg_sq there, and momentum_buffer in this run"]),
    ):
        other = run.start()
        run.train(other, range(1))
        _refused(other, directory, words)
        other.destroy()
    lenient = Run(depth=4).start()
    with pytest.warns(zeroshard.errors.ZeroShardWarning, match="'blocks.3.0.weight' is missing"):
        lenient.load_checkpoint(directory, load_module_strict=False, load_module_only=True)
    lenient.destroy()


def _misuse(directory: str, rank: int) -> None:
    engine = Run().start()
    with pytest.warns(zeroshard.errors.ZeroShardWarning, match="holds no checkpoint"):
        assert engine.load_checkpoint(f"{directory}/nowhere") == (None, None)
    _refused(engine, directory, ["no checkpoint 'nothing'|rank 0 failed"], "nothing")
    _refused(engine, directory, [r"\.\./up|rank 0 failed"], "../up")
    with pytest.raises(CheckpointError, match=r"tag '\.\./up'"):
        engine.save_checkpoint(directory, tag="../up")
    with pytest.raises(CheckpointError, match=r"client_state\.a\[0\] is a set"):
        engine.save_checkpoint(directory, tag="set", client_state={"a": [{1}]})
    with pytest.raises(CheckpointError, match="client_state is a list"):
        engine.save_checkpoint(directory, tag="list", client_state=[1])  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="directory is a bytes"):
        engine.save_checkpoint(b"folder")  # pyright: ignore[reportArgumentType]
    # One rank alone fails: so do all.
    with pytest.raises(CheckpointError, match="a set" if rank == 1 else "rank 1 failed"):
        engine.save_checkpoint(directory, tag="one", client_state={"set": {1}} if rank == 1 else {})
    with pytest.raises(UsageError, match="custom_load_fn"):
        engine.load_checkpoint(directory, custom_load_fn=print)  # pyright: ignore[reportArgumentType]
    assert not [name for name in os.listdir(directory) if name in ("set", "one")]
    engine.destroy()


class _Faulty:
    """A scheduler that fails in a way that nobody has foreseen."""

    def __init__(self, at: str) -> None:
        self._at = at
        self._loads = 0

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        if self._at == "save":
            raise RuntimeError("no state today")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loads += 1
        if self._at == "load" and self._loads > 2:  # a load is tried, and taken back, before it is made
            raise KeyError("missing")


def _unforeseen(directory: str, rank: int) -> None:
    """Errors of any kind at any moment on rank 1: in seconds both ranks raise, and name rank and cause."""
    engine = Run(scheduler=False).start()
    faulty = dict.fromkeys(("save", "load"), _Faulty(""))
    zeroshard.save(engine.module, directory, "whole", scheduler=_Faulty(""))

    raising: list[str] = []

    def state() -> dict[str, Any]:
        if raising:
            raise LookupError("no client")
        return {"one": 1}

    def save(background: bool = False) -> None:
        given = faulty["save"]
        zeroshard.save(engine.module, directory, "new", scheduler=given, client_state=state, background=background)
        zeroshard.wait_for_checkpoint(engine.module)

    def load() -> None:
        zeroshard.load(engine.module, directory, scheduler=faulty["load"])

    def fails(error: Exception) -> Callable[..., Any]:
        def raising(*args: Any, **kwargs: Any) -> Any:
            raise error

        return raising

    here, prepared = "zeroshard.engine.saving.checkpoints", "zeroshard.engine.saving.prepared_load"
    cases: list[tuple[Callable[[], object], str, Exception, str]] = [
        (save, "zeroshard.checkpoint.saver.write_pieces", zlib.error("odd"), "error: odd"),
        (partial(save, True), "zeroshard.checkpoint.saver.write_pieces", OSError(5, "bad disk", "f"), "f: bad disk"),
        (partial(save, True), "zeroshard.checkpoint.staging.Staging.copy", MemoryError("full"), "MemoryError: full"),
        (save, f"{here}.buffer_sums", ValueError("sums"), "ValueError: sums"),
        (save, f"{here}.pieces", LookupError("pieces"), "LookupError: pieces"),
        (load, f"{here}.CheckpointReader", OSError(5, "bad disk"), "bad disk"),
        (load, f"{prepared}.loading.apply", ArithmeticError("late"), "ArithmeticError: late.*do not continue"),
        (load, f"{prepared}.set_generators", BufferError("later"), "BufferError: later.*do not continue"),
    ]
    for call, place, error, said in cases:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(place, fails(error))
            started = time.monotonic()
            with pytest.raises(CheckpointError, match=f"(?s){said}" if rank == 1 else f"(?s)rank 1 failed: .*{said}"):
                call()
            assert time.monotonic() - started < 5, place
        torch.distributed.barrier()
        assert sorted(os.listdir(directory)) == ["latest", "whole"], place
        torch.distributed.barrier()
    for at, said in (("save", "RuntimeError: no state today"), ("load", "KeyError: 'missing'.*do not continue")):
        faulty[at] = _Faulty(at if rank == 1 else "")
        with pytest.raises(CheckpointError, match=f"(?s){said}" if rank == 1 else f"(?s)rank 1 failed: .*{said}"):
            (save if at == "save" else load)()
    faulty = dict.fromkeys(("save", "load"), _Faulty(""))
    raising += ["client"] * rank
    with pytest.raises(CheckpointError, match="LookupError: no client"):
        save()
    load()
    engine.destroy()


def _refusals(rank: int, world_size: int, directory: str) -> None:
    for name in ("damage", "misfit", "misuse", "unforeseen"):
        os.makedirs(f"{directory}/{name}", exist_ok=True)
    _damage(f"{directory}/damage", rank)
    _misfit(f"{directory}/misfit")
    _misuse(f"{directory}/misuse", rank)
    _unforeseen(f"{directory}/unforeseen", rank)


def test_what_is_damaged_missing_or_of_another_run_is_refused_on_all_ranks_and_nothing_changes(tmp_path: Path) -> None:
    run_ranks(2, _refusals, str(tmp_path))


@pytest.mark.parametrize(
    "tag",
    ["", ".", "..", "a/b", "/etc", "../up", ".hidden", "a\\b", "a\n", "a\0", "-x", " a", "latest/", "ü", "a" * 300],
)
def test_tags_that_are_no_plain_names_are_refused(tag: str) -> None:
    with pytest.raises(CheckpointError, match="checkpoint tag"):
        check_tag(tag)


def test_a_tag_that_is_too_long_or_begins_wrongly_is_told_so() -> None:
    for tag in ("-rf", "a" * 300):
        with pytest.raises(CheckpointError, match="a letter or digit first, at most 201"):
            check_tag(tag)


@pytest.mark.parametrize("tag", ["global_step10", "a", "1", "epoch-3.final", "a.b"])
def test_plain_names_are_tags(tag: str) -> None:
    check_tag(tag)
