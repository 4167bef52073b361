"""Engines whose step takes the micro-batches themselves: `train_batch` in place of forward, backward and step.

    engine.train_batch(iterator)     reads gradient_accumulation_steps micro-batches, runs them in the order that a
                                     schedule says, takes the step, and gives the mean loss on all ranks

Here is what pipelines and the vertical schedule have in common: where batches come from, what they count, and the loss.
It is a mixin, since zeroshard's engine and that of the compat package take the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, cast

import torch
from torch.utils.data import DataLoader

from zeroshard.engine.batching import BatchSizes
from zeroshard.engine.training_engine import TrainingEngine
from zeroshard.errors import UsageError

_LABEL = "(loss of all stages)"


class BatchCalls(TrainingEngine):
    """What an engine does that is given the micro-batches of a step.

    Attributes:
        total_loss: of the last batch, on all ranks; None before the first.
        training_dataloader: what `train_batch` reads from where it is given no iterator.
    """

    total_loss: torch.Tensor | None = None
    training_dataloader: DataLoader[Any] | None = None
    _iterator: Iterator[Any] | None = None
    _batch_fn: Callable[[Any], Any] | None = None
    _labels: list[Any]
    _losses: list[torch.Tensor]

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self._batching.sizes.accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """True: a call of `train_batch` is a whole step."""
        return True

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Read from here where `train_batch` is given no iterator."""
        self._iterator = iterator

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Read from here again and again where `train_batch` is given no iterator."""
        self._iterator = _forever(loader)

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Make of what an iterator gives the batch that the engine takes."""
        self._batch_fn = fn

    def deepspeed_io(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """As the engine's; `train_batch` reads from the first training loader where it is given no iterator."""
        loader = super().deepspeed_io(*args, **kwargs)
        if self.training_dataloader is None and kwargs.get("route", "train") == "train":
            self.training_dataloader = loader
        return loader

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One step: forward and backward of its micro-batches, and the update. Called by all ranks.

        Args:
            data_iter: gives micro-batches; of a pipeline read on the first and the last stage alone.

        Returns:
            The mean loss over micro-batches and data ranks, on all ranks.
        """
        self._stepper("train_batch")
        assert self._backwards is not None
        if not torch.is_grad_enabled():
            raise UsageError("train_batch() under torch.no_grad(): evaluate in another call, or leave the context")
        self.module.train()
        count = self.micro_batches
        inputs, self._labels = self._read(self._source(data_iter), count)
        self._losses = []
        with self._backwards.started_by_engine():
            self._run(inputs, count)
        losses, self._losses, self._labels = self._losses, [], []
        self.total_loss = self._shared_mean(losses)
        self._backwards.since_step = count
        self.micro_steps += count - 1
        self._batching.since_step = count - 1
        super().step()
        return self.total_loss

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UsageError: `train_batch` runs the backwards."""
        refuse_call("backward")

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> NoReturn:
        """Raises UsageError: `train_batch` takes the step."""
        refuse_call("step")

    def _run(self, inputs: list[Any], count: int) -> None:
        """Forwards and backwards of `count` micro-batches."""
        raise NotImplementedError

    def _loss_of(self, output: Any, labels: Any) -> torch.Tensor:
        raise NotImplementedError

    def _split(self, batch: Any) -> tuple[Any, Any]:
        """A batch's input and labels. Raises UsageError for another kind."""
        raise NotImplementedError

    @property
    def _reads(self) -> tuple[bool, bool]:
        """Whether this rank reads inputs, and labels."""
        return True, True

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self._options.autocast
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def _scaled_loss(self, output: Any, micro: int) -> torch.Tensor:
        """What the backward of a micro-batch begins with; the loss itself is kept."""
        assert self._backwards is not None
        loss = self._loss_of(output, self._labels[micro])
        self._losses.append(loss.detach())
        return self._backwards.divide_and_scale(loss, divide=True)[1]

    def _shared_mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """The mean over micro-batches and data ranks, from the ranks that have the losses to all others.

        Ranks of `tp` have the same losses, those of a sequence each that of its part, so that the mean is one over all
        ranks of the stage.
        """
        mean = torch.zeros((), dtype=torch.float32, device=self.device)
        if losses:
            mean = torch.stack([loss.float() for loss in losses]).mean() / self.plan.mesh.world_size
        comm = self._handle.comm
        over = comm.control if comm.stages is None else comm.stages.everyone
        over.wait(over.all_reduce(mean, _LABEL))
        return mean

    def _set_vertical_sizes(self, sizes: BatchSizes) -> None:
        """Take sizes for the vertical schedule. Raises UsageError where the plan has no sums for its micro-batches."""
        if sizes.accumulation > 1 and self.plan.policy.micro_batches == 1:
            raise UsageError(
                f"pipeline.schedule 'vertical' began with one micro-batch per step, so the plan has no sums for "
                f"{sizes.accumulation}; set gradient_accumulation_steps in the config"
            )
        self._batching.sizes = sizes

    def _source(self, data_iter: Iterator[Any] | None) -> Iterator[Any] | None:
        if data_iter is not None:
            return data_iter
        if self._iterator is None and self.training_dataloader is not None:
            self._iterator = _forever(self.training_dataloader)
        return self._iterator

    def _read(self, source: Iterator[Any] | None, count: int) -> tuple[list[Any], list[Any]]:
        """Inputs and labels of `count` micro-batches where this rank needs them, on its device; elsewhere none."""
        first, last = self._reads
        if not (first or last):
            return [], []
        if source is None:
            raise UsageError(
                "train_batch() has no data to read: give train_batch(data_iter=...), or initialize(training_data=...)"
            )
        inputs, labels = [], []
        for number in range(count):
            pair = self._next(source, number, count)
            inputs += [_on(pair[0], self.device)] if first else []
            labels += [_on(pair[1], self.device)] if last else []
        return inputs, labels

    def _next(self, source: Iterator[Any], number: int, count: int) -> tuple[Any, Any]:
        for batch in source:
            return self._split(batch if self._batch_fn is None else self._batch_fn(batch))
        raise UsageError(
            f"the data iterator ended after {number} of the {count} micro-batches of a step "
            "(gradient_accumulation_steps); give one that goes on, or drop what is left of an epoch"
        )


def refuse_call(call: str, instead: str = "train_batch(data_iter)") -> NoReturn:
    """Raises UsageError: this engine's steps are calls of `train_batch`."""
    raise UsageError(
        f"engine.{call}(): this engine runs the micro-batches of a step in the order of its pipeline.schedule; call "
        f"{instead}"
    )


def _forever(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, (tuple, list)):
        return tuple(_on(one, device) for one in cast("Iterable[Any]", value))
    if isinstance(value, Mapping):
        return {key: _on(one, device) for key, one in cast("Mapping[Any, Any]", value).items()}
    return value
