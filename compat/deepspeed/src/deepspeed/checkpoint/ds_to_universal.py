"""The conversion that scripts run before another number of ranks, or another stage, loads a checkpoint.

Every checkpoint of zeroshard loads anywhere, so that the conversion is a copy under the name that the script loads
later. A link was rejected: the original may be pruned before the copy is loaded.

    python -m deepspeed.checkpoint.ds_to_universal --input_folder DIR/TAG --output_folder DIR/TAG_universal
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

from deepspeed._exports import lazy
from zeroshard.checkpoint.directory import is_whole
from zeroshard.checkpoint.temporary_files import new_id, temporary_path
from zeroshard.errors import CheckpointError

__getattr__, __dir__ = lazy(__name__, {})


def parse_arguments() -> argparse.Namespace:
    """The arguments of the command line, with those that have no effect for a copy."""
    parser = argparse.ArgumentParser(description="Copy a checkpoint, which loads at any number of ranks as it is.")
    parser.add_argument("--input_folder", required=True, help="the folder of a checkpoint: DIR/TAG")
    parser.add_argument("--output_folder", required=True, help="the folder of the copy, which is not there yet")
    for name in ("--num_extract_workers", "--num_merge_workers"):
        parser.add_argument(name, type=int, default=1, help="no effect")
    for name in ("--keep_temp_folder", "--no_strict", "--inject_missing_state"):
        parser.add_argument(name, action="store_true", help="no effect")
    return parser.parse_args()


def main(args: argparse.Namespace | SimpleNamespace) -> None:
    """Copy `args.input_folder` to `args.output_folder`; called by one rank, or without any.

    Raises:
        CheckpointError: the input is no whole checkpoint of zeroshard, or the output is there already.
    """
    source, target = Path(args.input_folder), Path(args.output_folder)
    if not is_whole(source):
        raise CheckpointError(
            f"{source} is no whole checkpoint of zeroshard; for one that DeepSpeed has written: zeroshard checkpoint "
            "import"
        )
    if os.path.lexists(target):
        raise CheckpointError(f"{target} is there already, and was left as it is")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = temporary_path(target.parent, target.name, new_id(), "partial")
    shutil.copytree(source, unfinished)
    os.rename(unfinished, target)  # it has its name when all of it is there


if __name__ == "__main__":
    try:
        main(parse_arguments())
    except CheckpointError as error:
        sys.exit(str(error))
