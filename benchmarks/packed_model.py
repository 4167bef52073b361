"""A transformers model of Llama's shape with a base in 4 bits and LoRA, made weight by weight: never whole in bf16.

    the meta device    LlamaForCausalLM of a config, linear layers replaced as in `from_pretrained` (BitsAndBytesConfig)
    the device         one weight after the other: random numbers in bf16, quantized, set in its module

Under `zeroshard.QuantizedInit` each weight's codes are divided among the ranks as they are set. Nothing is downloaded.
Rejected: one block's codes for all blocks. Random numbers for 200e9 parameters take a GPU seconds.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

STD = 0.02
RANK = 16


@dataclass(frozen=True)
class Width:
    """Sizes of a model of Llama's shape."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    layers: int

    @property
    def numel(self) -> int:
        """Parameters of the base before it is quantized."""
        kv = self.hidden // self.heads * self.kv_heads
        block = self.hidden * (2 * self.hidden + 2 * kv + 3 * self.ffn + 2)
        return self.layers * block + 2 * self.vocabulary * self.hidden + self.hidden

    def deep(self, layers: int | None) -> Width:
        """The same width with so many layers; None for its own."""
        return self if layers is None else replace(self, layers=layers)


WIDTHS = {
    "tiny": Width(64, 4, 2, 128, 96, 3),
    "small": Width(1024, 16, 4, 2816, 4096, 6),
    "8b": Width(4096, 32, 8, 14336, 128256, 32),
    "70b": Width(8192, 64, 8, 28672, 128256, 80),
}


def quantization(compute: torch.dtype) -> Any:
    """Four bits: nf4, double quantization."""
    transformers = importlib.import_module("transformers")
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )


def config_of(width: Width, length: int) -> Any:
    """The transformers config."""
    transformers = importlib.import_module("transformers")
    return transformers.LlamaConfig(
        hidden_size=width.hidden,
        num_hidden_layers=width.layers,
        num_attention_heads=width.heads,
        num_key_value_heads=width.kv_heads,
        intermediate_size=width.ffn,
        vocab_size=width.vocabulary,
        max_position_embeddings=max(length, 2048),
        tie_word_embeddings=False,
        use_cache=False,
        architectures=["LlamaForCausalLM"],
    )


def adapter(*, trained: bool = False) -> dict[str, Any]:
    """The LoRA on all linear layers but the head, as peft writes it. `trained`: with values as after some training."""
    given = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": "all-linear"}
    return {**given, "init_lora_weights": not trained}


def write(folder: Path, width: Width, length: int, compute: torch.dtype = torch.bfloat16) -> Path:
    """config.json and adapter_config.json, as `zeroshard plan` reads them; gives the first."""
    config = config_of(width, length)
    content = {**config.to_dict(), "quantization_config": quantization(compute).to_dict()}
    file = folder / "config.json"
    file.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    (folder / "adapter_config.json").write_text(json.dumps(adapter(), indent=1) + "\n", encoding="utf-8")
    return file


def base(width: Width, length: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """The base in 4 bits with random weights on `device`, equal on all ranks. Call it under `QuantizedInit`.

    Args:
        dtype: of what is not quantized (embedding, head, norms), and in which layers multiply.
    """
    transformers = importlib.import_module("transformers")
    integrations = importlib.import_module("transformers.integrations")
    config, packing = config_of(width, length), quantization(dtype)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(dtype)
    integrations.replace_with_bnb_linear(model, modules_to_not_convert=["lm_head"], quantization_config=packing)
    inner = model.model
    with torch.device(device):
        inner.rotary_emb = type(inner.rotary_emb)(config)  # its table is no parameter
    _fill(model, device, dtype, torch.Generator(device).manual_seed(seed))
    model.is_loaded_in_4bit = model.is_quantized = True  # by these peft knows it
    config.quantization_config = packing
    return model


def _fill(model: nn.Module, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> None:
    bitsandbytes = importlib.import_module("bitsandbytes")
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 1:
                value = torch.ones(parameter.shape, dtype=dtype, device=device)
            else:
                value = torch.randn(parameter.shape, dtype=dtype, device=device, generator=generator).mul_(STD)
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                # `to` quantizes. The attributes of the parameter are its constructor's arguments.
                made = bitsandbytes.nn.Params4bit(value, requires_grad=False, **vars(parameter)).to(device)
            else:
                made = nn.Parameter(value, requires_grad=False)
            setattr(module, name, made)


def adapted(model: nn.Module, device: torch.device, *, trained: bool = False, seed: int = 3) -> nn.Module:
    """The model with LoRA, in training mode; `trained` as in `adapter`."""
    peft = importlib.import_module("peft")
    torch.manual_seed(seed)
    with torch.device(device):
        return peft.get_peft_model(model, peft.PeftConfig.from_peft_type(**adapter(trained=trained))).train()


def batch(width: Width, length: int, device: torch.device, step: int, rank: int = 0) -> dict[str, torch.Tensor]:
    """One sequence of random tokens, the same on every device."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, width.vocabulary, (1, length), generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens}
