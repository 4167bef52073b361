"""Runs the micro-batches of a step through this rank's parts of a pipeline, and the other ranks' through theirs.

    first part     index of a micro-batch -> its inputs -> output --\\
    others                                                           activations from stage to stage
    last part                                output, index -> labels -> loss

The schedule is given the numbers of micro-batches in place of their contents, and chunks look these up: inputs and
labels may be any structure of tensors, of which nothing is joined or cut. What goes from stage to stage is tensors, one
or a tuple. Their shapes are found before the first step: each part runs once without being trained, and says to the
next what to expect. Rejected: torch's own inference of shapes, which runs forward and backward of the training's first
micro-batch twice, statistics of batch norms included.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn

from zeroshard.comm.stages import Stages
from zeroshard.errors import UsageError, ZeroShardError
from zeroshard.pipeline.module import PipelineModule
from zeroshard.pipeline.schedules import Collect, make_schedule

Loss = Callable[[Any, int], torch.Tensor]
_Shapes = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


class Chunk(nn.Module):
    """One part of the model as torch's stage sees it.

    Attributes:
        inputs: of the step's micro-batches, on the first part.
        outputs: of the last part, where they are kept.
    """

    def __init__(self, model: PipelineModule, chunk: int, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.model = model
        self._chunk, self._autocast = chunk, autocast
        part = model.own[chunk]
        self.is_first, self.is_last = part == 0, part == model.total_parts - 1
        self.inputs: Sequence[Any] = ()
        self.outputs: list[Any] | None = None

    def forward(self, *args: torch.Tensor) -> Any:
        """The part's output; the first part is given the number of a micro-batch."""
        inputs: tuple[Any, ...] = args
        if self.is_first:
            found = self.inputs[int(args[0])]
            inputs = found if isinstance(found, tuple) else (found,)
        with self._autocast():
            output = self.model(*inputs, chunk=self._chunk)
        if self.is_last and self.outputs is not None:
            self.outputs.append(output)
        if self.is_last and not isinstance(output, torch.Tensor):
            raise UsageError(f"the last layer of a pipeline gives a {type(output).__name__}; a tensor is needed")
        return output


