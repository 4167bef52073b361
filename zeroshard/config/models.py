"""The obeyed part of a config as pydantic models: types, bounds and defaults.

Paths are those of the JSON file, so that an error's location is the JSON path. A test holds the fields against the rows
of the key table that say `obeyed`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from zeroshard.config.fields import (
    LARGEST,
    AnyText,
    Count,
    CountOrAuto,
    Counts,
    DtypeName,
    ElasticVersion,
    Flag,
    HalfName,
    LogLevel,
    Names,
    NamesOrAuto,
    NonNegative,
    Positive,
    PrintInterval,
    Share,
    Size,
    Stage,
    Text,
    TextList,
    one_of,
    real_number,
    whole,
)


class Section(BaseModel):
    """A section that takes nothing it doesn't know and doesn't change."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def placeholder(cls) -> Any:
        """What takes the place of a required value that is wrong or missing, while the rest is checked."""
        return 1


DEFAULT_LEAVES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)
"""Classes that are leaves where the model has them; all others that are named must be there."""


class LeafModuleSection(Section):
    classes: Names = DEFAULT_LEAVES
    names: Names = ()
    name_suffixes: Names = ()


class OffloadOptimizerSection(Section):
    device: Annotated[Literal["none", "cpu", "nvme"], one_of("none", "cpu", "nvme")] = "none"
    pin_memory: Flag = True
    ratio: Share = 1.0
    cpu_ratio: Share = 0.0
    nvme_path: Names | None = None
    encrypt: Flag = False
    allow_visible_spill: Flag = False


class OffloadParamSection(Section):
    device: Annotated[Literal["none", "cpu", "nvme"], one_of("none", "cpu", "nvme")] = "none"
    pin_memory: Flag = True
    nvme_path: Names | None = None
    encrypt: Flag = False
    allow_visible_spill: Flag = False


class AutomaticSection(Section):
    device_memory: Count | None = None
    sequence_length: Count | None = None


class LocoSection(Section):
    err_beta: Annotated[float, BeforeValidator(real_number(0, below=1))] | None = None
    reset_T: Count | None = None


class ZeroSection(Section):
    stage: Stage = 0
    automatic: AutomaticSection = Field(default_factory=AutomaticSection)
    param_persistence_threshold: Size = 100_000
    model_persistence_threshold: Size = LARGEST
    prefetch_bucket_size: Size = 50_000_000
    max_live_parameters: Size = 1_000_000_000
    max_reuse_distance: Size = 1_000_000_000
    overlap_step: Flag = False
    ignore_unused_parameters: Flag = True
    enable_sanity_checks: Flag = False
    zero_hpz_partition_size: Count = 1
    zero_quantized_weights: Flag = False
    zero_quantized_nontrainable_weights: Flag = False
    zero_quantized_weights_bits: Count = 8
    zero_quantized_weight_differences: Flag = False
    zero_quantized_gradients: Flag = False
    zeropp_loco_param: LocoSection = Field(default_factory=LocoSection)
    mics_shard_size: Annotated[int, whole(-1)] | None = None
    leaf_module: LeafModuleSection = Field(default_factory=LeafModuleSection)
    offload_optimizer: OffloadOptimizerSection = Field(default_factory=OffloadOptimizerSection)
    offload_param: OffloadParamSection = Field(default_factory=OffloadParamSection)


class Bf16Section(Section):
    enabled: Flag = False
    check_grad_overflow: Flag = True
    bf16_master_weights_and_grads: Flag = False
    bf16_optimizer_states: Flag = False


class Fp16Section(Section):
    enabled: Flag = False
    loss_scale: NonNegative = 0.0
    initial_scale_power: Annotated[int, whole(0, 64)] = 16
    loss_scale_window: Count = 1000
    hysteresis: Count = 2
    consecutive_hysteresis: Flag = False
    min_loss_scale: Positive = 1.0
    fp16_master_weights_and_grads: Flag = False


class Fp8Section(Section):
    enabled: Flag = False
    recipe: Text = "tensorwise"
    filter: NamesOrAuto = "auto"
    tokens: Count = 8192
    shards: Flag = True


class TorchAutocastSection(Section):
    enabled: Flag = False
    dtype: HalfName | None = None


class DataTypesSection(Section):
    grad_accum_dtype: DtypeName | None = None
    param_dtype: DtypeName | None = None
    buffer_dtype: DtypeName | None = None
    keep_in_fp32_modules: NamesOrAuto = "auto"


class ActivationSection(Section):
    policy: Annotated[Literal["calls", "full", "selective"], one_of("calls", "full", "selective")] = "calls"
    number_checkpoints: Count | None = None
    cpu_checkpointing: Flag = False
    synchronize_checkpoint_boundary: Flag = False
    profile: Flag = False


class CheckpointSection(Section):
    in_background: Flag = Field(default=False, alias="async")
    keep: Count | None = None
    directory: Text | None = None
    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], one_of("Ignore", "Warn", "Fail")] = "Warn"
    encryption_key: Text | None = None
    signing_key: Text | None = None
    signed_by: Names | None = None
    audit: Flag = False
    memory_steps: Annotated[int, whole(0)] = 10
    remote: Text | None = None
    on_failure: Annotated[Literal["raise", "warn"], one_of("raise", "warn")] = "raise"


