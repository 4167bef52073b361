"""Trains a small GPT on two or more processes: the script that `demo.py` launches, and one to start your own from.

    zeroshard run --nproc 2 examples/gpt.py --out runs/demo [--stop-at 350] [--resume]

It reads the corpus that `demo.py` prepared in --out, and leaves there: metrics.jsonl (a line for each step),
checkpoint/, and at the end export/, a folder that `transformers` loads. The parts that are zeroshard's are the four
calls on `engine`; all else is plain PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from corpus import END, LENGTH, Windows, load
from display import Display
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import zeroshard
from zeroshard.plan.report import memory_table

HELD_OUT_WINDOWS = 16
EVALUATE_EVERY = 50


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder with corpus.json; everything is written there")
    parser.add_argument("--config", type=Path, default=Path(__file__).parent / "configs" / "gpt.json")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in the whole run")
    parser.add_argument("--stop-at", type=int, help="save a checkpoint after this step and stop")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--stage", type=int, choices=range(4), help="ZeRO stage, instead of the config's")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def build_model(vocabulary: int, end: int) -> LlamaForCausalLM:
    """A Llama of 4 blocks of width 256 with a head of its own: 4.3 million parameters at a vocabulary of 2,048."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=end,
        eos_token_id=end,
    )
    return LlamaForCausalLM(config)


def read_config(path: Path, steps: int, stage: int | None) -> dict[str, Any]:
    """The DeepSpeed JSON with the two things that the command line may change."""
    config = json.loads(path.read_text())
    config["scheduler"]["params"]["total_num_steps"] = steps
    config["scheduler"]["params"]["warmup_num_steps"] = min(
        config["scheduler"]["params"]["warmup_num_steps"], max(2, steps // 5)
    )
    if stage is not None:
        config["zero_optimization"]["stage"] = stage
    return config


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().float().reshape(1).clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


@torch.no_grad()
def held_out_loss(engine: Any, windows: torch.Tensor) -> float:
    """Mean loss over held-out windows, each rank taking an equal share."""
    rank, world = dist.get_rank(), dist.get_world_size()
    share = max(1, len(windows) // world)
    mine = windows[(rank * share) % len(windows) :][:share].to(engine.device)
    engine.eval()
    loss = engine(input_ids=mine, labels=mine).loss
    engine.train()
    return mean_over_ranks(loss)


def export(model: LlamaForCausalLM, folder: Path, tokenizer_file: Path) -> None:
    """Writes what `transformers.AutoModelForCausalLM.from_pretrained(folder)` reads."""
    state = zeroshard.full_state_dict(model)  # every rank takes part, rank 0 gets it
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in state.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        GenerationConfig.from_model_config(model.config).save_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), bos_token=END, eos_token=END)
        tokenizer.save_pretrained(folder)
    dist.barrier()


def train(engine: Any, windows: Windows, held_out: torch.Tensor, position: int, last: int, display: Display) -> int:
    """Trains to optimizer step `last` and gives the data position there: the count of windows consumed by all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    micro = engine.train_micro_batch_size_per_gpu()
    if engine.global_steps == 0:
        display.held_out(0, held_out_loss(engine, held_out))
    while engine.global_steps < last:
        started = time.perf_counter()
        ids = windows.take(position + rank * micro, micro).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        position += micro * world

        mean, seconds = mean_over_ranks(loss), time.perf_counter() - started
        if engine.global_steps % EVALUATE_EVERY == 0 or engine.global_steps == last:
            display.held_out(engine.global_steps, held_out_loss(engine, held_out))
        display.step(engine.global_steps, mean, ids.numel() * world, seconds, engine.get_lr()[0])
    return position


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    corpus = load(args.out)
    windows = Windows(corpus.train, LENGTH, args.seed)
    held_out = Windows(corpus.held_out, LENGTH).in_order(HELD_OUT_WINDOWS)

    model = build_model(corpus.vocabulary, end=0)
    config = read_config(args.config, args.steps, args.stage)
    engine, _, _, _ = zeroshard.initialize(model=model, model_parameters=model.parameters(), config=config)

    position = 0
    if args.resume:
        _, client = engine.load_checkpoint(args.out / "checkpoint")
        position = (client or {})["position"]
    last = min(args.stop_at or args.steps, args.steps)
    metrics, quiet = args.out / "metrics.jsonl", dist.get_rank() != 0
    with Display(metrics, args.steps, engine.global_steps, last, quiet) as display:
        if not args.resume:
            display.memory(memory_table(engine.plan))
        position = train(engine, windows, held_out, position, last, display)
        if last < args.steps:
            engine.save_checkpoint(args.out / "checkpoint", f"step{last}", client_state={"position": position})
    if last == args.steps:
        export(model, args.out / "export", args.out / "tokenizer.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
