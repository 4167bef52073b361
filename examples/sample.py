"""Loads exported weights with transformers, in a process that knows nothing of zeroshard, and writes a few lines.

python examples/sample.py runs/demo/export --prompt "The import statement"
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompt", action="append", required=True, help="may be repeated")
    parser.add_argument("--tokens", type=int, default=70, help="tokens to write after each prompt")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    console = Console(width=None if Console().is_terminal else 120)
    disable_progress_bar()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    model = AutoModelForCausalLM.from_pretrained(args.folder).eval()
    for prompt in args.prompt:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=args.tokens,
            do_sample=True,
            temperature=0.6,
            top_k=40,
            use_cache=True,
            pad_token_id=tokenizer.eos_token_id,
        )
        text = tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
        console.print(Text(f"> {prompt}", style="bold"), Text(text.rstrip(), style="default"), Text("\n---"), sep="")


if __name__ == "__main__":
    main()