class TensorboardSection(Section):
    enabled: Flag = False
    output_path: AnyText = ""
    job_name: Text = "DeepSpeedJobName"


class CsvMonitorSection(Section):
    enabled: Flag = False
    output_path: AnyText = ""
    job_name: Text = "DeepSpeedJobName"


class WandbSection(Section):
    enabled: Flag = False
    group: Text | None = None
    team: Text | None = None
    project: Text = "deepspeed"


class CometSection(Section):
    enabled: Flag = False
    samples_log_interval: Count = 100
    project: Text | None = None
    workspace: Text | None = None
    api_key: Text | None = None
    experiment_name: Text | None = None
    experiment_key: Text | None = None
    online: Flag | None = None
    mode: Text | None = None


class CommsLoggerSection(Section):
    enabled: Flag = False
    prof_all: Flag = True
    prof_ops: TextList = ()
    verbose: Flag = False


class FlopsProfilerSection(Section):
    enabled: Flag = False
    profile_step: Count = 1
    module_depth: Annotated[int, whole(-1)] = -1
    top_modules: Count = 1
    detailed: Flag = True
    output_file: Text | None = None


class MetricsSection(Section):
    enabled: Flag = False
    port: Annotated[int, whole(1, 65535)] = 9464
    address: Text = "127.0.0.1"
    directory: Text | None = None
    run: Text | None = None


class RunLogSection(Section):
    path: Text | None = None
    ranks: Flag = True


class OpenTelemetrySection(Section):
    enabled: Flag = False
    endpoint: Text | None = None


class ThroughputSection(Section):
    enabled: Flag = True


class TimersSection(Section):
    throughput: ThroughputSection = Field(default_factory=ThroughputSection)


class TensorParallelSection(Section):
    autotp_size: Annotated[int, whole(0)] = 0
    partition_config: dict[str, Any] | None = None


class ExpertParallelSection(Section):
    enabled: Flag = False
    autoep_size: Count = 1


Schedule = Literal[
    "auto", "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "vertical"
]


class PipelineSection(Section):
    activation_checkpoint_interval: Annotated[int, whole(0)] = 0
    partition: Text = "best"
    schedule: Annotated[Schedule, one_of(*get_args(Schedule))] = "auto"
    seed_layers: Flag = False
    stages: CountOrAuto = "auto"
    use_reentrant: Flag | None = None


class ElasticitySection(Section):
    enabled: Flag = False
    max_train_batch_size: Count = 2000
    micro_batch_sizes: Counts = (2, 4, 6)
    min_gpus: Count = 1
    max_gpus: Count = 10000
    prefer_larger_batch: Flag = True
    ignore_non_elastic_batch_info: Flag = False
    num_gpus_per_node: Count = 1
    version: ElasticVersion = 0.2


class ObeyedSections(Section):
    """Every obeyed key but the optimizer's and the scheduler's, which depend on their type."""

    zero_optimization: ZeroSection = Field(default_factory=ZeroSection)
    bf16: Bf16Section = Field(default_factory=Bf16Section)
    fp16: Fp16Section = Field(default_factory=Fp16Section)
    fp8: Fp8Section = Field(default_factory=Fp8Section)
    torch_autocast: TorchAutocastSection = Field(default_factory=TorchAutocastSection)
    data_types: DataTypesSection = Field(default_factory=DataTypesSection)
    activation_checkpointing: ActivationSection = Field(default_factory=ActivationSection)
    checkpoint: CheckpointSection = Field(default_factory=lambda: CheckpointSection())
    elasticity: ElasticitySection = Field(default_factory=ElasticitySection)
    pipeline: PipelineSection = Field(default_factory=PipelineSection)
    tensor_parallel: TensorParallelSection = Field(default_factory=TensorParallelSection)
    expert_parallel: ExpertParallelSection = Field(default_factory=ExpertParallelSection)
    tensorboard: TensorboardSection = Field(default_factory=TensorboardSection)
    csv_monitor: CsvMonitorSection = Field(default_factory=CsvMonitorSection)
    wandb: WandbSection = Field(default_factory=WandbSection)
    comet: CometSection = Field(default_factory=CometSection)
    comms_logger: CommsLoggerSection = Field(default_factory=CommsLoggerSection)
    flops_profiler: FlopsProfilerSection = Field(default_factory=FlopsProfilerSection)
    metrics: MetricsSection = Field(default_factory=MetricsSection)
    run_log: RunLogSection = Field(default_factory=RunLogSection)
    opentelemetry: OpenTelemetrySection = Field(default_factory=OpenTelemetrySection)
    memory_breakdown: Flag = False
    timers: TimersSection = Field(default_factory=TimersSection)
    communication_data_type: DtypeName | None = None
    gradient_clip_value: NonNegative = 0.0
    gradient_clipping: NonNegative = 1.0
    prescale_gradients: Flag = False
    gradient_predivide_factor: Positive = 1.0
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], one_of("mean", "sum")] = "mean"
    train_batch_size: Count | None = None
    train_micro_batch_size_per_gpu: Count | None = None
    gradient_accumulation_steps: Count | None = None
    managed_gradient_accumulation: Flag = True
    dataloader_drop_last: Flag = False
    log_level: LogLevel | None = None
    sequence_parallel_size: Count = 1
    steps_per_print: PrintInterval = None
    wall_clock_breakdown: Flag = False
    zero_allow_untested_optimizer: Flag = False
