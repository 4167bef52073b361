"""Fine-tune a causal language model on instructions with transformers' Trainer, on zeroshard.

    deepspeed --num_gpus=4 examples/sft.py --deepspeed examples/configs/zero3.json \
        --model_name_or_path meta-llama/Meta-Llama-3-8B --dataset_name yahma/alpaca-cleaned \
        --output_dir ./llama3-8b-sft --bf16 true --num_train_epochs 3 \
        --per_device_train_batch_size 1 --learning_rate 2e-5 --warmup_ratio 0.03 --lr_scheduler_type cosine

There is no word of zeroshard below: Trainer finds it under the name deepspeed (docs/huggingface.md). `--dataset_name`
is a file (JSON, JSON lines, or text with a sample per paragraph) or, with the package `datasets`, a name on the hub.
Columns: instruction, input and output; or prompt and completion; or text. The loss is that of the answer alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

IGNORED = -100
"""The label of a token that has no loss."""
SHARED_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_clipping": "max_grad_norm",
}
"""What both a config and the command line can say: config key -> argument."""


@dataclass
class ScriptArguments:
    """What is trained on what."""

    model_name_or_path: str = field(metadata={"help": "A folder with a model, or a name on the hub."})
    dataset_name: str = field(metadata={"help": "A .json, .jsonl or .txt file, or a name on the hub."})
    max_length: int = field(default=1024, metadata={"help": "Tokens of a sample; longer ones are cut."})
    eval_samples: int = field(default=0, metadata={"help": "Samples that are held out, from the end."})
    warmup_ratio: float = field(default=0.0, metadata={"help": "Part of the steps over which the rate rises."})


def main() -> None:
    script, arguments = parse(sys.argv[1:])
    tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    # After TrainingArguments: under ZeRO-3 the weights then go to their shards as they are read.
    model = AutoModelForCausalLM.from_pretrained(script.model_name_or_path)
    samples = [encode(row, tokenizer, script.max_length) for row in read_rows(script.dataset_name)]
    held_out = len(samples) - script.eval_samples
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=samples[:held_out],
        eval_dataset=samples[held_out:] or None,
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    if held_out < len(samples):
        trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model()


def parse(command: Sequence[str]) -> tuple[ScriptArguments, TrainingArguments]:
    """The command line. What the config says in numbers holds where the command line leaves it open."""
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    known = {name.split("=")[0].replace("-", "_") for name in command if name.startswith("--")}
    for key, argument in SHARED_KEYS.items():
        value = config_of(command).get(key)
        if f"__{argument}" not in known and isinstance(value, (int, float)):
            parser.set_defaults(**{argument: value})
    script, arguments = parser.parse_args_into_dataclasses(list(command))
    if script.warmup_ratio:
        arguments.warmup_steps = script.warmup_ratio  # below 1 it is a part of all steps
    return script, arguments


def config_of(command: Sequence[str]) -> Mapping[str, Any]:
    """The JSON behind --deepspeed, {} without one."""
    for position, word in enumerate(command):
        name, _, value = word.partition("=")
        if name == "--deepspeed":
            path = Path(value or command[position + 1])
            return json.loads(path.read_text(encoding="utf-8"))
    return {}


def read_rows(name: str) -> list[Mapping[str, str]]:
    """The rows of a file, or of a data set on the hub."""
    path = Path(name)
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    if path.suffix == ".txt":
        return [{"text": part} for part in path.read_text(encoding="utf-8").split("\n\n") if part.strip()]
    try:
        from datasets import load_dataset
    except ImportError:
        sys.exit(f"sft: {name} is no .json, .jsonl or .txt file; for a data set of the hub run: pip install datasets")
    return list(load_dataset(name, split="train"))


def encode(row: Mapping[str, str], tokenizer: Any, max_length: int) -> dict[str, list[int]]:
    """Tokens and labels of a row; those of the prompt are ignored."""
    prompt, answer = prompt_and_answer(row)
    asked = tokenizer(prompt)["input_ids"] if prompt else []
    answered = tokenizer(answer + (tokenizer.eos_token or ""), add_special_tokens=not prompt)["input_ids"]
    tokens = (asked + answered)[:max_length]
    labels = ([IGNORED] * len(asked) + answered)[:max_length]
    return {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": labels}


def prompt_and_answer(row: Mapping[str, str]) -> tuple[str, str]:
    """What is asked and what is to be learned, from the columns that are there."""
    if "instruction" in row:
        given = f"\n\nInput:\n{row['input']}" if row.get("input") else ""
        return f"Instruction:\n{row['instruction']}{given}\n\nAnswer:\n", row["output"]
    if "prompt" in row:
        return row["prompt"], row["completion"]
    if "text" in row:
        return "", row["text"]
    needed = "instruction and output, prompt and completion, or text"
    sys.exit(f"sft: a row has the columns {sorted(row)}; it needs {needed}")


if __name__ == "__main__":
    main()
