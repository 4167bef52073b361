"""`python -m benchmarks` lists the benchmarks; `python -m benchmarks NAME ...` runs one, `all` what needs no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_GPU = {
    "host_overhead": "a step with nearly nothing to compute, against FSDP2: what Python costs",
    "planner": "what the planner predicts beside what was measured, and beside published sizing rows",
    "host_adam": "the optimizer's step on the host against torch's fused AdamW and the rate of memory",
    "largest": "the largest model that the plan says one GPU and its host train",
    "nvme": "state on disk: rates beside plain direct I/O, and a step's seconds beside the prediction",
    "vertical": "all micro-batches through a block before the next, beside the usual order, parameters on disk",
    "checkpoint": "how fast checkpoints are written and read, beside dd on the same disk",
    "slow_links": "a step over a slow link between two nodes (network namespaces, root): codes, second copies, HSDP",
    "elastic": "kills of every kind in a job whose nodes come and go (namespaces, root): lost samples, useful time",
    "faults": "faults of many kinds in small runs on real ranks, and whether zeroshard calls them by their names",
    "bf16_accuracy": "how far bf16 training strays from fp32, against DeepSpeed and DDP with autocast",
}
FOR_GPUS = {
    "compare": "speed and memory of all engines on a model of Llama's shape, beside the floor; presets",
    "scaling": "the same micro-batch for each GPU on 1, 2, 4, 8 of them, beside one GPU's floor",
    "train": "one measurement of it: one engine, one setting; traces and checks for synchronizing calls",
    "account": "where the time of a step went, from a trace that train has written",
    "tiers": "20e9 parameters on one GPU, state on GPU, host and disk: seconds beside floors and plan, all bytes",
    "grow": "host memory filled once and given back, for machines whose memory grows as it is used",
    "timeline": "a picture of a step from such a trace: what ran on which stream",
    "trainer": "Hugging Face's Trainer on zeroshard, DeepSpeed and FSDP2: one script, seconds and memory",
    "trainer_row": "one row of it: one engine in the plainest script",
    "slow_links_rank": "the ranks that slow_links starts",
    "observed": "what a step costs more with everything on that can be seen of a run",
    "codes": "codes of 8 and 4 bits made and read, beside the rate of a copy",
    "fp8_peers": "fp8 of zeroshard and of torchao on FSDP2, beside bf16, on text: speed, bytes on the wire, losses",
    "fp8_shapes": "twelve shapes of models with products in fp8, beside bf16",
    "packed": "a base in 4 bits with LoRA: losses, memory beside the plan, the largest model of one GPU, what is saved",
    "planner_ranks": "the ranks that planner --measure starts",
    "moe": "a mixture of experts of Qwen3-30B-A3B's shape: zeroshard, experts divided or not, FSDP2 and the floor",
    "moe_row": "one row of it: one engine",
    "long": "one sequence of 131072 tokens or more, in tiles: memory beside the planner's prediction",
    "long_row": "one row of it",
    "losses": "the loss curves of zeroshard, FSDP2 and DDP on the same tokens",
}


def main() -> int:
    names = sys.argv[1:2]
    if not names:
        for title, group in (("without a GPU", WITHOUT_GPU), ("made for GPUs, runs on a CPU too", FOR_GPUS)):
            print(f"{title}:")
            print("\n".join(f"  {name:14} {text}" for name, text in group.items()))
        print("\npython -m benchmarks NAME --help says more; figures and methods are in benchmarks/README.md")
        return 0
    if names == ["all"]:
        return max(run(name, sys.argv[2:]) for name in WITHOUT_GPU)
    names = [name.replace("-", "_") for name in names]
    if names[0] not in {**WITHOUT_GPU, **FOR_GPUS}:
        print(f"there is no benchmark {names[0]!r}; python -m benchmarks lists them", file=sys.stderr)
        return 2
    return run(names[0], sys.argv[2:])


def run(name: str, arguments: list[str]) -> int:
    print(f"== {name}", file=sys.stderr, flush=True)
    return abs(subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments], cwd=ROOT).returncode)


if __name__ == "__main__":
    sys.exit(main())
