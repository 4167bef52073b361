"""A script for elastic jobs that writes down what each rank did: every step with its samples, and the state at the end.

    zeroshard run --nodes MIN:MAX ... tests/support/elastic_train.py DIRECTORY STEPS SHARD SECONDS [CHECKPOINTS]

DIRECTORY/log gets lines of JSON from each rank, written at once, so that a kill leaves whole lines: before a step with
its samples, and after it. A step that any rank has made has the samples of all its ranks, for none ends it alone; so a
rank that is killed after a step, and before its second line, has left what it trained on. `read_log` and `trained_on`
give them back; `train` is also run by plain ranks, for a continuation that was planned.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import zeroshard
from zeroshard.elastic.place import place_in

SAMPLES, BATCH = 4800, 24


@dataclass(frozen=True)
class Line:
    """What a rank wrote: it `tries` the `step`th step with these samples, has made it (`step`), or has `resumed` it."""

    what: str
    step: int
    round: int
    rank: int
    ranks: int
    when: float
    samples: tuple[int, ...] = ()
    more: str = ""


def train(
    directory: Path,
    steps: int,
    shard: int,
    seconds: float = 0.0,
    checkpoints: Path | None = None,
    every: int = 0,
) -> None:
    """Train to `steps` steps, each `seconds` long at least, with a checkpoint at the end and after `every` steps."""
    torch.manual_seed(3)
    if torch.cuda.is_available():
        zeroshard.init_distributed("cpu:gloo,cuda:gloo")  # all ranks may share a GPU, which NCCL refuses
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    config: dict[str, Any] = {
        "elasticity": {"enabled": True, "max_train_batch_size": BATCH, "micro_batch_sizes": [1], "version": 0.1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, **({"mics_shard_size": shard} if shard else {})},
        "checkpoint": {"memory_steps": 1, **({} if checkpoints is None else {"directory": str(checkpoints)})},
    }
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES))
    engine, _, loader, _ = zeroshard.initialize(model=model, config=config, training_data=data)
    folder, _ = engine.resume()
    place = place_in(os.environ)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    number = -1 if place is None else place.round

    def write(what: str, samples: Sequence[int] = (), more: str = "", ahead: int = 0) -> None:
        line = [what, engine.global_steps + ahead, number, rank, ranks, time.time(), samples, more]
        with (directory / "log").open("ab", buffering=0) as log:
            log.write(json.dumps(line).encode() + b"\n")

    write("resumed", more=str(folder))
    read: list[int] = []
    while engine.global_steps < steps:
        for (numbers,) in loader or ():
            read += numbers.tolist()
            values = ((numbers[:, None] * torch.arange(1, 17) % 11).float() / 11).to(engine.device)
            before = engine.global_steps
            engine.backward((engine(values) - values.sum(1, keepdim=True)).square().mean())
            if engine._batching.at_boundary:
                time.sleep(seconds)
                write("tries", read, ahead=1)
                read = []
            try:
                engine.step()
            finally:
                if engine.global_steps > before:
                    write("step")
            if every and engine.global_steps > before and engine.global_steps % every == 0:
                engine.save_checkpoint(checkpoints or ".", background=True)
            if engine.global_steps == steps:
                break
    state = zeroshard.full_state_dict(engine.module)
    digest = hashlib.sha256(b"".join(value.cpu().numpy().tobytes() for _, value in sorted(state.items()))).hexdigest()
    write("end", more=digest)
    if checkpoints is not None:
        engine.save_checkpoint(checkpoints)
    engine.destroy()


def read_log(directory: Path) -> list[Line]:
    """All lines in the order in which they were written; the last may be half a line yet."""
    path = directory / "log"
    text = path.read_text() if path.exists() else ""
    found: list[Line] = []
    for line in text[: text.rfind("\n") + 1].splitlines():
        what, step, number, rank, ranks, when, samples, more = json.loads(line)
        found.append(Line(what, step, number, rank, ranks, when, tuple(samples), more))
    return found


def trained_on(lines: Sequence[Line]) -> dict[int, list[int]]:
    """The samples of each step that the final state has: those of all ranks in the last round that made it."""
    last: dict[int, int] = {}
    for line in lines:
        if line.what == "step":
            last[line.step] = max(last.get(line.step, -1), line.round)
    found: dict[int, list[int]] = {}
    for line in lines:
        if line.what == "tries" and line.round == last.get(line.step):
            found.setdefault(line.step, []).extend(line.samples)
    return {step: sorted(samples) for step, samples in found.items()}


def planned(steps: int) -> dict[int, list[int]]:
    """The samples of each step of a run in which nothing happens."""
    found: dict[int, list[int]] = {}
    per_epoch = SAMPLES // BATCH
    for step in range(steps):
        epoch, place = divmod(step, per_epoch)
        generator = torch.Generator()
        generator.manual_seed(epoch)
        order = torch.randperm(SAMPLES, generator=generator).tolist()
        found[step + 1] = sorted(order[place * BATCH : (place + 1) * BATCH])
    return found


def main() -> None:
    directory, steps, shard, seconds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    checkpoints = Path(sys.argv[5]) if len(sys.argv) > 5 else None
    every = 0 if checkpoints is None else 50
    zeroshard.run_elastic(lambda: train(directory, steps, shard, seconds, checkpoints, every))


if __name__ == "__main__":
    main()
