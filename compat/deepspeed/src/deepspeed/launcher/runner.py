"""The `deepspeed` command: `zeroshard run`, which knows the spellings of both.

deepspeed --num_gpus=4 train.py --deepspeed ds.json      ->      zeroshard run --num_gpus=4 train.py --deepspeed ds.json
"""

from __future__ import annotations

import sys

from deepspeed._exports import lazy

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
"""A file whose variables accelerate's own launcher hands on to other nodes."""

__getattr__, __dir__ = lazy(__name__, {})


def main(args: list[str] | None = None) -> None:
    """Run the command line."""
    from zeroshard.launch.cli import app

    app(args=["run", *(sys.argv[1:] if args is None else args)], prog_name="deepspeed")
