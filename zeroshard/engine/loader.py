"""The data loader over `training_data`: each rank reads its own part of every epoch, in an order that the seed sets.

    epoch 0   samples in the order of seed + 0   rank 0 takes positions 0, n, 2n ...   rank 1 positions 1, n + 1 ...
    epoch 1   samples in the order of seed + 1   ...

torch's DistributedSampler repeats epoch 0 unless the loop calls `set_epoch`; here each pass over the loader is the next
epoch, and `set_epoch` still sets it.

The batches 0 to k of all ranks together are the first samples of the epoch, for any number of ranks. So a run with
another number of ranks needs only the epoch and the offset to continue at the next sample.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from zeroshard.arguments import need_kind
from zeroshard.engine.observing import TimedBatches
from zeroshard.errors import UsageError, ZeroShardWarning

Collate = Callable[[list[Any]], Any]


class Route(enum.Enum):
    """What a loader is for: only training shuffles."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "predict"


@dataclass(frozen=True)
class LoaderOptions:
    """The config's options of loaders.

    Attributes:
        drop_last: leave out samples that don't fill a batch on every rank; else the last batch is smaller, and some
            samples are repeated so that all ranks have as many.
        seed: of the order of samples.
    """

    drop_last: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Position:
    """A position in the data of a run: all ranks together have read `offset` samples of an epoch."""

    epoch: int = 0
    offset: int = 0


class EpochSampler(DistributedSampler[Any]):
    """A DistributedSampler in which each pass is the next epoch, and the first one may begin within an epoch."""

    offset = 0

    def start_at(self, position: Position) -> None:
        """Begin the next pass at a position."""
        self.epoch, self.offset = position.epoch, position.offset

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, which starts at its beginning unless this epoch has begun already."""
        if epoch != self.epoch:
            self.offset = 0
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        order = iter(self._rest(self.offset)) if self.offset else super().__iter__()
        self.epoch, self.offset = self.epoch + 1, 0
        return order

    def _rest(self, offset: int) -> list[int]:
        """This rank's samples of the rest of the epoch, divided as DistributedSampler divides a whole one."""
        whole = self._order()
        rest = whole[offset:]
        missing = -len(rest) % self.num_replicas
        if self.drop_last:
            rest = rest[: len(rest) - len(rest) % self.num_replicas]
        else:
            rest += (whole * (missing // len(whole) + 1))[:missing]
        return rest[self.rank :: self.num_replicas]

    def _order(self) -> list[int]:
        count = len(self.dataset)  # pyright: ignore[reportArgumentType]  (it has a length, or there is no sampler)
        if not self.shuffle:
            return list(range(count))
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(count, generator=generator).tolist()


class TrainLoader(DataLoader[Any]):
    """A DataLoader that knows its position in the data, and can continue from a position.

    It has a generator of its own: torch's default draws a number from the global generator for each pass, and a run
    that continues within an epoch makes one pass more.

    Attributes:
        samples: length of the dataset.
        position: the position after the last batch that was returned.
        timed: times the waits for each batch, if anything does.
    """

    timed: TimedBatches | None = None

    def __init__(self, data: Dataset[Any], batch_size: int, sampler: EpochSampler, **options: Any) -> None:
        super().__init__(data, batch_size, sampler=sampler, generator=torch.Generator(), **options)
        self._epochs = sampler
        self._read_at_once = batch_size * sampler.num_replicas
        self.samples = len(data)  # pyright: ignore[reportArgumentType]  (as above)
        self.position = Position()

    def continue_at(self, position: Position) -> None:
        """Begin the next pass at a position, or at the next epoch if no batch is left of that one."""
        rest = self.samples - position.offset
        if rest < (self._read_at_once if self.drop_last else 1):
            position = Position(position.epoch + 1)
        self.position = position
        self._epochs.start_at(position)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        epoch, offset = self._epochs.epoch, self._epochs.offset
        assert isinstance(self.generator, torch.Generator)
        self.generator.manual_seed(self._epochs.seed + epoch)
        batches = super().__iter__()
        for batch in batches if self.timed is None else self.timed(batches):
            offset += self._read_at_once
            self.position = Position(epoch, offset)
            yield batch
        self.position = Position(epoch + 1)


class DataPositions:
    """The positions of an engine's training loaders after its last step, in the order in which they were made.

    Checkpoints do not have the gradients of an unfinished step, so a run that continues reads its micro-batches again.

    Args:
        timed: times the loaders' batches, if anything does.
    """

    def __init__(self, timed: TimedBatches | None = None) -> None:
        self._timed = timed
        self._loaders: list[TrainLoader] = []
        self._after_step: list[Position] = []
        self._saved: list[Mapping[str, int]] = []

    def adopt(self, loader: DataLoader[Any]) -> None:
        """Track a new loader, if it is a TrainLoader."""
        if isinstance(loader, TrainLoader):
            loader.timed = self._timed
            self._loaders.append(loader)
            self._after_step.append(Position())
            self._continue(len(self._loaders) - 1)

    def mark(self) -> None:
        """Record the positions at the end of a step."""
        self._after_step = [loader.position for loader in self._loaders]

    def saved(self) -> list[dict[str, int]]:
        """The positions as a checkpoint saves them."""
        return [
            {"epoch": mark.epoch, "offset": mark.offset, "samples": loader.samples}
            for mark, loader in zip(self._after_step, self._loaders, strict=True)
        ]

    def load(self, saved: Sequence[Mapping[str, int]]) -> None:
        """Continue from a checkpoint's positions; this also applies to loaders that are made later."""
        self._saved = list(saved)
        for number in range(len(self._loaders)):
            self._continue(number)

    def _continue(self, number: int) -> None:
        if number >= len(self._saved):
            return
        saved, loader = self._saved[number], self._loaders[number]
        if saved["samples"] != loader.samples:
            warnings.warn(
                f"the checkpoint was saved within a dataset of {saved['samples']} samples, this one has "
                f"{loader.samples}: it is read from its beginning",
                ZeroShardWarning,
                stacklevel=2,
            )
            return
        loader.continue_at(Position(saved["epoch"], saved["offset"]))
        self._after_step[number] = loader.position


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
    place: tuple[int, int] | None = None,
) -> DataLoader[Any]:
    """A loader of this rank's micro-batches of `batch_size` samples.

    Args:
        place: this rank's number among the ranks that read different data, and their number; by default all ranks.

    Raises:
        UsageError: a batch size below 1, or an unknown route.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
    if route not in [known.value for known in Route]:
        raise UsageError(f"route must be one of {', '.join(known.value for known in Route)}, got {route!r}")
    if place is None:
        place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    rank, ranks = place
    if isinstance(data, IterableDataset):
        if ranks > 1:
            warnings.warn(
                "the dataset is iterable: every rank reads the whole stream, unless the dataset splits it by rank",
                ZeroShardWarning,
                stacklevel=4,
            )
    elif sampler is None:
        need_kind(data, Sized, "a loader's dataset", "a dataset with a length, or an IterableDataset,")
        shuffle = route == Route.TRAIN.value
        sampler = EpochSampler(data, ranks, rank, shuffle=shuffle, seed=options.seed, drop_last=options.drop_last)
    given: dict[str, Any] = {
        "collate_fn": collate_fn,
        "num_workers": num_workers,
        "pin_memory": pin_memory,
        "drop_last": options.drop_last,
    }
    if route == Route.TRAIN.value and isinstance(sampler, EpochSampler):
        return TrainLoader(data, batch_size, sampler, **given)
    return DataLoader(data, batch_size=batch_size, sampler=sampler, **given)
