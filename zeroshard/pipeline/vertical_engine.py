"""The engine of a causal language model of transformers in the vertical schedule: `train_batch` with its own loss.

    train_batch(iterator) -- dicts of the model's arguments with labels -->
        blocks of the model (pretrained_blocks)  -->  the model's loss_function of logits and labels

The model's own forward, `engine(**batch)`, stays for evaluation. A loop that calls backward and step, as Trainer's
does, hands the micro-batches over one after the other, which this order can't use: it is told so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from zeroshard.engine.batching import BatchSizes
from zeroshard.engine.engine import Engine
from zeroshard.errors import UsageError
from zeroshard.pipeline.batches import BatchCalls
from zeroshard.pipeline.vertical import VerticalRunner

_COUNTED = "num_items_in_batch"


class VerticalCalls(BatchCalls):
    """What an engine does with a model of transformers that is cut into blocks."""

    _language_model: tuple[Any]
    _runner: VerticalRunner

    def run_blocks(self, language_model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Train by passing all micro-batches through each block; called once.

        Args:
            language_model: whose blocks these are; an adapter may be around it.

        Raises:
            UsageError: micro-batches are not counted, or the model can't be cut so.
        """
        if not self._options.counts_micro_batches:
            raise UsageError(
                "managed_gradient_accumulation false: train_batch() makes a step of gradient_accumulation_steps "
                "micro-batches; leave the key out"
            )
        self._language_model = (language_model,)  # not a child: it is the module, or within it
        self._runner = VerticalRunner(self.module, blocks, autocast=self._autocast)
        if self._backwards is not None:
            self._backwards.per_step = 1

    def _run(self, inputs: list[Any], count: int) -> None:
        self._runner.run(inputs, self._scaled_loss)

    def _loss_of(self, output: Any, labels: Any) -> torch.Tensor:
        (model,) = self._language_model
        with self._autocast():
            return model.loss_function(
                logits=output, labels=labels, vocab_size=model.config.get_text_config().vocab_size
            )

    def _split(self, batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, Mapping) or not {"input_ids", "labels"} <= batch.keys():
            found = f"one with {sorted(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
            raise UsageError(
                "train_batch() of a model of transformers takes dicts with input_ids, labels and the model's other "
                f"arguments, and the iterator gave a {found}; make one of it: engine.set_batch_fn(function)"
            )
        named = dict(cast("Mapping[str, Any]", batch))
        if _COUNTED in named:
            raise UsageError(
                f"train_batch(): {_COUNTED} divides losses by the tokens of all micro-batches, and these are averaged "
                "here; leave it out"
            )
        labels = named.pop("labels")
        return named, labels

    def _set_sizes(self, sizes: BatchSizes) -> None:
        self._set_vertical_sizes(sizes)


class VerticalEngine(VerticalCalls, Engine):
    """zeroshard's engine of a model of transformers in the vertical schedule."""
