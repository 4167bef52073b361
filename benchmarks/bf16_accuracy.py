"""How far bf16 training strays from fp32: zeroshard, DeepSpeed and DDP with autocast on the same batches.

    python benchmarks/bf16_accuracy.py [--steps 100] [--seeds 3] [--stage 3] [--deepspeed-python PATH] [--json FILE]

Two gloo ranks train a small transformer on the bytes of Python's topics, with 8 micro-batches a step. Every contender
sees the same weights and the same batches at the same step for each seed; the loss of a step is the mean over ranks and
micro-batches, taken in fp32. Two figures come out, each averaged over the seeds:

    distance   mean over the steps of |loss - loss of the fp32 run|
    offset     |mean loss over all steps - that of DDP with autocast and an fp32 master|

Every contender runs in its own launch, so one that fails or isn't installed leaves the others alone. DeepSpeed is no
dependency: give the interpreter of an environment that has it (installed with DS_BUILD_OPS=0), or it is left out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pydoc_data.topics
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

CONTENDERS = ("fp32", "autocast", "zeroshard", "deepspeed")
WIDTH, HEADS, BLOCKS, LENGTH = 64, 4, 3, 64
MICRO_BATCH, ACCUMULATION = 4, 8
RATE, BETAS, DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0


class Block(nn.Module):
    """Attention and a multilayer perceptron, each normalised before and added, on (batch, length, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.mix(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class ByteModel(nn.Module):
    """Predicts the next byte; gives the mean loss in nats, in fp32, for int64 (batch, length + 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids[:, :-1]) + self.place(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Trainer(Protocol):
    """Takes the micro-batches of one step and gives the loss of each."""

    def __call__(self, micro_batches: list[torch.Tensor]) -> list[float]: ...


def ddp_trainer(model: nn.Module, autocast: bool) -> Trainer:
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY)

    def train(micro_batches: list[torch.Tensor]) -> list[float]:
        losses = []
        for index, ids in enumerate(micro_batches):
            ddp.require_backward_grad_sync = index == len(micro_batches) - 1
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = ddp(ids)
            (loss / len(micro_batches)).backward()
            losses.append(float(loss.detach()))
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return train


def config(stage: int) -> dict[str, Any]:
    """The DeepSpeed JSON that both engines read, without the optimizer."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }


def engine_trainer(engine: Any) -> Trainer:
    def train(micro_batches: list[torch.Tensor]) -> list[float]:
        losses = []
        for ids in micro_batches:
            loss = engine(ids)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses

    return train


def zeroshard_trainer(model: nn.Module, stage: int) -> Trainer:
    import zeroshard

    optimizer = {"type": "AdamW", "params": {"lr": RATE, "betas": BETAS, "weight_decay": DECAY}}
    engine = zeroshard.initialize(
        model=model, model_parameters=model.parameters(), config={**config(stage), "optimizer": optimizer}
    )[0]
    return engine_trainer(engine)


def has_deepspeed() -> bool:
    """Whether this interpreter has DeepSpeed itself; zeroshard's package of that name would be measured twice."""
    try:
        return "+zeroshard" not in importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return False


def deepspeed_trainer(model: nn.Module, stage: int) -> Trainer:
    if not has_deepspeed():
        raise SystemExit(f"{sys.executable} has no deepspeed but zeroshard's; give one that has to --deepspeed-python")
    import deepspeed  # pyright: ignore[reportMissingImports]

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY)
    settings = {**config(stage), "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    return engine_trainer(engine)


def make_trainer(contender: str, seed: int, stage: int) -> Trainer:
    torch.manual_seed(seed)
    model = ByteModel()
    if contender == "zeroshard":
        return zeroshard_trainer(model, stage)
    if contender == "deepspeed":
        return deepspeed_trainer(model, stage)
    return ddp_trainer(model, autocast=contender == "autocast")


def batches(seed: int) -> Callable[[], torch.Tensor]:
    """Gives the next micro-batch of this rank, int64 (MICRO_BATCH, LENGTH + 1)."""
    text = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    data = torch.tensor(list(text.encode()), dtype=torch.int64)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())

    def take() -> torch.Tensor:
        starts = torch.randint(len(data) - LENGTH - 1, (MICRO_BATCH,), generator=generator)
        return torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()])

    return take


