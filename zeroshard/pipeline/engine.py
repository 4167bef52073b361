"""The engine of a pipeline: DeepSpeed's `train_batch` and `eval_batch` over torch's schedules.

    engine.train_batch(iterator)     reads gradient_accumulation_steps micro-batches, runs them through all stages,
                                     takes the step, and gives the mean loss on all ranks
    engine.eval_batch(iterator)      the same forward alone

It is a mixin, since zeroshard's engine and that of the compat package take the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from zeroshard.comm.stages import Stages
from zeroshard.engine.batching import BatchSizes
from zeroshard.engine.core.outputs import tensors_in
from zeroshard.engine.engine import Engine
from zeroshard.errors import UsageError
from zeroshard.parallel.whole_sequence import have_same
from zeroshard.pipeline.batches import BatchCalls, refuse_call
from zeroshard.pipeline.module import PipelineModule
from zeroshard.pipeline.runner import Runner
from zeroshard.pipeline.schedules import VERTICAL, Shape, chosen, splits_backward
from zeroshard.pipeline.topology import PipelineParallelGrid
from zeroshard.pipeline.vertical import VerticalRunner

_LOOKED_AT = 3
"""Batches in which the ranks of a sequence compare their tokens: who forgets to cut them does so then."""


class PipelineCalls(BatchCalls):
    """What an engine does with a PipelineModule, in place of forward, backward and step."""

    _asked_schedule = "auto"
    _trainer: tuple[int, Runner] | None = None
    _evaluator: tuple[int, Runner] | None = None
    _vertical: VerticalRunner | None = None
    _looked_at = 0

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

    def is_first_stage(self) -> bool:
        """Whether this rank has the first layers, and reads inputs."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this rank has the last stage; its layers are the last ones where stages have one chunk each."""
        return self.stage_id == self.num_stages - 1

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
            losses = [self._loss_of(one, label) for one, label in zip(outputs, labels, strict=False) if compute_loss]
        self.module.train(trained)
        result: Any = outputs
        if compute_loss:
            result = self._shared_mean(losses) if reduce_output == "avg" else losses
        return (result, outputs) if return_logits else result

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UsageError: a stage alone has no output to give."""
        refuse_call("forward", "train_batch(data_iter) or eval_batch(data_iter)")

    def _set_sizes(self, sizes: BatchSizes) -> None:
        if self._asked_schedule == VERTICAL:
            self._set_vertical_sizes(sizes)
        else:
            super()._set_sizes(sizes)
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

    def _alone(self, value: Any) -> Any:
        """The output of a pipeline of one stage."""
        with self._autocast():
            for chunk in range(self.pipeline.chunks):
                value = self.module(*(value if isinstance(value, tuple) else (value,)), chunk=chunk)
        return value

    def _run(self, inputs: list[Any], count: int) -> None:
        if self._stages is None:
            self._run_alone(inputs)
        else:
            self._training_runner(count).run(inputs)

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

    def _loss_of(self, output: Any, labels: Any) -> torch.Tensor:
        if self.pipeline.loss_fn is None:
            return output
        with self._autocast():
            return self.pipeline.loss_fn(output, labels)

    @property
    def _reads(self) -> tuple[bool, bool]:
        model = self.pipeline
        return 0 in model.own, model.total_parts - 1 in model.own

    def _read(self, source: Iterator[Any] | None, count: int) -> tuple[list[Any], list[Any]]:
        inputs, labels = super()._read(source, count)
        if self._reads[0]:
            self._refuse_whole_sequences(inputs)
        return inputs, labels

    def _refuse_whole_sequences(self, inputs: Sequence[Any]) -> None:
        """In the first batches: raises UsageError on all ranks of a sequence that were given the same part of it."""
        group = self.grid.get_sequence_parallel_group()
        self._looked_at += 1
        if group is None or self._looked_at > _LOOKED_AT:
            return
        tokens = next((one for value in inputs for one in tensors_in(value) if one.dim() > 1), None)
        if tokens is not None and have_same(tokens, group):
            raise UsageError(
                f"all {group.size()} ranks of a sequence were given the same {tokens.shape[1]} tokens: that is the "
                "whole sequence, of which each rank takes a part, for example by engine.set_batch_fn and "
                "engine.grid.get_sequence_parallel_rank()"
            )

    def _split(self, batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise UsageError(
                f"a pipeline's data are pairs of inputs and labels, and the iterator gave a {type(batch).__name__}; "
                "make one of it: engine.set_batch_fn(function)"
            )
        return batch[0], batch[1]


class PipelineEngine(PipelineCalls, Engine):
    """zeroshard's engine of a pipeline."""
