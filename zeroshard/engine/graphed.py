"""A training step as a CUDA graph: captured once, then replayed with other inputs; no Python runs between kernels.

    call 1, 2, 3     the function runs as it is: order learned, kernels compiled, memory found
    call 4           it runs once more, into a graph; the graph is launched
    later calls      inputs are copied to where the graph reads them, the graph is launched
    in between       evaluation, saving, GatheredParameters: the next call runs the function, then again the graph

With small micro-batches the host takes longer to issue a step than the GPU takes to run it. Everything that the engine
decides on the device already (clipping, skipping, loss scale) stays as it is; learning rates and other hyper-parameters
are read from the device, where each call puts what has changed. A graph begins and ends with all streams joined, and
is launched only from the state of the slots in which it was captured.

Rejected: graphs of forward and backward apart, as `torch.cuda.make_graphed_callables` makes them: the collectives of
one would have to be joined before the other begins, and overlap would end there.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from zeroshard.arguments import need_function
from zeroshard.comm.collectives import Pending
from zeroshard.comm.oplog import Recording
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.core.state_at_rest import StateAtRest
from zeroshard.engine.core.streams import CudaStreams
from zeroshard.engine.graphed_engine import Counts, EngineBesideGraph
from zeroshard.engine.step.attached import find_optimizer, stepper_of
from zeroshard.engine.step.device_stepper import DeviceStepper
from zeroshard.engine.training_engine import TrainingEngine
from zeroshard.errors import PlanError, UsageError, ZeroShardError, ZeroShardWarning
from zeroshard.optim.adam.device_adam import DeviceAdam

_LOGGER = logging.getLogger("zeroshard")
FIRST_EAGER = 3
"""Calls before the first capture: one learns the order of the units, one takes its memory, one is like all others."""
MAX_GRAPHS = 8
"""Shapes of inputs that get a graph; each graph holds its own inputs, all share the memory of activations."""
MAX_RESTLESS = 3
_CAPTURED = (
    "everything that a captured step does has to happen on the device: no .item(), no printing of tensors, no tensors "
    "made on the CPU, no random state that is saved (activation checkpointing with preserve_rng_state=True)"
)


@dataclass(frozen=True)
class _Graph:
    """A captured step.

    Attributes:
        inputs, outputs: where it reads and writes.
        issued, sent: what it issues, for the logs.
        resting: the engine's state before and after it.
        trainable: which parameters required gradients.
        kept: what it reads besides, and others may drop; and the plan, so that no other one is taken for it.
        counts: what the engine counts of it, where the step is an engine's.
    """

    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    outputs: Any
    issued: Recording
    sent: Recording
    resting: StateAtRest
    trainable: tuple[bool, ...]
    kept: object
    counts: Counts | None


class GraphedStep:
    """Calls `function`, a whole training step, and from the fourth call on replays it as a CUDA graph.

        def train(ids, targets):
            loss = model(ids, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = zeroshard.GraphedStep(model, train)
        for ids, targets in loader:
            loss = step(ids, targets)
            scheduler.step()

    Python in the function runs in the first calls only, so what the host decides stays outside: schedulers, printing,
    counting. Tensors among the arguments are moved to the device and may differ in each call; another shape, or another
    argument that is no tensor, gets a graph of its own. Without a GPU the function is simply called. Close the model
    before `torch.distributed.destroy_process_group`: NCCL waits there for graphs that hold its communicators.

    An engine of `initialize` trains so with its own calls: `GraphedStep(engine, function)`, whose function calls the
    engine, `engine.backward` and `engine.step` for all micro-batches of one step. The engine counts, steps its
    scheduler and saves on SIGTERM as ever.

    Args:
        model: a model that `zeroshard.shard` sharded with an Adam or AdamW whose state is on the GPU, or an engine.
        function: forward and backward of all micro-batches, step and zero_grad. Tensors in what it returns are copied.
        required: a step that can't be captured is an error; else it goes on without a graph, with a warning.

    Raises:
        PlanError: state in host memory, or an optimizer whose steps need the host.
        UsageError: an engine that times or reports its passes.
    """

    def __init__(self, model: nn.Module, function: Callable[..., Any], *, required: bool = False) -> None:
        self._beside: EngineBesideGraph | None = None
        if isinstance(model, TrainingEngine):
            self._beside, model = EngineBesideGraph(model), model.module
        handle, stepper, optimizer = handle_of(model), stepper_of(model), find_optimizer(model)
        assert optimizer is not None
        need_function(function, "GraphedStep", "a function that makes a whole training step")
        self._handle, self._optimizer = handle, optimizer
        self._model, self._function = model, function
        self._streams: CudaStreams | None = None
        self._graphs: dict[Hashable, _Graph] = {}
        self._calls: Counter[Hashable] = Counter()
        self._restless = 0
        self._required, self._failed = required, False
        self._launched: deque[Pending] = deque(maxlen=1)
        if handle.device.type != "cuda":
            return
        streams = handle.runtime.streams
        if not isinstance(streams, CudaStreams):
            raise PlanError("GraphedStep: the model runs on streams of another kind than CUDA's")
        if handle.comm.stages is not None:
            raise PlanError("GraphedStep: pipeline stages wait for each other on the host; train with optimizer.step()")
        if handle.plan.updates or any(g.param.off_device for _, g in handle.plan.groups()):
            raise PlanError("GraphedStep: state in host memory can't be stepped in a graph; keep it on the GPU")
        if any(hop.feedback and hop.feedback.reset for _, g in handle.plan.groups() for hop in g.hops):
            raise PlanError("GraphedStep: errors of codes that are reset are counted on the host; leave reset_T out")
        if not isinstance(stepper, DeviceStepper) or type(stepper.update_method) is not DeviceAdam:
            raise PlanError(f"GraphedStep: {optimizer.name} decides on the host; use Adam or AdamW")
        self._streams, self._stepper, self._update = streams, stepper, stepper.update_method
        self._stream = torch.cuda.Stream(handle.device)
        self._event = torch.cuda.Event()
        launched, graphs = self._launched, self._graphs
        handle.comm.watchdog.watch(lambda: launched[0] if launched else None)
        # A communicator that a graph holds can't be destroyed: NCCL would wait for the graph's end.
        handle.closers.append(graphs.clear)

    @property
    def graphs(self) -> int:
        """How many graphs were captured."""
        return len(self._graphs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step; what the function returns."""
        self._handle.check_open()
        if self._streams is None:
            leaves, spec = tree_flatten((args, kwargs))
            _refuse_gradients(leaves)
            return self._call(leaves, spec)
        current = torch.cuda.current_stream(self._handle.device)
        # Read after write, and write after read on the way back: inputs belong to the caller's stream, and so will the
        # results. One stream for all steps, so that what libraries keep per stream is there when a graph is captured.
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = self._step(self._streams, args, kwargs)
        current.wait_stream(self._stream)
        return result

    def _step(self, streams: CudaStreams, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((tuple(args), kwargs))
        _refuse_gradients(leaves)
        if self._failed:
            return self._call(leaves, spec)
        leaves = [self._moved(leaf) for leaf in leaves]
        key = (str(spec), self._model.training, tuple(map(_kind, leaves)))
        graph = self._graphs.get(key)
        if graph is not None and graph.resting.memory != self._handle.runtime.resting().memory:
            self._graphs.clear()
            self._calls.clear()
            graph = None
        if graph is not None and self._fits(graph):
            return self._replay(streams, graph, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        self._calls[key] += 1
        ready = self._calls[key] > (1 if self._graphs else FIRST_EAGER)
        if graph is None and ready and len(self._graphs) < MAX_GRAPHS and self._restless < MAX_RESTLESS:
            return self._capture_if_possible(streams, key, leaves, spec)
        return self._call(leaves, spec)

    def _call(self, leaves: Sequence[Any], spec: TreeSpec) -> Any:
        args, kwargs = tree_unflatten(leaves, spec)
        return self._function(*args, **kwargs)

    def _moved(self, leaf: Any) -> Any:
        return leaf.to(self._handle.device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    def _fits(self, graph: _Graph) -> bool:
        return graph.resting == self._handle.runtime.resting() and graph.trainable == self._trainable()

    def _trainable(self) -> tuple[bool, ...]:
        groups = [group for unit in self._handle.runtime.units for group in unit.groups]
        return tuple(parameter.requires_grad for group in groups for parameter in group.parameters)

    def _capture_if_possible(self, streams: CudaStreams, key: Hashable, leaves: Sequence[Any], spec: TreeSpec) -> Any:
        try:
            return self._capture(streams, key, leaves, spec)
        except _NotCapturedError as error:
            if self._required:
                raise
            self._failed = True
            warnings.warn(f"{error}. Training goes on without a graph", ZeroShardWarning, stacklevel=4)
        return self._call(leaves, spec)

    def _capture(self, streams: CudaStreams, key: Hashable, leaves: Sequence[Any], spec: TreeSpec) -> Any:
        """Capture the step, keep the graph if the engine rests after it as before, and launch it."""
        runtime, comm, beside = self._handle.runtime, self._handle.comm, self._beside
        if beside is not None:
            beside.before()
        self._stepper.read_outcomes()
        runtime.parameters.changes.report()  # no pass of a replay comes to it
        self._update.refresh(self._optimizer.param_groups)
        inputs = [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        rest = iter(inputs)
        args = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        streams.begin_epoch()
        if not self._graphs:
            # The allocator forgets a pool with its last graph, and refuses its number then (expandable segments).
            self._pool = torch.cuda.graph_pool_handle()
        resting, graph, whole = runtime.resting(), torch.cuda.CUDAGraph(), False
        counted: list[Counts] = []
        try:
            # Other threads of this process (watchdogs, loaders) may go on calling CUDA meanwhile.
            with (
                comm.log.recording() as issued,
                comm.sent.recording() as sent,
                nullcontext(counted) if beside is None else beside.captured() as counted,
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                streams.adopt_current_stream()
                streams.begin_epoch_after_compute()
                # Without their autograd graph, which would keep the forward's pass alive.
                outputs = tree_map_only(torch.Tensor, torch.Tensor.detach, self._call(args, spec))
                streams.drain()
                rested = runtime.resting()
            whole = True
        except RuntimeError as error:
            raise _explained(error) from error
        finally:
            if not whole:
                streams.begin_epoch()
                runtime.abandon()
                self._stepper.zero_grad()
        kept = (self._stepper.read_by_graphs, runtime.plan)
        made = _Graph(graph, inputs, outputs, issued, sent, resting, self._trainable(), kept, *(counted or [None]))
        self._stepper.prepare_replay(self._stepper.captured_digest)
        self._launch(streams, made)
        if rested == resting:
            self._graphs[key] = made
            _LOGGER.info("GraphedStep: captured a step of %d operations", len(issued.entries))
        else:
            self._restless += 1
            _LOGGER.warning("GraphedStep: the engine did not come to rest as it was before the step; no graph is kept")
        results = self._results(made)
        if beside is not None:
            beside.after()
        return results

    def _replay(self, streams: CudaStreams, graph: _Graph, inputs: Sequence[torch.Tensor]) -> Any:
        runtime, comm = self._handle.runtime, self._handle.comm
        self._optimizer.check_groups()
        runtime.parking.refuse("a step")
        streams.begin_epoch()
        runtime.inspection.before_pass()
        runtime.take_over()
        for static, given in zip(graph.inputs, inputs, strict=True):
            static.copy_(given)
        if self._beside is not None:
            self._beside.before()  # as late as possible: it may wait until the GPU has nothing to do
        self._update.refresh(self._optimizer.param_groups)
        comm.sent.repeat(graph.sent, "")
        self._stepper.prepare_replay(comm.log.repeat(graph.issued, self._stepper.group_table()))
        self._launch(streams, graph)
        self._stepper.read_outcomes(but_newest=1)  # of the step before; the GPU has this one to work on meanwhile
        results = self._results(graph)
        if self._beside is not None and graph.counts is not None:
            self._beside.replayed(graph.counts)
        return results

    def _launch(self, streams: CudaStreams, graph: _Graph) -> None:
        graph.graph.replay()
        self._stepper.replayed()
        self._event.record()
        self._launched.append(Pending("graph", "a training step", event=self._event))
        streams.begin_epoch_after_compute()

    def _results(self, graph: _Graph) -> Any:
        return tree_map_only(torch.Tensor, torch.Tensor.clone, graph.outputs)


def _kind(leaf: Any) -> Hashable:
    """What two calls must have in common to share a graph. Raises UsageError for what can't be compared."""
    if isinstance(leaf, torch.Tensor):
        return torch.Tensor, leaf.dtype, leaf.shape
    if not isinstance(leaf, Hashable):
        raise UsageError(f"GraphedStep: an argument of type {type(leaf).__name__} can't be compared between calls")
    return type(leaf), leaf


def _explained(error: RuntimeError) -> Exception:
    """What went wrong first: the end of a capture fails, too, where something in it has failed."""
    first: BaseException = error
    while first.__context__ is not None:
        first = first.__context__
    if isinstance(first, ZeroShardError):
        return first
    text = str(first).splitlines()[0] if str(first) else type(first).__name__
    return _NotCapturedError(f"GraphedStep: the step can't be captured ({text}); {_CAPTURED}")


class _NotCapturedError(UsageError):
    """The step did what a graph can't hold."""


def _refuse_gradients(leaves: Sequence[Any]) -> None:
    """Also where nothing is captured, so that what works without a GPU works with one."""
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        raise UsageError("GraphedStep: an argument requires a gradient; pass it detached")