def work(args: argparse.Namespace) -> None:
    """One rank of one contender: rank 0 leaves a list of losses for each seed in --result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    curves = []
    for seed in range(args.seeds):
        train = make_trainer(args.worker, seed, args.stage)
        take = batches(seed)
        curve = []
        for _ in range(args.steps):
            mean = torch.tensor([statistics.fmean(train([take() for _ in range(ACCUMULATION)]))], dtype=torch.float64)
            dist.all_reduce(mean)
            curve.append(mean.item() / dist.get_world_size())
        curves.append(curve)
    if dist.get_rank() == 0:
        args.result.write_text(json.dumps(curves))
    dist.destroy_process_group()


def curves_of(contender: str, args: argparse.Namespace, folder: Path) -> list[list[float]] | None:
    """Runs one contender on all ranks; None, with a line that says why, where it is not installed or fails."""
    python = args.deepspeed_python if contender == "deepspeed" else sys.executable
    if python is None:
        print("deepspeed: left out; give --deepspeed-python, an interpreter that has it installed")
        return None
    result = folder / f"{contender}.json"
    # torchrun rather than `zeroshard run`: the interpreter with DeepSpeed need not have zeroshard.
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(args.nproc), "--rdzv-backend", "c10d"]
    script = [__file__, "--worker", contender, "--result", str(result), "--steps", str(args.steps)]
    script += ["--seeds", str(args.seeds), "--stage", str(args.stage)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    log = folder / f"{contender}.log"
    with log.open("w") as file:
        command = [python, *launch, "--rdzv-endpoint", "localhost:0", *script]
        code = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    if code != 0:
        tail = "\n".join(log.read_text().splitlines()[-args.tail :])
        print(f"{contender}: failed with code {code}:\n{tail}")
        return None
    return json.loads(result.read_text())


def distance(curves: list[list[float]], reference: list[list[float]]) -> list[float]:
    """For each seed the mean over the steps of the distance of two curves."""
    return [
        statistics.fmean(abs(a - b) for a, b in zip(one, other, strict=True))
        for one, other in zip(curves, reference, strict=True)
    ]


def offset(curves: list[list[float]], reference: list[list[float]]) -> list[float]:
    """For each seed the difference of the mean losses, without sign."""
    return [abs(statistics.fmean(one) - statistics.fmean(other)) for one, other in zip(curves, reference, strict=True)]


def report(curves: dict[str, list[list[float]]], args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{args.steps} steps x {ACCUMULATION} micro-batches, {args.seeds} seeds, stage {args.stage}")
    for column in ("contender", "last loss", "distance to fp32", "by seed", "offset to autocast"):
        table.add_column(column)
    result: dict[str, dict[str, Any]] = {}
    for name, runs in curves.items():
        far = distance(runs, curves["fp32"])
        off = offset(runs, curves["autocast"])
        last = statistics.fmean(run[-1] for run in runs)
        result[name] = {"last_loss": last, "distance": far, "offset": off}
        seeds = " ".join(f"{value:.2e}" for value in far)
        table.add_row(name, f"{last:.4f}", f"{statistics.fmean(far):.3e}", seeds, f"{statistics.fmean(off):.3e}")
    Console(width=110).print(table)
    if args.json is not None:
        args.json.write_text(json.dumps({"torch": torch.__version__, "result": result}, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--stage", type=int, choices=range(4), default=3)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--tail", type=int, default=15, help="lines of a failed contender's log to show")
    here = sys.executable if has_deepspeed() else None
    parser.add_argument("--deepspeed-python", default=here, help="interpreter that has deepspeed 0.19.8")
    parser.add_argument(
        "--only", choices=CONTENDERS, action="append", help="besides fp32 and autocast; may be repeated"
    )
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.worker is not None:
        work(args)
        return 0
    curves: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for contender in CONTENDERS:
            if contender in ("fp32", "autocast") or args.only is None or contender in args.only:
                found = curves_of(contender, args, Path(folder))
                if found is not None:
                    curves[contender] = found
    if "fp32" not in curves or "autocast" not in curves:
        return 1
    report(curves, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
