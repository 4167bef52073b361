"""Parts of a resolved config that follow from single sections."""

from __future__ import annotations

from zeroshard.config.models import (
    CometSection,
    CommsLoggerSection,
    CsvMonitorSection,
    FlopsProfilerSection,
    MetricsSection,
    ObeyedSections,
    OpenTelemetrySection,
    RunLogSection,
    TensorboardSection,
    WandbSection,
)
from zeroshard.config.resolved import (
    ActivationConfig,
    CometConfig,
    CommsConfig,
    FilesConfig,
    FlopsConfig,
    LossScaleConfig,
    MetricsConfig,
    ObserveConfig,
    PipelineConfig,
    RunLogConfig,
    TracesConfig,
    WandbConfig,
)


def activations(sections: ObeyedSections) -> ActivationConfig:
    """What is checkpointed, and how."""
    asked = sections.activation_checkpointing
    return ActivationConfig(
        asked.policy,
        asked.number_checkpoints,
        asked.cpu_checkpointing,
        asked.synchronize_checkpoint_boundary,
        asked.profile,
    )


def pipeline(sections: ObeyedSections) -> PipelineConfig:
    """What is asked of a PipelineModule."""
    asked = sections.pipeline
    return PipelineConfig(
        asked.schedule,
        None if asked.stages == "auto" else asked.stages,
        None if asked.partition.lower() == "best" else asked.partition,
        asked.seed_layers,
        asked.activation_checkpoint_interval,
        bool(asked.use_reentrant),
    )


def loss_scale(sections: ObeyedSections) -> LossScaleConfig | None:
    """How the loss is scaled; None where nothing computes in float16."""
    fp16 = sections.fp16
    autocast = sections.torch_autocast
    if not fp16.enabled and not (autocast.enabled and autocast.dtype == "fp16"):
        return None
    dynamic = fp16.loss_scale == 0
    return LossScaleConfig(
        dynamic=dynamic,
        initial=float(2**fp16.initial_scale_power) if dynamic else fp16.loss_scale,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )


def observing(sections: ObeyedSections) -> ObserveConfig:
    """What is to be seen of the run."""
    return ObserveConfig(
        every=sections.steps_per_print,
        breakdown=sections.wall_clock_breakdown,
        throughput=sections.timers.throughput.enabled,
        memory=sections.memory_breakdown,
        comms=_comms(sections.comms_logger),
        flops=_flops(sections.flops_profiler),
        metrics=_metrics(sections.metrics),
        run_log=_run_log(sections.run_log),
        traces=_traces(sections.opentelemetry),
        tensorboard=_files(sections.tensorboard),
        csv=_files(sections.csv_monitor),
        wandb=_wandb(sections.wandb),
        comet=_comet(sections.comet),
    )


def _files(asked: TensorboardSection | CsvMonitorSection) -> FilesConfig | None:
    return FilesConfig(asked.output_path, asked.job_name) if asked.enabled else None


def _comms(asked: CommsLoggerSection) -> CommsConfig | None:
    return CommsConfig(None if asked.prof_all else asked.prof_ops, asked.verbose) if asked.enabled else None


def _flops(asked: FlopsProfilerSection) -> FlopsConfig | None:
    if not asked.enabled:
        return None
    shown = asked.module_depth, asked.top_modules, asked.detailed
    return FlopsConfig(asked.profile_step, *shown, asked.output_file)


def _metrics(asked: MetricsSection) -> MetricsConfig | None:
    return MetricsConfig(asked.port, asked.address, asked.directory, asked.run) if asked.enabled else None


def _run_log(asked: RunLogSection) -> RunLogConfig | None:
    return None if asked.path is None else RunLogConfig(asked.path, asked.ranks)


def _traces(asked: OpenTelemetrySection) -> TracesConfig | None:
    return TracesConfig(asked.endpoint) if asked.enabled else None


def _wandb(asked: WandbSection) -> WandbConfig | None:
    return WandbConfig(asked.project, asked.group, asked.team) if asked.enabled else None


def _comet(asked: CometSection) -> CometConfig | None:
    if not asked.enabled:
        return None
    return CometConfig(
        asked.samples_log_interval,
        asked.project,
        asked.workspace,
        asked.api_key,
        asked.experiment_name,
        asked.experiment_key,
        asked.online,
        asked.mode,
    )
