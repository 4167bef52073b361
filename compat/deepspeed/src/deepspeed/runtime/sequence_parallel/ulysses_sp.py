"""Divided sequences for transformers models: their attention, and a loader that cuts batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

import zeroshard
from deepspeed._exports import lazy
from zeroshard.errors import UsageError
from zeroshard.parallel.divided_attention import check_dividable, find_transformers_model
from zeroshard.parallel.sequence_axis import SequenceParallel, divide_sequences
from zeroshard.parallel.sequence_loader import SequenceLoader

__getattr__, __dir__ = lazy(__name__, {})


class UlyssesSPAttentionHF:
    """Attention of transformers models that exchanges between the ranks of a sequence."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str | None = None,
        sequence_parallel_size: int = 1,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceParallel:
        """What `initialize(mpu=...)` takes, and with it divides the attention of its model; called by all ranks.

        Args:
            model_name_or_path: a model, or what transformers finds its config by.
            core_attn_implementation: transformers' name of the attention that runs on the whole sequence; by default
                the model's own.
            sequence_parallel_size: neighbouring ranks that have parts of a sequence.
            micro_batch_size: not needed: shapes are those of each batch.
            seq_length: of all batches, if it is not variable; `max_length` is its older name.
            disable_in_eval: a model in evaluation gets whole sequences.

        Raises:
            PlanError: what doesn't divide, with the numbers.
        """
        from transformers import AutoConfig

        zeroshard.init_distributed()
        length = max_length if seq_length is None else seq_length
        if not seq_length_is_variable and length is None:
            raise UsageError("register_with_transformers(seq_length_is_variable=False): give seq_length")
        if not seq_length_is_variable and length % sequence_parallel_size:  # pyright: ignore[reportOptionalOperand]
            raise UsageError(
                f"register_with_transformers: sequences of {length} tokens don't divide over {sequence_parallel_size} "
                "ranks; choose a multiple, or seq_length_is_variable=True, with which batches are padded"
            )
        if isinstance(model_name_or_path, str) or not _is_model(model_name_or_path):
            config = AutoConfig.from_pretrained(model_name_or_path)
            name = str(model_name_or_path)
        else:
            inner = find_transformers_model(model_name_or_path)
            config = model_name_or_path.config if inner is None else inner.config
            name = type(model_name_or_path).__name__
        axis = divide_sequences(sequence_parallel_size, "register_with_transformers(sequence_parallel_size=...)")
        check_dividable(config, axis.size, name)
        return SequenceParallel(axis, core_attn_implementation, disable_in_eval)


class UlyssesSPDataLoaderAdapter(SequenceLoader):
    """Gives each rank of a sequence its part of the batches that the ranks of the sequence read.

    Args:
        dl: the loader, of other data on each rank or of the same from `deepspeed_io`.
        sp_rank, sp_group, sp_world_size: of the axis: as the mpu, or `deepspeed.utils.groups`, gives them.
        device: for the tensors that are given.
    """

    def __init__(
        self,
        dl: Iterable[Any],
        sp_rank: int,
        sp_group: dist.ProcessGroup,
        sp_world_size: int,
        device: Any = None,
    ) -> None:
        if sp_world_size != sp_group.size():
            raise UsageError(
                f"UlyssesSPDataLoaderAdapter: sp_world_size {sp_world_size}, but sp_group has {sp_group.size()} ranks"
            )
        super().__init__(dl, sp_rank, sp_group, device)


def _is_model(given: Any) -> bool:
    from torch import nn

    return isinstance(given, nn.Module)
