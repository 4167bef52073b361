"""The vertical schedule: all micro-batches of a step pass a block before the next block.

    usual       forward 0 1 2 3, backward 3 2 1 0 of micro-batch 0, then the same of micro-batch 1, ...
    vertical    forward  block 0 of micro-batches 0 1 2 ..., then block 1 of 0 1 2 ..., ...
                backward block 3 of micro-batches 0 1 2 ..., then block 2 of 0 1 2 ..., ...

So a block is gathered, or read from host memory or disk, twice a step instead of twice a micro-batch, and reduced
once. The graph is cut between blocks: what a block gives is the next one's input as a leaf, and each block's backward
for each micro-batch is a graph of its own, a piece of the backward (see `Backward.in_pieces`). The plan's lists have
each unit's uses in a row (plan.program). It is looped breadth-first pipelining (Lamy-Poirier 2022, arXiv:2211.05953) on
one stage, as GreedySnake does it (arXiv:2512.17570).

Rejected: torch's ScheduleLoopedBFS, whose backwards go through the micro-batches from the last to the first, so that
sums of gradients have other bits; it asks for shapes and process groups, too, which one stage does not need. One
backward of all losses together: autograd then sums the micro-batches of a parameter in its own dtype, in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zeroshard.engine.core.handle import Handle, handle_of
from zeroshard.engine.core.hooks import cast_value
from zeroshard.engine.core.outputs import tensors_in
from zeroshard.engine.step.attached import stepper_of
from zeroshard.errors import UsageError
from zeroshard.pipeline.captured import reachable_parameters
from zeroshard.pipeline.module import PipelineModule
from zeroshard.plan.dtypes import torch_dtype
from zeroshard.sharding.resting import unguarded

Call = Callable[[Any], Any]
Loss = Callable[[Any, int], torch.Tensor]
"""The loss of a micro-batch, from the last block's output and the micro-batch's number."""
Cut = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors that a block gave, and the leaves that the next block got in their place."""

_REACHES = (
    "A function counts as using each module that it can reach through its variables, arguments and object: let it "
    "refer to the modules that it calls, not to the whole model"
)


