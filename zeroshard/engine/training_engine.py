"""The engine's training loop, with DeepSpeed's calls on top of the native interface; checkpoints are in engine.py.

loss = engine(**batch).loss          forward
engine.backward(loss)                scale, divide by the accumulation steps, backward, reduce where it is due
engine.step()                        at the last micro-batch: update, zero the gradients, next learning rate
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from zeroshard.engine.backwards import Backwards
from zeroshard.engine.batching import AsksSizes, Batching, BatchSizes
from zeroshard.engine.core.handle import Handle, handle_of
from zeroshard.engine.engine_options import EngineOptions
from zeroshard.engine.loader import Collate, DataPositions, make_loader
from zeroshard.engine.observing import Monitor, Observer, SilentMonitor, StepFacts, Throughput
from zeroshard.engine.outside_step.clip_value import clip_grad_value_
from zeroshard.engine.outside_step.offload_states import offload_states, reload_states
from zeroshard.engine.outside_step.unused import refuse_unused
from zeroshard.engine.place import AnswersPlace
from zeroshard.engine.settings import AnswersSettings, Settings
from zeroshard.engine.step.attached import stepper_of
from zeroshard.engine.step.schedule import advance, step_arguments
from zeroshard.engine.step.step_base import StepperBase
from zeroshard.errors import UsageError
from zeroshard.mesh import READERS
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.plan.plan import Plan

_UNOBSERVED = nullcontext()
_NO_MONITOR = SilentMonitor()


class TrainingEngine(nn.Module, AnswersSettings, AsksSizes, AnswersPlace):
    """Trains a sharded model with DeepSpeed's calls. Attributes it lacks are looked up on the model.

    Attributes:
        module: the model.
        optimizer: the sharded optimizer, None when the engine can't train.
        lr_scheduler: stepped after each applied update, None when there is none.
        micro_steps, global_steps, skipped_steps: micro-batches, optimizer steps, and steps not applied.
        global_samples: samples of all steps over all ranks.
        in_capture: whether a step is captured as a CUDA graph: what the host decides is done before and after it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: ShardedOptimizer | None,
        lr_scheduler: Any | None,
        batch: BatchSizes,
        options: EngineOptions | None = None,
    ) -> None:
        super().__init__()
        self.module = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.micro_steps = 0
        self.global_steps = 0
        self.skipped_steps = 0
        self.global_samples = 0
        self._options = options or EngineOptions()
        self._batching = Batching(batch, handle_of(model).plan.dp, counts=self._options.counts_micro_batches)
        self._backwards = None
        if optimizer is not None:
            self._backwards = Backwards(handle_of(model).runtime, stepper_of(model).scaler, self._batching)
        if self._options.check_every_pass:
            handle_of(model).runtime.check_every_pass()
        self._inside_no_sync = self._coalesces = False
        self.in_capture, self._unapplied = False, 0
        # Arguments of the scheduler's next advance; None once the outcome of the last step has been counted.
        self._scheduler_arguments: dict[str, Any] | None = None
        self._observer = self._options.observer
        self._data = DataPositions(None if self._observer is None else self._observer.timed)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            if any(name in vars(kind) for kind in type(self.module).__mro__):
                raise  # the model has this attribute, and the error is inside of it
            raise AttributeError(
                f"zeroshard's {type(self).__name__} has no attribute {name!r}, nor has the model that it trains "
                f"({type(self.module).__name__}); docs/engine.md lists the engine's calls",
                name=name,
                obj=self,
            ) from error

    @torch.compiler.disable(recursive=False)  # torch.compile(engine) compiles the model
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, under torch.autocast where the config says so."""
        dtype = self._options.autocast
        observed = _UNOBSERVED if self._observer is None else self._observer.forward(args, kwargs)
        with observed, nullcontext() if dtype is None else torch.autocast(self.device.type, dtype):
            return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward of one micro-batch.

        Args:
            loss: a scalar, averaged over the micro-batch.
            scale_wrt_gas: divide the loss by the accumulation steps.

        Returns:
            The loss as it was divided, without the loss scale.
        """
        self._stepper("backward", graphed=self.in_capture)
        self._handle.check_open()
        assert self._backwards is not None
        divided, scaled = self._backwards.divide_and_scale(loss, divide=scale_wrt_gas)
        observed = _UNOBSERVED if self._observer is None else self._observer.backward(divided)
        with observed, self._backwards.started_by_engine():
            scaled.backward(retain_graph=retain_graph)
        return divided

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale: `engine.scale(loss).backward()` is `engine.backward(loss)`.

        Without a loss scale (fp32, bf16) it is the loss; the division by the accumulation steps is in its backward.
        """
        self._stepper("scale", graphed=self.in_capture)
        self._handle.check_open()
        assert self._backwards is not None
        return self._backwards.scaled(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """After each backward: at the boundary of the accumulation updates the parameters, else only counts.

        `lr_kwargs` are for the scheduler's step then (`{"metrics": loss}` for ReduceLROnPlateau), equal on all ranks.
        """
        stepper = self._stepper("step", graphed=self.in_capture)
        assert self.optimizer is not None
        if self._inside_no_sync:
            raise UsageError("step() inside no_sync() or coalesce_grad_reduction(): leave the context first")
        if lr_kwargs and self.in_capture:
            raise UsageError("step(lr_kwargs) in a GraphedStep: they would stay what they were at its capture")
        arguments = step_arguments(self.lr_scheduler, lr_kwargs) if self._batching.step_updates else {}
        if not self._batching.count():
            self.micro_steps += 1
            return
        if not self.in_capture:
            self.count_outcome()
        micro_batches, batch = self._size_of_step()
        self.count_step(1, batch, arguments)
        with (
            _UNOBSERVED
            if self._observer is None
            else self._observed_update(self._observer, stepper, batch, micro_batches)
        ):
            self._update(self.optimizer)
        if self._batching.manual:
            self._take_accumulators()
        if not self.in_capture:
            self.end_step()

    def count_step(self, micro_batches: int, samples: int, arguments: Mapping[str, Any] | None = None) -> None:
        """Count an update whose outcome is not known yet.

        Args:
            micro_batches: those that are not counted yet.
            arguments: of the scheduler's step, if the update is applied.
        """
        self.micro_steps += micro_batches
        self.global_steps += 1
        self.global_samples += samples
        self._data.mark()
        self._scheduler_arguments = dict(arguments or {})

    def end_step(self) -> None:
        """After an update: look at its outcome if it is here, and print what is due."""
        stepper, every = stepper_of(self.module), self._options.steps_per_print
        due = every is not None and self.global_steps % every == 0
        if stepper.outcome_known or due:
            self.count_outcome()
        if due:
            self._print_progress(stepper)
        if self._observer is not None:
            self._observer.report(self.global_steps, due=due)

    def _observed_update(
        self, observer: Observer, stepper: StepperBase, batch: int, micro_batches: int
    ) -> AbstractContextManager[None]:
        assert self.optimizer is not None
        scale = None if stepper.scaler is None else stepper.scaler.scale
        rates = [group["lr"] for group in self.optimizer.param_groups if "lr" in group]
        on_host = [float(rate) for rate in rates if not (isinstance(rate, torch.Tensor) and rate.is_cuda)]
        return observer.update(StepFacts(self.global_steps, self.global_samples, batch, micro_batches, on_host, scale))

    def _update(self, optimizer: ShardedOptimizer) -> None:
        """Check and clip the gradients as the config says, update the parameters, and drop the gradients."""
        present = self._handle.runtime.gradients.present
        if present and not self._options.ignore_unused:
            refuse_unused(self._handle)
        if present and self._options.clip_value:
            clip_grad_value_(self.module, self._options.clip_value)
        optimizer.step()
        optimizer.zero_grad()

    def _size_of_step(self) -> tuple[int, int]:
        """Micro-batches and samples of the step that is being made."""
        assert self._backwards is not None
        backwards, sizes = self._backwards.count_from_here(), self._batching.sizes
        counted = self._options.counts_micro_batches
        return backwards, sizes.train if counted else sizes.train // sizes.accumulation * backwards

    def _print_progress(self, stepper: StepperBase) -> None:
        """One line on rank 0, for which the step waits for the device."""
        if self._handle.comm.rank != 0:
            return
        assert self.optimizer is not None
        rates = ", ".join(f"{float(group['lr']):g}" for group in self.optimizer.param_groups if "lr" in group)
        norm = stepper.report.norm
        parts = [f"rate {rates}"] if rates else []
        parts += [] if norm is None else [f"gradient norm {norm:g}"]
        parts += [f"{self.skipped_steps} skipped", *(() if self._observer is None else self._observer.progress())]
        print(f"step {self.global_steps}: {', '.join(parts)}", flush=True)

    def count_outcome(self) -> None:
        """Count the last step as applied or skipped; on a GPU that is known only after a while, so not in the step."""
        arguments, self._scheduler_arguments = self._scheduler_arguments, None
        if arguments is None:
            return
        stepper = stepper_of(self.module)
        report = stepper.report
        self.count_skipped()
        if report.applied and self.lr_scheduler is not None:
            advance(self.lr_scheduler, arguments)
        if self._observer is not None:
            self._observer.concluded(report, skipped=self.skipped_steps)

    def count_skipped(self) -> None:
        """Count the steps that were not applied, of those whose outcome is here."""
        unapplied = stepper_of(self.module).unapplied
        self.skipped_steps += unapplied - self._unapplied
        self._unapplied = unapplied

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the coming (or running) micro-batch is the last before the update."""
        return self._batching.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the coming micro-batch is the last before the update; None returns to counting.

        All ranks make the same call. A run with one micro-batch per step allocates accumulators at the first False that
        comes before the next backward (at stage 3: before the next forward); otherwise each rank keeps whole sums in
        that step.
        """
        self._batching.decide(is_boundary)
        if is_boundary is False:
            self._take_accumulators()

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts micro-batches; else every `step()` is an update of the backwards since the last."""
        return self._options.counts_micro_batches

    def _take_accumulators(self) -> None:
        """Allocate accumulators for several backwards per step, unless a backward is running."""
        if self.optimizer is not None and not self.plan.policy.accumulate and self._handle.runtime.may_accumulate:
            self._stepper("set_gradient_accumulation_boundary").start_accumulating(self._options.accumulate_dtype)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate on this rank. Not within coalesce_grad_reduction(), which reduces them."""
        if self._coalesces:
            raise UsageError("no_sync() inside of coalesce_grad_reduction(), which reduces at its end: leave it first")
        self._take_accumulators()
        with self._handle.runtime.reduce_policy.no_sync():
            before, self._inside_no_sync = self._inside_no_sync, True
            try:
                yield
            finally:
                self._inside_no_sync = before

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Backwards inside only accumulate on this rank; at the end of the block all is reduced at once, for one step.

        An exception inside leaves nothing reduced. Called by all ranks, which make the same backwards.
        """
        if self._inside_no_sync:
            raise UsageError("coalesce_grad_reduction() nested in no_sync() or another: leave the outer block first")
        if not self._options.counts_micro_batches:
            raise UsageError(
                "coalesce_grad_reduction() with managed_gradient_accumulation false: step() ends the accumulation "
                "there; use no_sync() to reduce once"
            )
        with self.no_sync():
            self._coalesces = True
            try:
                yield
            finally:
                self._coalesces = False
        self._handle.runtime.finish_gradients()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce what backwards left on each rank, if this micro-batch is the last of its step; called by all ranks.

        The step does so by itself. `bucket_size` is accepted for DeepSpeed's sake; the plan says what is sent together.
        """
        if self._batching.step_updates and not self._inside_no_sync:
            self._handle.runtime.finish_gradients()

    def empty_partition_cache(self) -> None:
        """Release what is gathered, and the device memory that torch keeps for later; called by all ranks."""
        runtime = self._handle.runtime
        if self.optimizer is not None and not runtime.between_passes:
            raise UsageError("empty_partition_cache() between a forward and its backward: call it after the backward")
        runtime.drain()
        runtime.parameters.release_all()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last step."""
        self._stepper("zero_grad", graphed=self.in_capture).zero_grad()

    def offload_states(self, include: Iterable[str] | None = None, device: str = "cpu", **options: bool) -> None:
        """See `zeroshard.offload_states`."""
        offload_states(self.module, include, device, **options)

    def reload_states(self, non_blocking: bool = False) -> None:
        """See `zeroshard.reload_states`."""
        reload_states(self.module, non_blocking=non_blocking)

    # Observation of a run, and the outcome of the last step.

    @property
    def monitor(self) -> Monitor:
        """Where `tensorboard`, `csv_monitor`, `wandb` and `comet` of the config write: `enabled`, `write_events`."""
        return _NO_MONITOR if self._observer is None else self._observer.monitor

    @property
    def tput_timer(self) -> Throughput:
        """How fast the steps are: `avg_samples_per_sec()` and more, see docs/observability.md."""
        if self._observer is None:
            raise UsageError(
                "engine.tput_timer: steps are not timed, because the config asks for no output of it; set "
                '"steps_per_print", "wall_clock_breakdown" or a monitor'
            )
        return self._observer.throughput

    def get_global_grad_norm(self) -> float | None:
        """Global norm of the last step's gradients before clipping; None before the first step."""
        return self._stepper("get_global_grad_norm").report.norm

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated the parameters; False within an accumulation and for a skipped step."""
        stepper = self._stepper("was_step_applied")
        return self._batching.since_step == 0 and stepper.report.applied

    @property
    def loss_scale(self) -> float:
        """The loss scale; 1.0 without fp16. Waits for the device."""
        scaler = self._stepper("loss_scale").scaler
        return 1.0 if scaler is None else float(scaler.scale)

    def get_mom(self) -> list[Any]:
        """Momentum, or betas, of each parameter group, 0.0 where it has none. Waits for the last step's outcome."""
        self._stepper("get_mom")
        self.count_outcome()
        assert self.optimizer is not None
        return [group.get("betas", group.get("momentum", 0.0)) for group in self.optimizer.param_groups]

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group. Waits for the outcome of the last step."""
        self._stepper("get_lr")
        self.count_outcome()
        assert self.optimizer is not None
        return self.optimizer.rates()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """From the next step on make updates of so many samples, by more or fewer micro-batches; called by all ranks.

        Raises:
            UsageError: no multiple of micro-batch x ranks, or called within an accumulation.
        """
        self._set_sizes(self._batching.with_train(train_batch_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Say that micro-batches have so many samples from now on; the accumulation stays, the batch size follows.

        A loader that was made before keeps its size; `deepspeed_io` makes a new one.
        """
        self._set_sizes(self._batching.with_micro(micro_batch_size))

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """From the next step on make updates of so many micro-batches; the batch size follows. Called by all ranks."""
        self._set_sizes(self._batching.with_accumulation(steps))

    def _set_sizes(self, sizes: BatchSizes) -> None:
        if self._batching.since_step:
            raise UsageError("the batch size can't change within an accumulation; change it after the step")
        if sizes.accumulation > 1 and self.optimizer is not None:
            self._stepper("set_train_batch_size").start_accumulating(self._options.accumulate_dtype)
        self._batching.sizes = sizes

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Collate | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A loader that gives this rank its part of `dataset`, shuffled anew in each epoch for the route 'train'.

        A run that continues from a checkpoint reads on at the next sample, with any number of ranks; but not if the
        dataset is iterable or a sampler is given.

        Args:
            batch_size: samples of a batch; by default those of a micro-batch.
            pin_memory: load into pinned memory; without effect where there is no GPU.
        """
        loader = make_loader(
            dataset,
            self._batching.sizes.micro if batch_size is None else batch_size,
            self._options.loader,
            route=route,
            sampler=data_sampler,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.device.type == "cuda",
            place=(self.plan.mesh.position(self._handle.comm.mesh.rank, self.plan.mesh.among(READERS)), self.plan.dp),
        )
        self._data.adopt(loader)
        return loader

    @property
    def _settings(self) -> Settings:
        """Answers to questions about the config."""
        return self._options.settings

    @property
    def plan(self) -> Plan:
        """The plan that runs."""
        return self._handle.plan

    @property
    def device(self) -> torch.device:
        return self._handle.device

    @property
    def _handle(self) -> Handle:
        return handle_of(self.module)

    def _stepper(self, call: str, *, graphed: bool = False) -> StepperBase:
        if self.optimizer is None:
            raise UsageError(
                f"engine.{call}: there is no optimizer; name one in the config ('optimizer': {{'type': 'AdamW', ...}}) "
                "or pass one to initialize(optimizer=...)"
            )
        if not graphed:
            stepper_of(self.module).refuse_capture(f"engine.{call}")
        return stepper_of(self.module)
