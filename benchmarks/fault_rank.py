"""The ranks of `python -m benchmarks faults`: a small model that trains with a fault, and what zeroshard says of it.

A fault is real where it can be (another process on the core, a collection of garbage, a signal, tc); a disk that
answers late is the product's reader and writer with a wait in front, since no disk can be slowed down by a program.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import zeroshard
from benchmarks.fault_kinds import Fault
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.engine import Engine
from zeroshard.nvme.memory import NvmeMemory
from zeroshard.nvme.transfers import Transfer, Transfers

VOCABULARY = 256
RATE = 3e-3
NOISE = 0.3
"""Share of tokens that can't be known, so that loss and norm don't fall to nothing."""
BALLAST = 24 << 20
"""Elements in float32 that are saved and not trained."""
_BUSY = "while True: pass"


class Model(nn.Module):
    """Predicts the next token by some wide layers.

    Args:
        work: seconds on a processor that each forward computes for nothing.
        sleep: seconds in the middle of each forward.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, fault.width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(fault.width), nn.Linear(fault.width, fault.width), nn.GELU())
            for _ in range(fault.layers)
        )
        self.head = nn.Linear(fault.width, VOCABULARY)
        self.work, self.sleep = 0.0, 0.0
        saved_alone = BALLAST if fault.kind == "saving" else 0
        self.ballast = nn.Parameter(torch.zeros(saved_alone), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of the next tokens."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        if self.work:
            _waste(x.detach(), self.work)
        if self.sleep:
            time.sleep(self.sleep)
        logits = self.head(x)[:, :-1].float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _waste(x: torch.Tensor, seconds: float) -> None:
    """Compute for so long, whatever the processor is."""
    flat, begin = x.flatten(0, 1), time.thread_time()
    while time.thread_time() - begin < seconds:
        flat.T.mm(flat)


class Tokens(Dataset[torch.Tensor]):
    """Rows that count in sevens, with random tokens among them; a row may come late.

    Args:
        rank: which has the fault.
    """

    def __init__(self, fault: Fault, rank: int) -> None:
        self._fault = fault
        self._late = fault.kind == "loader" and fault.rank in (rank, -1)
        self._longer = fault.numbers["times"] if fault.kind == "tokens" and fault.rank == rank else 1.0
        self._batch = 0

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, number: int) -> torch.Tensor:
        fault = self._fault
        self._batch += 1
        step = self._batch // fault.rows
        if self._late and step >= fault.first and self._batch % (fault.rows * int(fault.numbers["every"])) == 0:
            time.sleep(fault.numbers["seconds"])
        length = int(fault.length * self._longer)
        chance = torch.Generator().manual_seed(number)
        tokens = (number * 13 + 7 * torch.arange(length)) % VOCABULARY
        noise = torch.randint(VOCABULARY, (length,), generator=chance)
        return torch.where(torch.rand(length, generator=chance) < NOISE, noise, tokens)


class Late(Transfers):
    """A reader and writer whose disk answers late."""

    def __init__(self, inner: Transfers, seconds: float) -> None:
        self.name, self._inner, self._seconds = inner.name, inner, seconds

    def start(self, *, write: bool, file: int, offset: int, address: int, nbytes: int) -> Transfer:
        """As the inner one does."""
        inner = self._inner.start(write=write, file=file, offset=offset, address=address, nbytes=nbytes)
        return LateTransfer(inner, self._seconds)

    def close(self) -> None:
        """As the inner one does."""
        self._inner.close()


class LateTransfer(Transfer):
    """A transfer whose answer comes later."""

    def __init__(self, inner: Transfer, seconds: float) -> None:
        self._inner, self._seconds = inner, seconds

    def wait(self, seconds: float) -> None:
        """Wait for the disk, and longer."""
        time.sleep(self._seconds)
        self._inner.wait(seconds)


def config_of(fault: Fault, folder: str) -> dict[str, Any]:
    """The config of a run, whose logs are in `folder`."""
    zero: dict[str, Any] = {"stage": fault.stage}
    if fault.kind == "disk":
        zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": f"{folder}/disk"}}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": fault.rows,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE}},
        "zero_optimization": zero,
        "run_log": {"path": f"{folder}/run.jsonl"},
    }
    if fault.kind in ("nan", "overflow"):
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    return config


def start(fault: Fault, rank: int, folder: str) -> tuple[Engine, Iterator[torch.Tensor]]:
    """An engine and its batches."""
    torch.manual_seed(fault.seed)
    engine, _, loader, _ = zeroshard.initialize(
        model=Model(fault), config=config_of(fault, folder), training_data=Tokens(fault, rank)
    )
    assert loader is not None
    return engine, iter(loader)


