"""Fine-tuning runs of a few steps with what Hugging Face's libraries offer: models from a config, a tokenizer trained
in place, a data set in memory. Nothing is downloaded.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORDS = [
    "the",
    "old",
    "mill",
    "by",
    "the",
    "river",
    "grinds",
    "corn",
    "and",
    "wheat",
    "for",
    "every",
    "farm",
    "that",
    "lies",
    "between",
    "hill",
    "and",
    "sea",
]
SENTENCES = [" ".join(WORDS[(i * 7 + j * (i % 5 + 1)) % len(WORDS)] for j in range(4 + i % 7)) for i in range(64)]
AUTO_SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
}
AUTO_OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}


def environment() -> dict[str, str]:
    """For scripts in processes of their own: this checkout first, then what this process finds."""
    path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}


def tokenizer() -> Any:
    """A byte-pair tokenizer trained on the sentences."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=96, special_tokens=["<unk>", "<pad>", "</s>"]))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", eos_token="</s>")


def model(kind: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A causal language model of some ten thousand parameters."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(model_config(kind, **changes))


def model_config(kind: str = "llama", **changes: Any) -> Any:
    from transformers import GPT2Config, LlamaConfig

    if kind == "gpt2":
        sizes: dict[str, Any] = {"n_positions": 32, "n_embd": 16, "n_layer": 3, "n_head": 2}
        quiet: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2Config(vocab_size=128, use_cache=False, bos_token_id=2, eos_token_id=2, **sizes, **quiet, **changes)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    tokens = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
    return LlamaConfig(
        vocab_size=128, num_key_value_heads=2, max_position_embeddings=32, use_cache=False, **sizes, **tokens, **changes
    )


def pretrained(base: str, divided: bool) -> Any:
    """The model that was saved in the folder `start`, in fp32; divided over all ranks by its own plan, if asked."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    more: dict[str, Any] = {"distributed_config": DistributedConfig(tp_plan="auto")} if divided else {}
    return AutoModelForCausalLM.from_pretrained(Path(base, "start"), dtype="float32", **more)


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """What `save_pretrained` wrote into one file."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def samples(count: int = 32) -> list[dict[str, list[int]]]:
    """Tokenised sentences."""
    made = tokenizer()
    return [{"input_ids": made(text)["input_ids"]} for text in SENTENCES[:count]]


def ds_config(stage: int, **changes: Any) -> dict[str, Any]:
    """A config with "auto" wherever Trainer fills it in; without optimizer and scheduler, which are then Trainer's."""
    zero = {
        "stage": stage,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": zero,
        **changes,
    }


@dataclass
class Run:
    """What a run of Trainer left behind.

    Attributes:
        losses, norms, rates: of each step.
        evaluations: losses of the evaluations.
        weights: after training, whole, on rank 0.
    """

    losses: list[float]
    norms: list[float]
    rates: list[float]
    evaluations: list[float]
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def largest_gap(self, other: Run) -> float:
        """The largest difference of a loss or norm to another run's; rates are logged at other moments."""
        mine, theirs = (r.losses + r.norms + r.evaluations for r in (self, other))
        assert len(mine) == len(theirs), (self, other)
        assert all(map(math.isfinite, mine)), self
        return max(abs(a - b) for a, b in zip(mine, theirs, strict=True))


def arguments(folder: Path, stage: int | None, config: Mapping[str, Any], **changes: Any) -> Any:
    """TrainingArguments for a few steps; `stage` None means plain DDP."""
    from transformers import TrainingArguments

    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
        "use_cpu": True,
        "log_level": "error",
        **changes,
    }
    deepspeed = None if stage is None else ds_config(stage, **config)
    return TrainingArguments(str(folder), deepspeed=deepspeed, **settings)


def trainer(args: Any, subject: Any, **changes: Any) -> Any:
    """A Trainer over the sentences."""
    from transformers import DataCollatorForLanguageModeling, Trainer
    from transformers.trainer_callback import PrinterCallback

    data = samples()
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    settings: dict[str, Any] = {"train_dataset": data, "eval_dataset": data[:9], "data_collator": collate, **changes}
    made = Trainer(model=subject, args=args, **settings)
    made.remove_callback(PrinterCallback)
    return made


def logged(run: Any) -> Run:
    """What a Trainer has logged."""
    history = run.state.log_history
    steps = [entry for entry in history if "loss" in entry]
    return Run(
        [entry["loss"] for entry in steps],
        [float(entry["grad_norm"]) for entry in steps],
        [entry["learning_rate"] for entry in steps],
        [entry["eval_loss"] for entry in history if "eval_loss" in entry],
    )


def accelerate_loop(
    accelerator: Any, model: Any, optimizer: Any, loader: Any, epochs: int = 1, scheduler: Any = None
) -> list[float]:
    """Epochs of a plain script for Accelerate; its losses, and the norm of each step before its loss."""
    numbers: list[float] = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    numbers.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
            numbers.append(float(loss.detach()))
    return numbers


def forget() -> None:
    """What transformers and accelerate keep at module level, away: the next run in this process starts fresh."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]  # with them the next run would be one with ZeRO whatever its arguments say
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()
    gc.collect()


def shared_folder(base: str, name: str) -> Path:
    """A folder that all ranks see."""
    folder = Path(base) / name
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return folder
