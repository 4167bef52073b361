"""The resolved config: plain typed fields, frozen, every default filled in; `initialize` builds a plan from it.

It holds no pydantic and no `"auto"`, and it pickles, so that it can be sent to a spawned rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from zeroshard.fp8.recipe import Fp8

Dtype = Literal["fp32", "bf16", "fp16"]
Value = TypeVar("Value")


class FrozenMap(Mapping[str, Value]):
    """A mapping that can't be changed, compares by content and pickles (which `MappingProxyType` does not)."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Value]) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> Value:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True)
class LeafModules:
    """Modules that are gathered as a whole: by class, by path, by the end of the path."""

    classes: tuple[str, ...]
    names: tuple[str, ...]
    name_suffixes: tuple[str, ...]


@dataclass(frozen=True)
class OffloadConfig:
    """What rests off the device: at least the share `ratio` of the optimizer's state, and parameters or not.

    Attributes:
        param: whether sharded parameters do.
        state_on_disk, param_on_disk: whether they rest in files, else in host memory.
        paths: the folders of these files; () where there are none.
        encrypt, allow_visible: how they are kept.
        host_ratio: the share of the state, at most, that rests in host memory although the rest is on disk.
    """

    ratio: float
    param: bool
    pin_memory: bool
    paths: tuple[str, ...] = ()
    encrypt: bool = False
    allow_visible: bool = False
    state_on_disk: bool = False
    param_on_disk: bool = False
    host_ratio: float = 0.0


@dataclass(frozen=True)
class ZeroConfig:
    """Sharding over the data-parallel ranks; sizes are in elements.

    Attributes:
        stage: "auto" until the planner has chosen.
        overlap_step: whether the gathers after a step run on beside what follows, which must not read parameters.
        subgroup: ranks that hold a whole copy of something; None where all ranks are one group.
        codes: which sharded parameters are gathered as codes.
        code_bits: of one code, 8 or 4.
        differences: whether second copies of trained parameters get what a step has changed, in 4-bit codes.
        second_copies: that is a second copy of the parameters (hpZ), or nothing but the way of sums in codes where
            these rest whole; else all of the state (MiCS).
        quantized_gradients: whether gradients are summed in codes.
        error_beta, error_reset: how what these codes leave out comes back; None where the config does not say.
        ignore_unused: whether parameters may stay without a gradient.
        check_every_pass: whether every pass looks for what its code writes on parameters.
        automatic_memory, automatic_length: for that choice: bytes of each device, tokens of a sequence.
    """

    stage: int | Literal["auto"]
    overlap_step: bool
    param_persistence_threshold: int
    model_persistence_threshold: int
    prefetch_bucket_size: int
    max_live_parameters: int
    max_reuse_distance: int
    leaf_modules: LeafModules
    offload: OffloadConfig | None
    subgroup: int | None = None
    second_copies: bool = False
    codes: Literal["none", "frozen", "all"] = "none"
    code_bits: int = 8
    differences: bool = False
    quantized_gradients: bool = False
    error_beta: float | None = None
    error_reset: int | None = None
    ignore_unused: bool = True
    check_every_pass: bool = False
    automatic_memory: int | None = None
    automatic_length: int | None = None


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes; None leaves the choice to the plan. `autocast` is that of torch.autocast, None where it is off.

    Attributes:
        check_overflow: whether a step from bf16 gradients with inf or NaN is skipped.
        master: whether 16-bit parameters have master weights in fp32.
        low_moments: whether the moments are in 16 bits too, where there are no master weights.
        fp8: how linear layers multiply in fp8; None where they don't.
    """

    compute: Dtype
    communication: Dtype | None
    grad_accum: Dtype | None
    buffer: Dtype | None
    keep_in_fp32_modules: Literal["auto"] | tuple[str, ...]
    autocast: Dtype | None = None
    check_overflow: bool = True
    master: bool = True
    low_moments: bool = False
    fp8: Fp8 | None = None


@dataclass(frozen=True)
class LossScaleConfig:
    """The loss scale of fp16. A static scale is `initial`; window and the rest then have no effect."""

    dynamic: bool
    initial: float
    window: int
    hysteresis: int
    consecutive_hysteresis: bool
    minimum: float


@dataclass(frozen=True)
class BatchConfig:
    """train = micro x accumulation x world size, in samples.

    Attributes:
        managed: whether the engine counts micro-batches to the last of a step; else the script's step() is an update.
    """

    train: int
    micro: int
    accumulation: int
    managed: bool = True


@dataclass(frozen=True)
class ReductionConfig:
    """How gradients of several ranks become one."""

    prescale: bool
    predivide_factor: float
    op: Literal["mean", "sum"]


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer that the config asks for, with every parameter of its type."""

    type: str
    params: Mapping[str, Any]


@dataclass(frozen=True)
class SchedulerConfig:
    """A learning-rate schedule that the config asks for, with every parameter of its type."""

    type: str
    params: Mapping[str, Any]


