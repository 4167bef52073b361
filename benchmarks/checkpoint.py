"""How fast checkpoints are written and read, and how long training waits, beside what the disk can do.

    python -m benchmarks.checkpoint [--gib 4] [--nproc 2] [--directory .] [--repeat 3] [--encrypt]
                                   [--json FILE]

A stage 3 state of `--gib` GiB (fp32 parameters and Adam's two moments) on `--nproc` gloo ranks. In turn, `--repeat`
times: `dd oflag=direct bs=16M` of as many bytes, a save, `dd` again, a save in the background, a load. A rate is the
median of the repeats; that of `dd` counts its writes before and after each save, since a disk that others use changes
from minute to minute. `stall` is the time in which training waits for a save in the background: the copy into host
memory, which `copy` measures for itself. A load reads every byte twice, once to check it before anything is changed;
what it reads was written directly, so the first time comes from the disk. With `--encrypt` a save and a load of an
encrypted checkpoint follow each plain one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from zeroshard.checkpoint.keys import LocalKey

WIDTH = 4096
GOAL = 0.85
ENCRYPTED = 0.9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the state over all ranks")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk that is measured")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--encrypt", action="store_true", help="encrypted checkpoints as well")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        command = ["run", "--nproc", str(options.nproc), "-m", "benchmarks.checkpoint", *sys.argv[1:]]
        return subprocess.run([sys.executable, "-m", "zeroshard", *command]).returncode
    zeroshard.init_distributed()
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=options.directory) as made:
        shared: list[str | None] = [made]
        dist.broadcast_object_list(shared)
        assert shared[0] is not None
        found = measure(options.gib, options.repeat, Path(shared[0]), encrypt=options.encrypt)
        dist.barrier()
    if dist.get_rank() == 0:
        report(found, options.json)
    dist.destroy_process_group()
    return 0


def measure(gib: float, repeat: int, folder: Path, *, encrypt: bool = False) -> dict[str, list[float]]:
    """Rates in GiB/s and times in seconds, of the slowest rank."""
    layers = max(1, round(gib * 2**30 / (3 * 4 * WIDTH * WIDTH)))
    state_gib = layers * 3 * 4 * WIDTH * WIDTH / 2**30
    with zeroshard.Init(device=torch.device("cpu")):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4), plan=3)
    model(torch.ones(1, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    found: dict[str, list[float]] = defaultdict(list)

    def rate(name: str, work: Callable[[], object]) -> None:
        found[name].append(state_gib / _seconds(work))

    background, key = "background", LocalKey(bytes(32))
    zeroshard.save(model, folder, background, background=True)  # takes the memory for the copy
    zeroshard.wait_for_checkpoint(model)
    for _ in range(repeat):
        rate("dd", lambda: _dd(folder, state_gib))
        rate("save", lambda: zeroshard.save(model, folder, "save"))
        rate("dd", lambda: _dd(folder, state_gib))
        begun = time.monotonic()
        found["stall"].append(_seconds(lambda: zeroshard.save(model, folder, background, background=True)))
        zeroshard.wait_for_checkpoint(model)
        found["background"].append(state_gib / _slowest(time.monotonic() - begun))
        found["copy"].append(_copy_seconds(state_gib / dist.get_world_size()))
        rate("load", lambda: zeroshard.load(model, folder, "save"))
        if encrypt:
            rate("encrypted save", lambda: zeroshard.save(model, folder, "encrypted", encryption_key=key))
            rate("encrypted load", lambda: zeroshard.load(model, folder, "encrypted", encryption_key=key))
    zeroshard.close(model)
    found["gib"] = [state_gib]
    return found


def _seconds(work: Callable[[], object]) -> float:
    dist.barrier()
    begun = time.monotonic()
    work()
    return _slowest(time.monotonic() - begun)


def _slowest(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def _dd(folder: Path, gib: float) -> None:
    """Rank 0 alone: one writer at full speed, the others wait."""
    if dist.get_rank() == 0:
        file = folder / "dd"
        blocks = max(1, round(gib * 64))
        words = ["dd", "if=/dev/zero", f"of={file}", "bs=16M", f"count={blocks}", "oflag=direct", "conv=fsync"]
        subprocess.run(words, check=True, stderr=subprocess.DEVNULL)
        file.unlink()
    dist.barrier()


def _copy_seconds(gib: float) -> float:
    source = torch.ones(round(gib * 2**28))
    target = torch.ones_like(source)
    return _seconds(lambda: target.copy_(source))


def report(found: dict[str, list[float]], file: Path | None) -> None:
    middle = {name: statistics.median(values) for name, values in found.items()}
    print(f"state {middle['gib']:.2f} GiB on {dist.get_world_size()} ranks, torch {torch.__version__}")
    print(f"  dd oflag=direct     {middle['dd']:6.2f} GiB/s")
    for name, label in (("save", "save"), ("background", "save in background"), ("load", "load")):
        against = "" if name == "load" else f"   {middle[name] / middle['dd']:.0%} of dd (goal {GOAL:.0%})"
        print(f"  {label:18}  {middle[name]:6.2f} GiB/s{against}")
    for name in ("save", "load"):
        if values := found.get(f"encrypted {name}"):
            rate = statistics.median(values)
            share = f"{rate / middle[name]:.0%} of {name} (goal {ENCRYPTED:.0%})"
            print(f"  encrypted {name}      {rate:6.2f} GiB/s   {share}")
    print(f"  training waits      {middle['stall']:6.2f} s; a copy of the rank's state takes {middle['copy']:.2f} s")
    if file is not None:
        file.write_text(json.dumps({**found, "ranks": dist.get_world_size()}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