def train(rank: int, _world: int, fault: Fault, folder: str) -> float:
    """One rank of a run, with its fault; returns the seconds that it was on a processor."""
    Path(folder, "disk").mkdir(exist_ok=True)
    engine, batches = start(fault, rank, folder)
    mine = fault.rank in (rank, -1)
    if fault.kind == "disk" and mine:
        _slow_disk(engine, fault.numbers["seconds"])
    beside = _beside(fault, rank) if fault.kind == "processor" and mine else []
    kept = _heap(fault) if fault.kind == "garbage" and mine else []
    try:
        for step in range(1, fault.steps + 1):
            due = mine and step >= fault.first
            if fault.kind == "resume" and step == fault.steps // 2:
                engine, batches = _resume(engine, fault, rank, folder)
            if due and _ends(engine, fault, step, rank):
                break
            if due:
                _between(engine, fault, step, kept)
            loss = engine(next(batches)) * (_times(fault, step) if due else 1.0)
            engine.backward(loss)
            engine.step()
            if fault.kind in ("saving", "damaged") and step % int(fault.numbers.get("every", fault.steps)) == 0:
                engine.save_checkpoint(f"{folder}/saved")
        if fault.kind == "damaged":
            _damage(engine, folder, rank)
        engine.destroy()
    finally:
        for process in beside:
            process.kill()
            process.wait()
    return time.process_time()


def _between(engine: Engine, fault: Fault, step: int, kept: list[Any]) -> None:
    """What the fault does before a step."""
    numbers, model = fault.numbers, engine.module
    assert isinstance(model, Model)
    if fault.kind == "script":
        time.sleep(numbers["seconds"])
    elif fault.kind == "blocked":
        model.sleep = numbers["seconds"]
    elif fault.kind == "work":
        model.work = numbers["seconds"]
    elif fault.kind == "garbage" and step % int(numbers["every"]) == 0:
        gc.collect()
    elif fault.kind == "leak":
        kept.append(torch.ones(int(numbers["mib"] * 2**18)))
    elif fault.kind == "mismatch" and step == fault.first:
        zeroshard.full_state_dict(engine.module)
    elif fault.kind == "barrier" and step == fault.first:
        dist.barrier()


def _ends(engine: Engine, fault: Fault, step: int, rank: int) -> bool:
    """Whether the rank ends its loop here; it may never return."""
    if step != fault.first:
        return False
    if fault.kind == "lost":
        os.kill(os.getpid(), signal.SIGKILL)
    return fault.kind == "left"


def _times(fault: Fault, step: int) -> float:
    """What the loss is multiplied by."""
    if fault.kind == "nan" and step < fault.first + fault.numbers["count"]:
        return math.nan
    if fault.kind == "overflow":
        return fault.numbers["times"]
    return fault.numbers["times"] if fault.kind == "spike" and step == fault.steps // 2 else 1.0


def _slow_disk(engine: Engine, seconds: float) -> None:
    for memory in handle_of(engine.module).runtime.storage.tiers.values():
        if isinstance(memory, NvmeMemory):
            memory.volume._transfers = Late(memory.volume._transfers, seconds)


def _beside(fault: Fault, rank: int) -> list[subprocess.Popen[bytes]]:
    """Processes that do nothing but take the core of this thread."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[rank % len(cores)]
    os.sched_setaffinity(0, {core})
    found: list[subprocess.Popen[bytes]] = []
    for _ in range(int(fault.numbers["processes"])):
        process = subprocess.Popen([sys.executable, "-S", "-c", _BUSY])
        os.sched_setaffinity(process.pid, {core})
        found.append(process)
    return found


def _heap(fault: Fault) -> list[Any]:
    """Objects that each collection has to visit."""
    return [[number] for number in range(int(fault.numbers["objects"]))]


def _resume(engine: Engine, fault: Fault, rank: int, folder: str) -> tuple[Engine, Iterator[torch.Tensor]]:
    """Save, and go on in a new engine that loads with a mistake."""
    rate = fault.numbers["rate"]
    engine.save_checkpoint(f"{folder}/saved")
    engine.destroy()
    engine, batches = start(fault, rank, folder)
    engine.load_checkpoint(f"{folder}/saved", load_optimizer_states=bool(rate))
    if rate:
        assert engine.optimizer is not None
        for group in engine.optimizer.param_groups:
            group["lr"] = RATE * rate
    return engine, batches


def _damage(engine: Engine, folder: str, rank: int) -> None:
    """Change a byte in the largest file of the checkpoint, and load it."""
    dist.barrier()
    if rank == 0:
        largest = max(Path(folder, "saved").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
        content = bytearray(largest.read_bytes())
        content[-64] ^= 1
        largest.write_bytes(content)
    dist.barrier()
    engine.load_checkpoint(f"{folder}/saved")
