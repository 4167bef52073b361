"""The engine of a pipeline: DeepSpeed's `train_batch` and `eval_batch` over torch's schedules.

    engine.train_batch(iterator)     reads gradient_accumulation_steps micro-batches, runs them through all stages,
                                     takes the step, and gives the mean loss on all ranks
    engine.eval_batch(iterator)      the same forward alone

It is a mixin, since zeroshard's engine and that of the compat package take the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader

from zeroshard.comm.stages import Stages
from zeroshard.engine.batching import BatchSizes
from zeroshard.engine.engine import Engine
from zeroshard.engine.training_engine import TrainingEngine
from zeroshard.errors import UsageError
from zeroshard.pipeline.module import PipelineModule
from zeroshard.pipeline.runner import Runner
from zeroshard.pipeline.schedules import VERTICAL, Shape, chosen, splits_backward
from zeroshard.pipeline.topology import PipelineParallelGrid
from zeroshard.pipeline.vertical import VerticalRunner

_LABEL = "(loss of all stages)"


class PipelineCalls(TrainingEngine):
    """What an engine does with a PipelineModule, in place of forward, backward and step.

    Attributes:
        total_loss: of the last batch, on all ranks; None before the first.
        training_dataloader: what `train_batch` reads from where it is given no iterator.
    """

    total_loss: torch.Tensor | None = None
    training_dataloader: DataLoader[Any] | None = None
    _asked_schedule = "auto"
    _trainer: tuple[int, Runner] | None = None
    _evaluator: tuple[int, Runner] | None = None
    _vertical: VerticalRunner | None = None
    _iterator: Iterator[Any] | None = None
    _batch_fn: Callable[[Any], Any] | None = None
    _labels: list[Any]
    _losses: list[torch.Tensor]

    def run_schedule(self, asked: str) -> None:
        """Run micro-batches by the schedule of a name ("auto": by what the module has); called once.

        Raises:
            UsageError: it can't run this pipeline.
        """
        self._asked_schedule = asked
        if not self._options.counts_micro_batches:
            raise UsageError(
                "managed_gradient_accumulation false: train_batch() of a pipeline makes a step of "
                "gradient_accumulation_steps micro-batches; leave the key out"
            )
        if splits_backward(self._schedule_name()):
            self._check_split()
        self._expect_backwards()

    def _check_split(self) -> None:
        name = self._schedule_name()
        sharded = next((unit.label for unit in self.plan.units if unit.sharded), None)
        if sharded is not None:
            raise UsageError(
                f"pipeline.schedule {name!r} at ZeRO stage 3: gradients of weights come when unit {sharded!r} is not "
                "gathered any more; use stage 2, or 1f1b, interleaved_1f1b or looped_bfs"
            )
        if self.pipeline.activation_checkpoint_interval:
            raise UsageError(
                f"pipeline.schedule {name!r} with activation_checkpoint_interval "
                f"{self.pipeline.activation_checkpoint_interval}: blocks would be computed again for inputs and for "
                "weights; leave one of the two out"
            )

    @property
    def pipeline(self) -> PipelineModule:
        """The model: this rank's stage of it."""
        assert isinstance(self.module, PipelineModule)
        return self.module

    @property
    def grid(self) -> PipelineParallelGrid:
        """This rank's place among all."""
        return self.pipeline.mpu()

    @property
    def mpu(self) -> PipelineParallelGrid:
        """As `grid`."""
        return self.pipeline.mpu()

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.pipeline.num_stages

    @property
    def stage_id(self) -> int:
        """The number of this rank's stage."""
        return self.pipeline.stage_id

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self._batching.sizes.accumulation

    def is_first_stage(self) -> bool:
        """Whether this rank has the first layers, and reads inputs."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this rank has the last stage; its layers are the last ones where stages have one chunk each."""
        return self.stage_id == self.num_stages - 1

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
        """Make of what an iterator gives the pair of inputs and labels."""
        self._batch_fn = fn

    def deepspeed_io(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """As the engine's; `train_batch` reads from the first training loader where it is given no iterator."""
        loader = super().deepspeed_io(*args, **kwargs)
        if self.training_dataloader is None and kwargs.get("route", "train") == "train":
            self.training_dataloader = loader
        return loader

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One step: forward and backward of its micro-batches through all stages, and the update. By all ranks.

        Args:
            data_iter: gives pairs of inputs and labels; read on the first and the last stage alone.

        Returns:
            The mean loss over micro-batches and data ranks, on all ranks.
        """
        assert self._backwards is not None
        if not torch.is_grad_enabled():
            raise UsageError("train_batch() under torch.no_grad(): use eval_batch(), or leave the context")
        self.module.train()
        count = self.micro_batches
        inputs, self._labels = self._read(self._source(data_iter), count)
        self._losses = []
        with self._backwards.started_by_engine():
            if self._stages is None:
                self._run_alone(inputs)
            else:
                self._training_runner(count).run(inputs)
        losses, self._losses, self._labels = self._losses, [], []
        self.total_loss = self._shared_mean(losses)
        self._backwards.since_step = count
        self.micro_steps += count - 1
        self._batching.since_step = count - 1
        super().step()
        return self.total_loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Micro-batches forward alone; called by all ranks.

        Args:
            return_logits: give the pair of result and outputs, which the last stage alone has.
            compute_loss: the result is the mean loss; else the outputs themselves.
            reduce_output: "avg", or None for the losses of this rank's micro-batches.
            bcast_loss: all ranks get the loss, which is the case anyway where it is reduced.
            num_micro_batches: how many are read; by default those of a step.
        """
        if reduce_output not in ("avg", None):
            raise UsageError(f"eval_batch(reduce_output={reduce_output!r}): 'avg' or None")
        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        inputs, labels = self._read(data_iter, count)
        trained = self.module.training
        self.module.eval()
        with torch.no_grad():
            if self._stages is None:
                outputs = [self._alone(value) for value in inputs]
            else:
                outputs = self._evaluating_runner(count).run(inputs)[1]
            losses = [self._loss(one, label) for one, label in zip(outputs, labels, strict=False) if compute_loss]
        self.module.train(trained)
        result: Any = outputs
        if compute_loss:
            result = self._shared_mean(losses) if reduce_output == "avg" else losses
        return (result, outputs) if return_logits else result

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UsageError: a stage alone has no output to give."""
        _refuse("forward")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UsageError: `train_batch` runs the backwards."""
        _refuse("backward")

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> NoReturn:
        """Raises UsageError: `train_batch` takes the step."""
        _refuse("step")

    def _set_sizes(self, sizes: BatchSizes) -> None:
        if self._asked_schedule != VERTICAL:
            super()._set_sizes(sizes)
        elif sizes.accumulation > 1 and self.plan.policy.micro_batches == 1:
            raise UsageError(
                f"pipeline.schedule 'vertical' began with one micro-batch per step, so the plan has no sums for "
                f"{sizes.accumulation}; set gradient_accumulation_steps in the config"
            )
        else:
            self._batching.sizes = sizes
        self._schedule_name()
        self._expect_backwards()

    def _expect_backwards(self) -> None:
        if self._backwards is not None:
            # Where weights' gradients come apart no backward is the last: what is whole is reduced in the step.
            name = self._schedule_name()
            several = 1 if name == VERTICAL else self.micro_batches * self.pipeline.chunks
            self._backwards.per_step = 0 if splits_backward(name) else several

    @property
    def _stages(self) -> Stages | None:
        return self._handle.comm.stages

    def _schedule_name(self) -> str:
        model = self.pipeline
        return chosen(self._asked_schedule, Shape(model.num_stages, model.chunks, model.placement, self.micro_batches))

    def _training_runner(self, count: int) -> Runner:
        if self._trainer is None or self._trainer[0] != count:
            self._trainer = count, self._runner(self._schedule_name(), count, self._scaled_loss)
        return self._trainer[1]

    def _evaluating_runner(self, count: int) -> Runner:
        if self._evaluator is None or self._evaluator[0] != count:
            kind = "gpipe" if self.pipeline.chunks == 1 else "looped_bfs"
            name = "zbv_zero_bubble" if self.pipeline.placement == "v" else kind
            self._evaluator = count, self._runner(name, count, None)
        return self._evaluator[1]

    def _runner(self, name: str, count: int, loss: Callable[[Any, int], torch.Tensor] | None) -> Runner:
        assert self._stages is not None
        collect = self._handle.runtime.backward.collect
        return Runner(self.pipeline, self._stages, name, count, self.device, self._autocast, loss, collect)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self._options.autocast
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def _alone(self, value: Any) -> Any:
        """The output of a pipeline of one stage."""
        with self._autocast():
            for chunk in range(self.pipeline.chunks):
                value = self.module(*(value if isinstance(value, tuple) else (value,)), chunk=chunk)
        return value

    def _run_alone(self, inputs: list[Any]) -> None:
        """Forwards and backwards of a pipeline of one stage."""
        if self._asked_schedule != VERTICAL:
            for micro, value in enumerate(inputs):
                self._scaled_loss(self._alone(value), micro).backward()
            return
        if self._vertical is None:
            model = self.pipeline
            self._vertical = VerticalRunner(model, model.forward_funcs, model.through, self._autocast)
        self._vertical.run(inputs, self._scaled_loss)

    def _loss(self, output: Any, labels: Any) -> torch.Tensor:
        if self.pipeline.loss_fn is None:
            return output
        with self._autocast():
            return self.pipeline.loss_fn(output, labels)

    def _scaled_loss(self, output: Any, micro: int) -> torch.Tensor:
        """What the backward of a micro-batch begins with; the loss itself is kept."""
        assert self._backwards is not None
        loss = self._loss(output, self._labels[micro])
        self._losses.append(loss.detach())
        return self._backwards.divide_and_scale(loss, divide=True)[1]

    def _shared_mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """The mean over micro-batches and data ranks, from the ranks that have the losses to all others.

        Ranks of `tp` have the same losses, so that the mean is one over all ranks of the stage.
        """
        mean = torch.zeros((), dtype=torch.float32, device=self.device)
        if losses:
            mean = torch.stack([loss.float() for loss in losses]).mean() / self.plan.mesh.world_size
        comm = self._handle.comm
        over = comm.control if comm.stages is None else comm.stages.everyone
        over.wait(over.all_reduce(mean, _LABEL))
        return mean

    def _source(self, data_iter: Iterator[Any] | None) -> Iterator[Any] | None:
        if data_iter is not None:
            return data_iter
        if self._iterator is None and self.training_dataloader is not None:
            self._iterator = _forever(self.training_dataloader)
        return self._iterator

    def _read(self, source: Iterator[Any] | None, count: int) -> tuple[list[Any], list[Any]]:
        """Inputs and labels of `count` micro-batches where this rank needs them, on its device; elsewhere none."""
        model = self.pipeline
        first, last = 0 in model.own, model.total_parts - 1 in model.own
        if not (first or last):
            return [], []
        if source is None:
            raise UsageError(
                "a pipeline reads no data: give train_batch(data_iter=...), or initialize(training_data=...)"
            )
        inputs, labels = [], []
        for number in range(count):
            pair = self._pair(source, number, count)
            inputs += [_on(pair[0], self.device)] if first else []
            labels += [_on(pair[1], self.device)] if last else []
        return inputs, labels

    def _pair(self, source: Iterator[Any], number: int, count: int) -> tuple[Any, Any]:
        for batch in source:
            pair = batch if self._batch_fn is None else self._batch_fn(batch)
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise UsageError(
                    f"a pipeline's data are pairs of inputs and labels, and the iterator gave a {type(pair).__name__}; "
                    "make one of it: engine.set_batch_fn(function)"
                )
            return pair[0], pair[1]
        raise UsageError(
            f"the data iterator ended after {number} of the {count} micro-batches of a step "
            "(gradient_accumulation_steps); give one that goes on, or drop what is left of an epoch"
        )


class PipelineEngine(PipelineCalls, Engine):
    """zeroshard's engine of a pipeline."""


def _refuse(call: str) -> NoReturn:
    raise UsageError(
        f"engine.{call}() of a pipeline: micro-batches go through all stages in turn; call train_batch(data_iter) or "
        "eval_batch(data_iter)"
    )


def _forever(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, (tuple, list)):
        return tuple(_on(one, device) for one in value)
    return value
