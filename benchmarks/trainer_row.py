"""One row of the Trainer table: a Hugging Face script of the plainest kind, timed from a callback.

    torchrun --nproc-per-node 2 -m benchmarks.trainer_row --engine zeroshard        # needs zeroshard-deepspeed
    torchrun --nproc-per-node 2 -m benchmarks.trainer_row --engine fsdp2

The script is the same for every engine but for what a user writes to choose it: `deepspeed=` a config, the same one for
zeroshard and for DeepSpeed (which of them answers to the name is a matter of what is installed), or `fsdp=True`. The
model is a Llama from a config in transformers' own code, the tokens are random, everything else is Trainer's default:
AdamW, clipping at 1, its look at every loss. `tuned` adds what DeepSpeed's manual advises: the throughput timer, which
synchronises, off, and blocks as leaf modules.

The callback times several steps between two syncs: a sync in each would hide whether the host keeps ahead.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments

from benchmarks.llama import SIZES, Shape
from benchmarks.train import GIB, host_peak, used

ENGINES = ("zeroshard", "fsdp2", "deepspeed", "ddp")
SEED = 0
WARMUP = 4


class WrongPackage(Exception):
    """The engine is not installed, or another package answers to its name."""


@dataclass
class Stopwatch(TrainerCallback):
    """Times runs of `steps` steps after `warmup`, each between two syncs.

    Attributes:
        seconds: per step, one value for each run.
        allocated, reserved: peaks of torch's allocator over the timed steps, bytes.
        used: what is in use on the device after them, by whoever, bytes.
    """

    device: torch.device
    steps: int
    warmup: int
    seconds: list[float] = field(default_factory=list)
    ready: float = 0.0
    allocated: int = 0
    reserved: int = 0
    used: int = 0
    _began: float = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.ready = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        done = state.global_step - self.warmup
        if done < 0 or done % self.steps:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if done:
            self.seconds.append((now - self._began) / self.steps)
        self._measure(first=not done)
        self._began = time.perf_counter()

    def _measure(self, *, first: bool) -> None:
        if self.device.type != "cuda":
            return
        if first:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.used = used(self.device)
        self.allocated = torch.cuda.max_memory_allocated(self.device)
        self.reserved = torch.cuda.max_memory_reserved(self.device)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens: each sample is ids and labels, int64 (length,)."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self.rows = torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(SEED))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def llama_config(shape: Shape, length: int) -> LlamaConfig:
    """transformers' Llama in a shape of the other benchmarks."""
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.dim,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=length,
        tie_word_embeddings=False,
        use_cache=False,
    )


def zero_config(stage: int, *, tuned: bool) -> dict[str, Any]:
    """The JSON of transformers' manual: what Trainer knows is "auto"."""
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    config: dict[str, Any] = {
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
        "gradient_clipping": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    if tuned:
        zero["leaf_module"] = {"classes": ["LlamaDecoderLayer"]}
        config["timers"] = {"throughput": {"enabled": False, "synchronized": False}}
    return config


def chosen(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of TrainingArguments that choose the engine.

    Raises:
        WrongPackage: `deepspeed` is not there, or not the one that is to be measured.
    """
    if args.engine == "fsdp2":
        wrap = {"version": 2, "reshard_after_forward": args.stage == 3, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        return {"fsdp": True, "fsdp_config": {**wrap, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    if args.engine == "ddp":
        return {}
    try:
        import deepspeed  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise WrongPackage(f"{error.name} is not installed") from error
    ours = "+zeroshard" in deepspeed.__version__
    if ours != (args.engine == "zeroshard"):
        raise WrongPackage(f"deepspeed {deepspeed.__version__} answers to the name, wanted is {args.engine}")
    return {"deepspeed": zero_config(args.stage, tuned=args.tuned)}


def tell_deepspeed() -> None:
    """On GPUs accelerate lets DeepSpeed join the ranks; on a CPU torch does, and DeepSpeed has to be told."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    deepspeed.init_distributed("gloo")


def measure(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Train as the script of a user does, and give the row; rank 0's is printed."""
    began = time.perf_counter()
    on_gpu = torch.cuda.is_available()
    shape = SIZES[args.size]
    steps = args.warmup + args.steps * args.repetitions
    settings = TrainingArguments(
        folder,
        bf16=True,
        per_device_train_batch_size=args.batch,
        max_steps=steps,
        learning_rate=1e-4,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        use_cpu=not on_gpu,
        activation_checkpointing=args.checkpointing,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        seed=SEED,
        **chosen(args),
    )
    if args.engine == "deepspeed" and not on_gpu:
        tell_deepspeed()
    world = settings.world_size
    data = Tokens(steps * args.batch * world, args.length, shape.vocabulary)
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(llama_config(shape, args.length))
    watch = Stopwatch(settings.device, args.steps, args.warmup)
    trainer = Trainer(model=model, args=settings, train_dataset=data, callbacks=[watch])
    if trainer.is_fsdp_enabled != (args.engine == "fsdp2"):
        raise WrongPackage("accelerate shards by FSDP2 on GPUs only, and would take DDP here")
    output = trainer.train()
    outside = outside_nbytes(args.engine, trainer)
    seconds = worst(watch.seconds, settings.device)
    allocated, reserved, on_card = worst(
        [watch.allocated + outside, watch.reserved + outside, watch.used], settings.device
    )
    median = statistics.median(seconds)
    return {
        **identity(args, settings.device, world),
        "params": shape.numel,
        "step_s": round(median, 5),
        "step_s_all": [round(value, 5) for value in seconds],
        "tokens_s": round(args.batch * args.length / median),
        "allocated_gib": round(allocated / GIB, 3) if on_gpu else None,
        "reserved_gib": round(reserved / GIB, 3) if on_gpu else None,
        "device_gib": round(on_card / GIB, 3) if on_gpu else None,
        "host_gib": host_peak(),
        "init_s": round(worst([watch.ready - began], settings.device)[0], 2),
        "loss": round(output.training_loss, 4),
        "expected_loss": round(math.log(shape.vocabulary), 4),
    }


def identity(args: argparse.Namespace, device: torch.device, world: int) -> dict[str, Any]:
    """What was measured, and with what."""
    return {
        **{name: getattr(args, name) for name in ("engine", "tuned", "stage", "size", "batch", "length")},
        "checkpointing": args.checkpointing,
        "world": world,
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        **{name: version(name) for name in ("transformers", "accelerate")},
        "python": sys.version.split()[0],
    }


def outside_nbytes(name: str, trainer: Trainer) -> int:
    """Device bytes that zeroshard's ranks share and torch's allocator does not count."""
    if name != "zeroshard":
        return 0
    import zeroshard

    engine: Any = trainer.model_wrapped
    return zeroshard.peer_memory_nbytes(engine.module)


def worst(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each value over the ranks."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


def add_setting(parser: argparse.ArgumentParser) -> None:
    """The options that say what is measured; the same for one row and for the table."""
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3, help="FSDP2: 3 reshards after the forward")
    parser.add_argument("--batch", type=int, default=4, help="sequences per micro-batch and GPU")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations, block by block")
    parser.add_argument("--steps", type=int, default=8, help="steps between two syncs")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=WARMUP)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--tuned", action="store_true", help="what DeepSpeed's manual advises")
    add_setting(parser)
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    row: dict[str, Any]
    with tempfile.TemporaryDirectory() as folder:
        try:
            row = measure(args, folder)
        except WrongPackage as error:
            row = {"engine": args.engine, "tuned": args.tuned, "error": str(error)}
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(row), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
