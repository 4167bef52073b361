"""Divided sequences for transformers models: their attention, a loader that cuts batches, and work in tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

import zeroshard
from deepspeed._exports import lazy
from zeroshard.errors import UsageError
from zeroshard.parallel.divided_attention import check_dividable, find_transformers_model
from zeroshard.parallel.sequence_axis import SequenceParallel, divide_sequences
from zeroshard.parallel.sequence_loader import SequenceLoader
from zeroshard.parallel.sequence_tiles import tiled, tiled_compute, tiled_loss

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


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, torch.Tensor | None],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str | None = None,
    compute_params: Any = None,
    output_unshard_dimension: int = 1,
    output_reduction: str = "mean",
) -> torch.Tensor:
    """`fn(**kwargs_to_shard, **kwargs_to_pass)` in tiles of the sequence, each made again in the backward.

    Args:
        seqlen: tokens of each of `kwargs_to_shard`, along the second dim.
        grad_requiring_tensor_key, compute_params: not needed, autograd finds them.
        output_unshard_dimension: along which results are joined; scalars are reduced.
        output_reduction: "sum", or "mean" by labels where there are some, else by tokens.
    """
    for name, tensor in kwargs_to_shard.items():
        if tensor is not None and tensor.shape[1] != seqlen:
            raise UsageError(f"sequence_tiled_compute: seqlen is {seqlen}, but {name} has {tensor.shape[1]} tokens")
    return tiled_compute(
        fn, kwargs_to_shard, kwargs_to_pass, tiles=shards, join=output_unshard_dimension, reduction=output_reduction
    )


class SequenceTiledCompute:
    """`sequence_tiled_compute` with the arguments of an autograd function."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: list[str],
        keys_to_pass: list[str],
        grad_requiring_tensor_key: str | None,
        compute_params: Any,
        output_unshard_dimension: int,
        output_reduction: str,
        *values: Any,
    ) -> torch.Tensor:
        """As `sequence_tiled_compute`; `values` are those of `keys_to_shard`, then those of `keys_to_pass`."""
        count = len(keys_to_shard)
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys_to_shard, values[:count], strict=True)),
            dict(zip(keys_to_pass, values[count:], strict=True)),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


class TiledMLP:
    """An MLP on one tile of the sequence after the other, each made again in the backward."""

    @staticmethod
    def apply(
        fn: Callable[[Any, torch.Tensor], torch.Tensor],
        self: Any,
        x: torch.Tensor,
        shards: int,
        compute_params: Any = None,
    ) -> torch.Tensor:
        """`fn(self, x)`, where x is (..., tokens, width); `compute_params` is not needed, autograd finds them."""
        return tiled(lambda part: fn(self, part), x, shards)


class TiledFusedLogitsLoss:
    """A loss whose logits stand for one tile of the sequence at a time."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        self: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Any = None,
        output_reduction: str = "mean",
    ) -> torch.Tensor:
        """The loss of `fn(self, x, y)`, or of `fn(self, x, y, mask)`: hidden states, labels and a mask in tiles.

        With "mean" the labels of all tiles count alike. `compute_params` is not needed, autograd finds them.
        """
        return tiled_loss(lambda *parts: fn(self, *parts), x, y, mask, tiles=shards, reduction=output_reduction)


def _is_model(given: Any) -> bool:
    from torch import nn

    return isinstance(given, nn.Module)
