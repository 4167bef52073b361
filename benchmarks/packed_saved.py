"""What comes out of a training on a base in 4 bits: each file of it opened by transformers, with the same logits."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from benchmarks.packed_model import Width, adapted, batch, config_of, quantization

STEPS = 3
FAR = 1e-3
"""Largest distance of logits that are of the same weights, beside the largest of all logits (float32)."""


def saved(width: Width, length: int, device: torch.device, folder: Path) -> bool:
    """Train at stage 3, save, load, merge and open; prints a line for each, and gives whether all have the same logits.

    Called by all ranks; rank 0 opens.
    """
    transformers = importlib.import_module("transformers")
    peft = importlib.import_module("peft")
    first = dist.get_rank() == 0
    origin = folder / "base"
    if first:
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config_of(width, length)).save_pretrained(origin)
    dist.barrier()

    def loaded(path: Path, **options: Any) -> nn.Module:
        where = {"": device}
        found = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, device_map=where, **options
        )
        return found.train()  # bitsandbytes may compute otherwise in evaluation

    def quantized() -> nn.Module:
        return loaded(origin, quantization_config=quantization(torch.float32))

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=batch(width, length, device, 99)["input_ids"]).logits

    def engine_of() -> Any:
        with zeroshard.QuantizedInit():
            model = quantized()
        engine, *_ = zeroshard.initialize(model=adapted(model, device, trained=True), config=_config())
        return engine

    engine = engine_of()
    for step in range(STEPS):
        loss = engine(**batch(width, length, device, step, dist.get_rank())).loss
        engine.backward(loss)
        engine.step()
    trained = logits(engine)
    engine.save_checkpoint(str(folder / "checkpoint"))
    with zeroshard.GatheredParameters(list(engine.module.parameters())):
        if first:
            engine.module.save_pretrained(folder / "adapter")
        merged = engine.module.merge_and_unload()
        of_merged = logits(merged)
        if first:
            merged.save_pretrained(folder / "merged")
    engine.destroy()
    dist.barrier()
    again = engine_of()
    again.load_checkpoint(str(folder / "checkpoint"))
    found = {"checkpoint, in a new engine": (logits(again), trained)}
    again.destroy()
    if first:
        opened = peft.PeftModel.from_pretrained(quantized(), folder / "adapter").train()
        found["adapter, on the base, by peft"] = (logits(opened), trained)
        found["merged, by transformers"] = (logits(loaded(folder / "merged")), of_merged)
    dist.barrier()
    good = [_same(name, *pair) for name, pair in found.items()]
    return all(good)


def _same(name: str, got: torch.Tensor, expected: torch.Tensor) -> bool:
    gap = float((got - expected).abs().max() / expected.abs().max())
    if dist.get_rank() == 0:
        print(f"{name}: logits off by {gap:.1e} of the largest", flush=True)
    return gap < FAR


def _config() -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