class VerticalRunner:
    """Runs forwards and backwards of a sharded model that is a sequence of blocks.

    Args:
        calls: the model, as functions of which each is given what the one before gives. Those without parameters are
            run together with the one before them.
        through: runs the calls of a block; by default one after the other.
        autocast: a context for each block.

    Raises:
        UsageError: a block holds several units, each of which would be gathered for each micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        calls: Sequence[Call],
        through: Callable[[Sequence[Call], Any], Any] | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._handle = handle = handle_of(model)
        self._through, self._autocast = _one_after_the_other if through is None else through, autocast
        self._blocks = _joined(calls)
        members = [{id(one) for call in block for _, one in reachable_parameters(call)} for block in self._blocks]
        _refuse_several_units(handle, self._blocks, members)
        self._shared = _Shared(handle, members)
        self._checked = False

    def run(self, inputs: Sequence[Any], loss: Loss) -> None:
        """Forward and backward of the micro-batches of a step.

        Args:
            inputs: of each micro-batch.
            loss: what each backward begins with.
        """
        forward = self._handle.runtime.forward
        self._handle.check_open()
        self._shared.forget()
        forward.enter(0)
        try:
            cuts, losses = self._forward(inputs, loss)
        except BaseException:
            forward.leave(0, None, failed=True)
            raise
        finally:
            forward.repeats = False
        forward.leave(0, losses, failed=False)
        cuts.append([[(one, one)] for one in losses])
        del losses
        self._backward(cuts)
        self._checked = True

    def _forward(self, inputs: Sequence[Any], loss: Loss) -> tuple[list[list[Cut]], list[torch.Tensor]]:
        """The cuts after each block but the last, by micro-batch, and the losses."""
        dtype = self._handle.plan.policy.cast_inputs
        values = list(inputs) if dtype is None else [cast_value(value, torch_dtype(dtype)) for value in inputs]
        cuts: list[list[Cut]] = []
        for number, block in enumerate(self._blocks):
            cut_here: list[Cut] = []
            last = number == len(self._blocks) - 1
            for micro, given in enumerate(values):
                self._handle.runtime.forward.repeats = micro > 0
                since = torch.autograd._get_sequence_nr()
                value = self._call(block, _changeable(given) if number else given)
                if last:
                    value = loss(value, micro)
                    _refuse_without_graph(value, micro)
                if number and not self._checked:
                    _refuse_other_ways(value, since, number)
                cut: Cut = []
                values[micro] = value if last else _cut(value, cut, number)
                cut_here.append(cut)
            cuts.append(cut_here)
        return cuts[:-1], values

    def _call(self, block: Sequence[Call], value: Any) -> Any:
        with self._autocast():
            value = self._through(block, value)
        if torch.is_autocast_enabled(self._handle.device.type):
            torch.clear_autocast_cache()  # a weight's cast would belong to the graphs of several micro-batches
        return value

    def _backward(self, cuts: list[list[Cut]]) -> None:
        with self._handle.runtime.backward.in_pieces() as add_piece:
            while cuts:
                here = cuts.pop()
                for micro in range(len(here)):
                    cut, here[micro] = here[micro], []
                    _backward_of(cut, first=len(cuts) == len(self._blocks) - 1)
                    del cut
                    self._shared.hold(len(cuts), micro)
                    if micro < len(here) - 1:
                        add_piece()


class _Shared:
    """Holds the gradients of parameters that several blocks read, until those of a micro-batch are complete.

    In the usual order autograd adds up what a micro-batch gives for a parameter, and these sums are added up over the
    micro-batches. So that the bits are the same, the first sum is made here.
    """

    def __init__(self, handle: Handle, members: Sequence[set[int]]) -> None:
        self._first: dict[int, int] = {}
        found: dict[int, nn.Parameter] = {}
        trained = {
            id(one): one for unit in handle.runtime.units for group in unit.trainable for one in group.parameters
        }
        for number, ids in enumerate(members):
            for key in ids & trained.keys():
                if key in self._first:
                    found[key] = trained[key]
                self._first.setdefault(key, number)
        self._parameters = list(found.values())
        self._held: dict[tuple[int, int], torch.Tensor] = {}

    def hold(self, block: int, micro: int) -> None:
        """After a piece: take the gradients that are incomplete, and complete those that are not any more."""
        if not self._parameters:
            return
        with unguarded(), torch.no_grad():
            for parameter in self._parameters:
                key = id(parameter), micro
                gradient = parameter.grad
                held = self._held.get(key)
                first = self._first[id(parameter)]
                if block < first or (gradient is None and (held is None or block > first)):
                    continue
                total = held if gradient is None else gradient if held is None else held + gradient
                assert total is not None
                if block > first:
                    self._held[key], parameter.grad = total, None
                else:
                    parameter.grad = total
                    self._held.pop(key, None)

    def forget(self) -> None:
        """Drop what a backward left that ended in an exception."""
        self._held.clear()


class VerticalSchedule:
    """Steps of a sharded model by the vertical schedule.

    Args:
        model: sharded with `micro_batches=` of as many as a step has.
        loss_fn: gives a scalar for the last block's output and the second value of a micro-batch.
        blocks: the model as a sequence, if it is not an nn.Sequential or a PipelineModule: modules, or functions of
            them, of which each is given what the one before gives.

    Raises:
        UsageError: the model is not sharded, or can't be cut.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        blocks: Sequence[Call] | None = None,
    ) -> None:
        self._model, self._loss_fn = model, loss_fn
        through = model.through if blocks is None and isinstance(model, PipelineModule) else None
        self._runner = VerticalRunner(model, _calls_of(model) if blocks is None else blocks, through)

    def step(self, micro_batches: Sequence[tuple[Any, Any]]) -> list[torch.Tensor]:
        """Forward and backward of all micro-batches of a step; `optimizer.step()` follows. Called by all ranks.

        The gradients are those of `(loss_fn(model(x), y) / len(micro_batches)).backward()` for each pair.

        Args:
            micro_batches: pairs of the model's input and what the loss function takes second.

        Returns:
            The losses of the micro-batches, without a graph and not divided.

        Raises:
            UsageError: the plan has no sums for several micro-batches, a block reads what was not handed to it, or a
                loss has no graph.
        """
        count = len(micro_batches)
        if not count:
            raise UsageError("VerticalSchedule.step: there are no micro-batches")
        if not torch.is_grad_enabled():
            raise UsageError("VerticalSchedule.step() under torch.no_grad(): leave the context")
        if count > 1 and handle_of(self._model).plan.policy.micro_batches == 1:
            raise UsageError(
                f"VerticalSchedule.step: {count} micro-batches, but the plan has no sums for several: say "
                f"shard(..., micro_batches={count})"
            )
        scaler = stepper_of(self._model).scaler
        losses: list[torch.Tensor] = []

        def divided(output: Any, micro: int) -> torch.Tensor:
            loss = self._loss_fn(output, micro_batches[micro][1])
            losses.append(loss.detach())
            loss = loss / count
            return loss if scaler is None else loss.float() * scaler.scale

        self._runner.run([pair[0] for pair in micro_batches], divided)
        return losses


def _one_after_the_other(calls: Sequence[Call], value: Any) -> Any:
    for call in calls:
        value = call(value)
    return value


