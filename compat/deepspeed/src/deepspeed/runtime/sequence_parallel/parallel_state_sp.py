"""The axis of divided sequences by the names of Megatron's mpu; the module itself may be `initialize`'s mpu."""

from __future__ import annotations

import torch.distributed as dist

from deepspeed._exports import lazy
from deepspeed.utils import groups
from zeroshard.parallel.sequence_axis import divide_sequences, find_axis

__getattr__, __dir__ = lazy(__name__, {})


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Let so many neighbouring ranks have parts of the same sequences; called by all ranks."""
    divide_sequences(sequence_parallel_size, "initialize_sequence_parallel")


def sequence_parallel_is_initialized() -> bool:
    """Whether sequences are divided."""
    return find_axis() is not None


def get_sequence_parallel_group() -> dist.ProcessGroup:
    """The ranks of this rank's sequence."""
    return groups._get_sequence_parallel_group()


def get_sequence_parallel_world_size() -> int:
    """Ranks that have parts of one sequence."""
    return groups._get_sequence_parallel_world_size()


def get_sequence_parallel_rank() -> int:
    """Which part of its sequence this rank has."""
    return groups._get_sequence_parallel_rank()


def get_data_parallel_group() -> dist.ProcessGroup | None:
    """The ranks that have the same part of other sequences."""
    return groups._get_data_parallel_group()


def get_data_parallel_world_size() -> int:
    """Ranks that read different data."""
    return groups._get_data_parallel_world_size()


def get_data_parallel_rank() -> int:
    """This rank's number among those that read different data."""
    return groups._get_data_parallel_rank()


def get_sequence_data_parallel_group() -> dist.ProcessGroup | None:
    """All ranks over which state is divided and gradients are averaged."""
    return dist.group.WORLD


def get_sequence_data_parallel_world_size() -> int:
    """How many these are."""
    return dist.get_world_size()


def get_sequence_data_parallel_rank() -> int:
    """This rank's number among them."""
    return dist.get_rank()
