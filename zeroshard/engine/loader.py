"""The loader over `training_data`: each rank its own part of every epoch, in an order that only the seed decides.

    epoch 0   samples in the order of seed + 0   rank 0 takes positions 0, n, 2n ...   rank 1 positions 1, n + 1 ...
    epoch 1   samples in the order of seed + 1   ...

torch's DistributedSampler repeats epoch 0 for ever unless the loop calls `set_epoch`; here each pass over the loader
counts the epoch on, and `set_epoch` still sets it.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from zeroshard.errors import UsageError, ZeroShardWarning

Collate = Callable[[list[Any]], Any]


class Route(enum.Enum):
    """What a loader is for: only training shuffles."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "predict"


@dataclass(frozen=True)
class LoaderOptions:
    """What the config says of loaders.

    Attributes:
        drop_last: leave out samples that don't fill a batch on every rank; else the last batch is smaller, and some
            samples are repeated so that all ranks have as many.
        seed: of the order of samples.
    """

    drop_last: bool = False
    seed: int = 0


class EpochSampler(DistributedSampler[Any]):
    """A DistributedSampler in which each pass is the next epoch."""

    def __iter__(self) -> Iterator[Any]:
        order = super().__iter__()
        self.epoch += 1
        return order


def make_loader(
    data: Dataset[Any],
    batch_size: int,
    options: LoaderOptions,
    *,
    route: str = Route.TRAIN.value,
    sampler: Sampler[Any] | None = None,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Any]:
    """A loader that gives this rank micro-batches of `batch_size` samples.

    Raises:
        UsageError: a batch size below 1, or an unknown route.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
    if route not in [known.value for known in Route]:
        raise UsageError(f"route must be one of {', '.join(known.value for known in Route)}, got {route!r}")
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if isinstance(data, IterableDataset):
        if world > 1:
            warnings.warn(
                "the dataset is iterable: every rank reads the whole stream, unless the dataset splits it by rank",
                ZeroShardWarning,
                stacklevel=4,
            )
    elif sampler is None:
        shuffle = route == Route.TRAIN.value
        sampler = EpochSampler(data, world, rank, shuffle=shuffle, seed=options.seed, drop_last=options.drop_last)
    return DataLoader(
        data,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pin_memory,
        drop_last=options.drop_last,
    )
