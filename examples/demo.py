"""One command from text to a trained, sharded, exported language model: what `make demo` runs.

    python examples/demo.py [--text FILES...] [--steps N] [--stage 0..3] [--nproc 2] [--out runs/demo]

    text -> tokenizer -> train to half way, checkpoint, stop -> a new launch resumes and finishes -> export
         -> loss.png -> a fresh process loads the export with transformers and writes a few lines

The training itself is `gpt.py`, launched with `zeroshard run`; this file only drives. Each stage is a process of its
own, because that is what the demo shows: nothing survives from one to the next but files.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from corpus import CorpusError, prepare, save
from plot import draw_losses

HERE = Path(__file__).resolve().parent
LONGEST_RUN = 100_000


class StageFailed(Exception):
    """A launched process failed; it has already said why."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="text files (default: Python's own topics)")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--stage", type=int, choices=range(4), default=3, help="ZeRO stage")
    parser.add_argument("--nproc", type=int, default=2, help="processes")
    parser.add_argument("--vocabulary", type=int, default=2048, help="tokens in the vocabulary, at most")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="emptied first if a demo made it")
    args = parser.parse_args(arguments)
    if not 2 <= args.steps <= LONGEST_RUN:
        parser.error(f"--steps must be from 2 to {LONGEST_RUN}, got {args.steps}")
    if args.nproc < 1:
        parser.error(f"--nproc must be 1 or more, got {args.nproc}")
    if args.vocabulary < 300:
        parser.error(f"--vocabulary must be 300 or more (256 of them are the bytes), got {args.vocabulary}")
    return args


def check_out(out: Path) -> None:
    """Lets a folder be emptied only where a demo has left its corpus.

    Raises:
        CorpusError: the folder holds something else.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / "corpus.json").exists())):
        raise CorpusError(f"{out} holds something that no demo made; name another folder with --out")


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def launch(args: argparse.Namespace, *extra: str) -> None:
    """Runs gpt.py on all ranks and waits.

    Raises:
        StageFailed: a rank failed.
    """
    script = [str(HERE / "gpt.py"), "--out", str(args.out), "--steps", str(args.steps), "--stage", str(args.stage)]
    run(["-m", "zeroshard", "run", "--nproc", str(args.nproc), *script, *extra], args.nproc)


def run(arguments: list[str], ranks: int = 1) -> None:
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))  # installed or not
    environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if torch.cuda.device_count() < ranks:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # a GPU for each rank, or the CPU for all
    code = subprocess.run([sys.executable, *arguments], env=environment).returncode
    if code != 0:
        raise StageFailed(f"{' '.join(arguments[:4])} ended with code {code}; the first error above says why")


def demo(args: argparse.Namespace) -> None:
    started = time.monotonic()
    half = args.steps // 2

    say("text and tokenizer")
    check_out(args.out)
    corpus, tokenizer = prepare(args.text, args.vocabulary)
    if args.out.exists():
        shutil.rmtree(args.out)
    save(corpus, tokenizer, args.out)
    print(
        f"{len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} held out, "
        f"{corpus.vocabulary:,} in the vocabulary"
    )

    say(f"training on {args.nproc} processes, ZeRO-{args.stage}, to step {half} of {args.steps}")
    launch(args, "--stop-at", str(half))
    say(f"saved to {args.out / 'checkpoint'}; all processes have stopped; a new launch resumes at step {half}")
    launch(args, "--resume")

    picture = args.out / "loss.png"
    first, last = draw_losses(args.out / "metrics.jsonl", picture, resumed_at=half)
    say("what transformers writes with it in a fresh process (> marks the held-out text that it goes on from)")
    prompts = [word for prompt in corpus.prompts for word in ("--prompt", prompt)]
    run([str(HERE / "sample.py"), str(args.out / "export"), *prompts])

    say(f"done in {time.monotonic() - started:.0f} s: held-out loss {first:.2f} -> {last:.2f}")
    print(f"loss curve  {picture}\nweights     {args.out / 'export'}\ncheckpoint  {args.out / 'checkpoint'}")


def main() -> int:
    args = parse()
    try:
        demo(args)
    except (CorpusError, StageFailed) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