class Runner:
    """Steps of one kind: training, or forwards alone.

    Args:
        loss: from the last part's output and the number of a micro-batch; None for forwards alone.
        collect: takes gradients of weights that a schedule computes apart.
    """

    def __init__(
        self,
        model: PipelineModule,
        stages: Stages,
        name: str,
        micro_batches: int,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]],
        loss: Loss | None,
        collect: Collect,
    ) -> None:
        self._model, self._stages, self._device = model, stages, device
        self._name, self._micro, self._loss = name, micro_batches, loss
        self._collect = collect
        self.chunks = [Chunk(model, chunk, autocast) for chunk in range(model.chunks)]
        self._schedule: Any = None
        self._seen: Any = None
        self._of_loss: RuntimeError | None = None

    def _made(self, inputs: Sequence[Any]) -> Any:
        """The schedule, for the shapes of a step's inputs; made by all ranks."""
        for chunk in self.chunks:
            chunk.inputs = inputs if chunk.is_first else ()
        return make_schedule(
            self._name,
            self.chunks,
            self._model.own,
            self._model.total_parts,
            self._micro,
            self._find_shapes(),
            self._device,
            self._stages.neighbours,
            self._loss_of_index if self._loss is not None else None,
            self._collect,
        )

    def _loss_of_index(self, output: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        try:
            return self._loss(output, int(index))
        except RuntimeError as error:  # told apart from what stages send each other, which torch lets through as it is
            self._of_loss = error
            raise

    def run(self, inputs: Sequence[Any]) -> tuple[list[torch.Tensor], list[Any]]:
        """One step's micro-batches; the losses and outputs of the last stage, elsewhere none.

        Args:
            inputs: of each micro-batch, on the first stage.
        """
        schedule = self._for_shapes(inputs)
        losses: list[torch.Tensor] = []
        outputs: list[Any] = []
        index = torch.arange(self._micro)
        for chunk in self.chunks:
            chunk.inputs = inputs if chunk.is_first else ()
            chunk.outputs = outputs if self._loss is None else None
        first = any(chunk.is_first for chunk in self.chunks)
        last = any(chunk.is_last for chunk in self.chunks)
        args = (index,) if first else ()
        call = "eval_batch" if self._loss is None else "train_batch"
        self._stages.log.record(call, "(all stages)", self._micro)  # ranks that call another, or none, are named
        try:
            with (
                self._stages.watchdog.waiting(f"micro-batches of {call}"),
                torch.set_grad_enabled(call == "train_batch"),
            ):
                target = {} if self._loss is None else {"target": index if last else None, "losses": losses}
                schedule.step(*args, **target, return_outputs=False)
        except RuntimeError as error:
            self._explain(error, call)
        finally:
            for chunk in self.chunks:
                chunk.inputs, chunk.outputs = (), None
        return losses, outputs

    def _for_shapes(self, inputs: Sequence[Any]) -> Any:
        """The schedule for a step's inputs: where shapes may change, the first stage says whether they have.

        Raises:
            UsageError: micro-batches differ in shape where they must not; the other stages are told.
        """
        shapes, stages = [_signature(value) for value in inputs], self._stages
        if self._loss is None or self._model.dynamic_shape:
            shapes = json.loads(stages.gather_text(json.dumps(shapes))[0])
            if shapes and shapes[0] != self._seen:
                self._schedule, self._seen = None, shapes[0]
        if self._schedule is None:
            self._schedule, self._seen = self._made(inputs), self._seen or next(iter(shapes), None)
        odd = next((shape for shape in shapes if shape != self._seen), None)
        if odd is None:
            return self._schedule
        error = UsageError(
            f"micro-batches of a step have the shapes {self._seen} and {odd}: stages know one shape; drop the last "
            "batch of an epoch, pad, or where only steps differ build PipelineModule(..., dynamic_shape=True)"
        )
        if self._loss is not None:
            stages.watchdog.announce(error)
        raise error

    def _explain(self, error: RuntimeError, call: str) -> NoReturn:
        """Raises the error of zeroshard that torch has put its own around, of a stage that is gone, or the model's."""
        inner: BaseException | None = error
        while inner is not None and not isinstance(inner, ZeroShardError):
            inner = inner.__cause__
        if inner is not None:
            raise inner from error
        if error.__cause__ is not None or error is self._of_loss:
            raise error
        raise self._stages.watchdog.explain_failure(f"micro-batches of {call}", error) from error

    def _find_shapes(self) -> list[_Shapes]:
        """The shapes of this rank's parts, from the first part of the model to its last."""
        found: dict[int, _Shapes] = {}
        before = json.dumps([_described(torch.zeros(1, dtype=torch.int64))])
        for part in range(self._model.total_parts):
            told = ""
            if part in self._model.own:
                chunk = self.chunks[self._model.own.index(part)]
                inputs = tuple(_undescribed(one, self._device) for one in json.loads(before))
                outputs = _outputs(self._run_once(chunk, inputs), part)
                found[part] = (_on_meta(inputs), _on_meta(outputs))
                told = json.dumps([_described(one) for one in outputs])
            before = next(text for text in self._stages.gather_text(told) if text)
        return [found[part] for part in self._model.own]

    def _run_once(self, chunk: Chunk, inputs: tuple[torch.Tensor, ...]) -> Any:
        """A part's output for its shape alone: neither random numbers nor buffers are as if it had run."""
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.set_grad_enabled(self._loss is not None):
            output = chunk(*inputs)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        return output


def _outputs(output: Any, part: int) -> tuple[torch.Tensor, ...]:
    values = output if isinstance(output, tuple) else (output,)
    for value in values:
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"part {part} of the pipeline hands on a {type(value).__name__}: between stages go tensors, one or a "
                "tuple of them; cut the model elsewhere, or make a tensor of it"
            )
    return values


def _on_meta(values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta").requires_grad_(
            value.requires_grad
        )
        for value in values
    )


def _described(value: torch.Tensor) -> Mapping[str, Any]:
    name = str(value.dtype).removeprefix("torch.")
    return {"shape": list(value.shape), "dtype": name, "grad": value.requires_grad}


def _undescribed(told: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, told["dtype"])
    return torch.zeros(told["shape"], dtype=dtype, device=device, requires_grad=told["grad"])


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return list(value.shape)
    if isinstance(value, (tuple, list)):
        return [_signature(one) for one in value]
    return type(value).__name__