@dataclass(frozen=True)
class ActivationConfig:
    """Activation checkpointing.

    Attributes:
        policy: where the script calls `checkpoint` only ("calls"), or at blocks of the model: all of it computed again
            ("full"), or all but products and attention ("selective").
        number: so many blocks, evenly; None is all.
        on_host, synchronize, profile: see `zeroshard.checkpointing`.
    """

    policy: Literal["calls", "full", "selective"]
    number: int | None
    on_host: bool
    synchronize: bool
    profile: bool


@dataclass(frozen=True)
class CheckpointConfig:
    """How checkpoints are saved: in the background, how many are kept (None: all), and where SIGTERM saves one.

    `tag_validation` says what is done where ranks give different tags, `encryption_key` where the key of encrypted ones
    is (None: they are in the clear), and `audit` begins a log of what is done with them. In an elastic job the state is
    kept in memory after every `memory_steps` steps; 0 is never. `on_failure` says whether a save that fails is an
    error, and `remote` is a URL to which checkpoints are copied. `signing_key` says where the key is that signs them
    (None: they are not signed), and `signed_by` has the public keys of which one must have signed what is loaded (None:
    those of the environment).
    """

    background: bool
    keep: int | None
    directory: str | None
    tag_validation: Literal["Ignore", "Warn", "Fail"]
    encryption_key: str | None
    audit: bool
    memory_steps: int
    on_failure: Literal["raise", "warn"]
    remote: str | None
    signing_key: str | None
    signed_by: tuple[str, ...] | None


@dataclass(frozen=True)
class FilesConfig:
    """A monitor that writes files; an empty path is a folder of its own beside the script."""

    output_path: str
    job_name: str


@dataclass(frozen=True)
class WandbConfig:
    """Where Weights & Biases logs to."""

    project: str
    group: str | None
    team: str | None


@dataclass(frozen=True)
class CometConfig:
    """Where Comet logs to, and after how many samples again."""

    samples_log_interval: int
    project: str | None
    workspace: str | None
    api_key: str | None
    experiment_name: str | None
    experiment_key: str | None
    online: bool | None
    mode: str | None


@dataclass(frozen=True)
class CommsConfig:
    """The log of collectives: of which kinds (None is all), and whether each step prints its own."""

    ops: tuple[str, ...] | None
    verbose: bool


@dataclass(frozen=True)
class FlopsConfig:
    """After how many steps the FLOPs of one are counted, and how they are told: levels of modules, of each so many."""

    profile_step: int
    depth: int
    top: int
    detailed: bool
    output_file: str | None


@dataclass(frozen=True)
class MetricsConfig:
    """Where a node's metrics are served, in which folder its ranks leave them, and what the run is called there."""

    port: int
    address: str
    directory: str | None
    run: str | None


@dataclass(frozen=True)
class RunLogConfig:
    """The file that gets a line for each step of rank 0, and whether each other rank writes one beside it."""

    path: str
    ranks: bool


@dataclass(frozen=True)
class TracesConfig:
    """An OTLP endpoint for spans; None where they go to the provider that the program has set."""

    endpoint: str | None


@dataclass(frozen=True)
class ObserveConfig:
    """What is to be seen of a run; None is what is not asked for.

    Attributes:
        every: optimizer steps between two lines of progress.
        breakdown: whether the times of forward, backward and step are printed.
        throughput: whether lines of progress tell how fast the steps are.
        memory: whether the memory in use is printed.
        run_log: the files that get a line for each step.
        traces: where spans of OpenTelemetry go.
    """

    every: int | None
    breakdown: bool
    throughput: bool
    memory: bool
    comms: CommsConfig | None
    flops: FlopsConfig | None
    metrics: MetricsConfig | None
    run_log: RunLogConfig | None
    traces: TracesConfig | None
    tensorboard: FilesConfig | None
    csv: FilesConfig | None
    wandb: WandbConfig | None
    comet: CometConfig | None


VERTICAL = "vertical"
"""The name of the schedule in which all micro-batches of a step pass a block before the next one."""


@dataclass(frozen=True)
class PipelineConfig:
    """What is asked of a PipelineModule; `stages` and `partition` are None where the module's own count."""

    schedule: str
    stages: int | None
    partition: str | None
    seed_layers: bool
    checkpoint_interval: int
    reentrant: bool


@dataclass(frozen=True)
class Config:
    """A whole config. `origins` says for each JSON path where its value comes from."""

    world_size: int
    zero: ZeroConfig
    precision: PrecisionConfig
    loss_scale: LossScaleConfig | None
    batch: BatchConfig
    gradient_clip_value: float
    gradient_clipping: float
    reduction: ReductionConfig
    optimizer: OptimizerConfig | None
    scheduler: SchedulerConfig | None
    checkpoint: CheckpointConfig
    activations: ActivationConfig
    pipeline: PipelineConfig
    drop_last: bool
    steps_per_print: int | None
    observe: ObserveConfig
    allow_untested_optimizer: bool
    log_level: str | None
    origins: Mapping[str, str]
