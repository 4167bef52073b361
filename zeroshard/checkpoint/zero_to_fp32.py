"""Converts a ZeRO checkpoint to fp32 weights, under the names that scripts for DeepSpeed call.

    python -m zeroshard.checkpoint.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR

It opens checkpoints of DeepSpeed and zeroshard, and converts one tensor at a time, where DeepSpeed's converter takes
memory for the whole optimizer. The output is that of DeepSpeed's: pytorch_model.bin, or safetensors if wanted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn

from zeroshard.checkpoint.any_checkpoint import open_checkpoint
from zeroshard.checkpoint.export.hf import export_hf, find_config, parse_size, weights_of
from zeroshard.checkpoint.foreign.stored import Lazy
from zeroshard.errors import CheckpointError, UsageError, ZeroShardError


class LazyTensor:
    """A weight that is read by `contiguous()`."""

    def __init__(self, tensor: Lazy) -> None:
        self._tensor = tensor
        self.shape = torch.Size(tensor.shape)
        self.dtype = tensor.dtype

    def contiguous(self) -> torch.Tensor:
        return self._tensor.read()


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor] | dict[str, LazyTensor]:
    """The model's state dict with fp32 parameters; it has tied weights under all their names.

    Args:
        tag: None for the newest.
        exclude_frozen_parameters: leave out parameters that were not trained.
        lazy_mode: return objects whose `contiguous()` reads the tensor, so that only those in use are in memory.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or malicious.
    """
    contents = open_checkpoint(checkpoint_dir, tag)
    lazies = weights_of(contents, torch.float32, frozen=not exclude_frozen_parameters)
    lazies |= {alias: lazies[name] for alias, name in contents.aliases.items() if name in lazies}
    if lazy_mode:
        once = {id(tensor): LazyTensor(tensor) for tensor in lazies.values()}
        return {name: once[id(tensor)] for name, tensor in lazies.items()}
    return _read_all(lazies)


def _read_all(lazies: Mapping[str, Lazy]) -> dict[str, torch.Tensor]:
    read: dict[int, torch.Tensor] = {}
    for tensor in lazies.values():
        if id(tensor) not in read:
            read[id(tensor)] = tensor.read()
    return {name: read[id(tensor)] for name, tensor in lazies.items()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write fp32 weights to a folder that `from_pretrained` loads.

    One process may call it, or all ranks of a job: each writes whole files and renames them into the folder.

    Args:
        output_dir: may exist, with other files.
        max_shard_size: size of a file, such as "5GB"; None for one file.
        safe_serialization: model.safetensors instead of pytorch_model.bin.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or malicious, or the folder can't be written.
        UsageError: the folder has weights in another format, or in another number of files.
    """
    contents = open_checkpoint(checkpoint_dir, tag)
    limit = sys.maxsize if max_shard_size is None else parse_size(max_shard_size)
    config = find_config(Path(checkpoint_dir))
    frozen = not exclude_frozen_parameters
    export_hf(contents, output_dir, torch.float32, limit, config, frozen, safe=safe_serialization, shared=True)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load a checkpoint's weights into a model that has not been sharded, one tensor at a time.

    Raises:
        CheckpointError: names or shapes differ (nothing was changed), or the checkpoint can't be read.
    """
    contents = open_checkpoint(checkpoint_dir, tag)
    lazies = weights_of(contents, torch.float32)
    lazies |= {alias: lazies[name] for alias, name in contents.aliases.items() if name in lazies}
    own = model.state_dict()
    for name, value in own.items():
        if name not in lazies or lazies[name].shape != tuple(value.shape):
            found = list(lazies[name].shape) if name in lazies else "missing"
            raise CheckpointError(
                f"{checkpoint_dir}: {name!r} has shape {list(value.shape)} in the model, there {found}"
            )
    extra = sorted(set(lazies) - set(own))
    if extra:
        raise CheckpointError(f"{checkpoint_dir} holds {extra[0]!r} (of {len(extra)}), which the model does not have")
    done: set[int] = set()
    with torch.no_grad():
        for name, value in own.items():
            if value.data_ptr() not in done or not value.numel():
                value.copy_(lazies[name].read())
                done.add(value.data_ptr())
    return model


def _main(
    checkpoint_dir: Annotated[Path, typer.Argument(help="Folder of the checkpoint, with the file latest or a tag.")],
    output_dir: Annotated[Path, typer.Argument(help="Folder to write; it may hold other files.")],
    max_shard_size: Annotated[str, typer.Option("--max_shard_size", help="Size of a file, such as 5GB.")] = "5GB",
    safe_serialization: Annotated[
        bool, typer.Option("--safe_serialization", help="Write model.safetensors, not pytorch_model.bin.")
    ] = False,
    tag: Annotated[str | None, typer.Option("-t", "--tag", help="The checkpoint. [default: the newest]")] = None,
    exclude_frozen_parameters: Annotated[bool, typer.Option("--exclude_frozen_parameters")] = False,
    debug: Annotated[bool, typer.Option("-d", "--debug", help="Accepted; there is nothing to debug.")] = False,
) -> None:
    """Write the fp32 weights of a ZeRO checkpoint, so that from_pretrained loads them."""
    convert_zero_checkpoint_to_fp32_state_dict(
        checkpoint_dir, output_dir, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )
    print(f"fp32 weights of {checkpoint_dir} are in {output_dir}")


def main() -> None:
    """Entry point of the script: errors of zeroshard print one line, with exit status 2."""
    try:
        typer.run(_main)
    except (ZeroShardError, UsageError) as error:
        print(f"zero_to_fp32: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
