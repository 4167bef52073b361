"""Twelve shapes of models, compiled, at stage 3: a step with products in fp8 beside one in bf16.

    python -m benchmarks fp8-shapes [--windows 4] [--steps 6] [--recipe tensorwise] [--graph] [--json]

Layers are chosen as zeroshard chooses them by itself, so a shape that can't gain by fp8 stays in bf16 and its ratio is
1 but for noise. Both engines of a shape are in memory at once and take turns, so that what slows the card down slows
both. Models have few blocks and a small vocabulary: embedding and head are not what is compared. With four blocks
(`--layers 4`) the host's time for the root, the optimizer and the loop, which no layer has a part in, counts much. With
`--graph` steps are replayed as a CUDA graph and the host has no part in them at all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import zeroshard
from benchmarks.llama import Llama, Shape
from benchmarks.setting import BETAS, DECAY
from benchmarks.train import start

VOCABULARY = 8192
WIDE = 5e7
"""Elements of the widest layer above which two engines of all blocks need more than one GPU has."""


@dataclass(frozen=True)
class Case:
    """A model's width, heads, key heads and feed-forward width, and what a micro-batch is."""

    name: str
    dim: int
    heads: int
    kv_heads: int
    ffn: int
    batch: int
    length: int

    def shape(self, layers: int) -> Shape:
        return Shape(self.dim, layers, self.heads, self.kv_heads, self.ffn, VOCABULARY)


CASES = (
    Case("256", 256, 4, 4, 1024, 8, 512),
    Case("512", 512, 8, 8, 1536, 8, 512),
    Case("768, as GPT-2", 768, 12, 12, 3072, 8, 1024),
    Case("1024, 512 tokens", 1024, 16, 16, 2816, 1, 512),
    Case("1024", 1024, 16, 16, 4096, 4, 1024),
    Case("1536", 1536, 12, 2, 8960, 4, 2048),
    Case("2048, one sequence", 2048, 16, 16, 5632, 1, 2048),
    Case("2048", 2048, 32, 8, 8192, 4, 2048),
    Case("3072", 3072, 24, 8, 8192, 4, 2048),
    Case("4096, one sequence", 4096, 32, 32, 11008, 1, 2048),
    Case("4096, as Llama 3 8B", 4096, 32, 8, 14336, 4, 2048),
    Case("5120", 5120, 40, 40, 13824, 2, 2048),
)


@dataclass(frozen=True)
class Row:
    """Seconds of a step with each, and the layers that take part in fp8."""

    case: str
    bf16: float
    fp8: float
    taken: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=12, help="blocks; half as many of the two widest models")
    parser.add_argument("--recipe", choices=[one.value for one in zeroshard.Scaling], default="tensorwise")
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first ones")
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = start()
    rows = [measure(case, device, options) for case in CASES[: options.cases]]
    if options.json:
        print(json.dumps([vars(row) for row in rows]))
    else:
        Console(width=120).print(_table(rows, graph=options.graph))
    dist.destroy_process_group()
    return 0


def measure(case: Case, device: torch.device, options: argparse.Namespace) -> Row:
    """Let both engines take turns; a window's time is that of its steps, and the median window counts."""
    torch._dynamo.reset()
    tokens = case.batch * case.length
    fp8 = zeroshard.Fp8(zeroshard.Scaling(options.recipe), None, tokens)
    steps, closes, taken = [], [], 0
    for products in (None, fp8):
        depth = options.layers if case.dim * case.ffn < WIDE else max(1, options.layers // 2)
        step, close, layers = _engine(case.shape(depth), case, device, products, graph=options.graph)
        steps.append(step)
        closes.append(close)
        taken = layers
    times: list[list[float]] = [[], []]
    for window in range(-1, options.windows):
        for step, found in zip(steps, times, strict=True):
            seconds = _window(step, device, options.steps)
            if window >= 0:
                found.append(seconds)
    for close in closes:
        close()
    return Row(case.name, statistics.median(times[0]), statistics.median(times[1]), taken)


def _engine(
    shape: Shape, case: Case, device: torch.device, products: zeroshard.Fp8 | None, *, graph: bool
) -> tuple[Callable[[], None], Callable[[], None], int]:
    """A step, what ends the engine, and how many layers multiply in fp8."""
    torch.manual_seed(0)
    with zeroshard.Init(device=device):
        model = Llama(shape)
    model.compile_blocks()
    recipe = zeroshard.Recipe(
        sharding=zeroshard.STAGES[3],
        precision=zeroshard.Precision(param="bf16", matmul=products),
        policy=zeroshard.ExecutionPolicy(clip_norm=1.0, overlap_step=True),
    )
    sharded, optimizer = zeroshard.shard(model, _adamw(model.parameters()), plan=recipe, device=device)
    ids = torch.randint(VOCABULARY, (case.batch, case.length), device=device)

    def step() -> None:
        sharded(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = zeroshard.plan_of(sharded).policy.products
    taken = zeroshard.GraphedStep(sharded, step, required=True) if graph else step
    return taken, lambda: zeroshard.close(sharded), 0 if found is None else len(found.layers)


def _adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, betas=BETAS, weight_decay=DECAY)


def _window(step: Callable[[], None], device: torch.device, steps: int) -> float:
    """Seconds of a step, the mean of some."""
    _finish(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    _finish(device)
    return (time.perf_counter() - began) / steps


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _table(rows: list[Row], *, graph: bool) -> Table:
    table = Table(title=f"step in ms, compiled, stage 3{', as a CUDA graph' if graph else ''}")
    for name in ("shape", "bf16", "fp8", "speed-up", "layers in fp8"):
        table.add_column(name, justify="left" if name == "shape" else "right")
    for row in rows:
        ratio = row.bf16 / row.fp8
        table.add_row(row.case, f"{row.bf16 * 1e3:.2f}", f"{row.fp8 * 1e3:.2f}", f"{ratio:.3f}", str(row.taken))
    return table


if __name__ == "__main__":
    raise SystemExit(main())
