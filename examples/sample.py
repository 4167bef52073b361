"""Loads exported weights with transformers, in a process that knows nothing of zeroshard, and writes a few lines.

python examples/sample.py runs/demo/export [--prompt "The import statement"]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = ['The "for" statement', "If the object", "An exception is raised"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompt", action="append", help="may be repeated")
    parser.add_argument("--tokens", type=int, default=70, help="tokens to write after each prompt")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    model = AutoModelForCausalLM.from_pretrained(args.folder).eval()
    for prompt in args.prompt or PROMPTS:
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
        print(tokenizer.decode(written[0], skip_special_tokens=True).strip())
        print("---")


if __name__ == "__main__":
    main()