def _calls_of(model: nn.Module) -> Sequence[Call]:
    if isinstance(model, nn.Sequential):
        return list(model)
    if isinstance(model, PipelineModule):
        return model.forward_funcs
    raise UsageError(
        f"the vertical schedule: a {type(model).__name__} does not say what its blocks are: give "
        "VerticalSchedule(blocks=[...]), the modules or functions that a value passes one after the other, or write it "
        "as an nn.Sequential or a PipelineModule"
    )


def _joined(calls: Sequence[Call]) -> list[list[Call]]:
    """The calls in blocks: those without parameters go with the one before, at the beginning with the one after."""
    blocks: list[list[Call]] = []
    alone = True
    for call in calls:
        has = next(iter(reachable_parameters(call)), None) is not None
        if blocks and (alone or not has):
            blocks[-1].append(call)
        else:
            blocks.append([call])
        alone = alone and not has
    if not blocks:
        raise UsageError("the vertical schedule: there are no blocks")
    return blocks


def _refuse_several_units(handle: Handle, blocks: Sequence[Sequence[Call]], members: Sequence[set[int]]) -> None:
    of_unit = {
        id(parameter): unit
        for unit in handle.runtime.units
        for group in unit.groups
        for parameter in group.parameters
        if unit.plan.name and unit.plan.sharded
    }
    for number, ids in enumerate(members):
        labels = sorted({of_unit[key].label for key in ids if key in of_unit})
        if len(labels) > 1:
            function = any(not isinstance(call, nn.Module) for call in blocks[number])
            raise UsageError(
                f"the vertical schedule: block {number} holds the units {labels}, each of which would be gathered "
                "again for each micro-batch; give smaller blocks, or make the block one unit: shard(..., units=[...])"
                + (f". {_REACHES}" if function else "")
            )


def _cut(value: Any, cut: Cut, block: int) -> Any:
    """The value with each tensor that has a graph replaced by a leaf; both are noted in `cut`."""
    leaves: dict[int, torch.Tensor] = {}

    def leaf_of(one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or not one.requires_grad:
            return one
        if id(one) not in leaves:
            leaves[id(one)] = one.detach().requires_grad_()
            cut.append((one, leaves[id(one)]))
        return leaves[id(one)]

    made = tree_map(leaf_of, value)
    if any(id(one) not in leaves for one in tensors_in(value) if one.requires_grad):
        raise UsageError(
            f"the vertical schedule: block {block} gives a {type(value).__name__} with tensors that can't be found in "
            "it: give tensors, or tuples, lists and dicts of them"
        )
    return made


class _Alias(torch.autograd.Function):
    """The same memory behind a node of the graph: a block may change it in place, which torch refuses for a leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _changeable(value: Any) -> Any:
    """What a block is given: as in the usual order it may begin with an in-place operation."""
    aliases: dict[int, torch.Tensor] = {}

    def alias_of(one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or not one.requires_grad:
            return one
        if id(one) not in aliases:
            aliases[id(one)] = cast(torch.Tensor, _Alias.apply(one))
        return aliases[id(one)]

    return tree_map(alias_of, value)


def _backward_of(cut: Cut, *, first: bool) -> None:
    """The backward of a block for a micro-batch, from the gradients that the next block left; `first`: from a loss."""
    if first:
        torch.autograd.backward([one for one, _ in cut])
        return
    given = [(one, leaf.grad) for one, leaf in cut if leaf.grad is not None]
    if given:
        torch.autograd.backward([one for one, _ in given], [gradient for _, gradient in given])


def _refuse_without_graph(loss: torch.Tensor, micro: int) -> None:
    if not loss.requires_grad:
        raise UsageError(
            f"the vertical schedule: the loss of micro-batch {micro} has no graph, so nothing would be trained: no "
            "parameter that it was computed from requires gradients, or it was detached, or computed under no_grad()"
        )


def _refuse_other_ways(value: Any, since: int, block: int) -> None:
    """Raises UsageError if what a block gave was computed from something that was there before, besides its input."""
    waiting = [one.grad_fn for one in tensors_in(value) if one.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node._sequence_nr() < since:
            raise UsageError(
                f"the vertical schedule: block {block} computes with a tensor that an earlier block, or the same one "
                f"for another micro-batch, has computed ({node.name()}), and that is not its input: it would be "
                "another micro-batch's. Hand it on from block to block"
            )
        for further in _inputs_of(node):
            if further not in seen:
                seen.add(further)
                waiting.append(further)


def _inputs_of(node: torch.autograd.graph.Node) -> Iterator[torch.autograd.graph.Node]:
    return (one for one, _ in node.next_functions if one is not None)
