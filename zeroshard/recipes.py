"""A config as a recipe for a plan. `initialize` and the planner's command line read it here, so both mean the same."""

from __future__ import annotations

from zeroshard.config import Config
from zeroshard.config.resolved import VERTICAL, OffloadConfig, PrecisionConfig
from zeroshard.errors import PlanError
from zeroshard.mesh import Mesh
from zeroshard.nvme.places import Spill
from zeroshard.plan.builder import MAX_PREFETCH, NO_MASTER, Precision, Recipe
from zeroshard.plan.hops import Feedback, GradientCodes
from zeroshard.plan.offload import Offload
from zeroshard.plan.placement import DIFFERENCE_CODES, GATHER_CODES, LOW_GATHER_CODES, STAGES, Sharding, Tier
from zeroshard.plan.policy import ExecutionPolicy, OnNonFinite


def recipe_of(config: Config, keep_fp32: tuple[str, ...]) -> Recipe:
    """The recipe that a config describes.

    Args:
        keep_fp32: what the model itself says about modules that stay in float32, for a config that leaves it open.

    Raises:
        PlanError: the stage has not been chosen yet.
    """
    precision, zero = config.precision, config.zero
    if zero.stage == "auto":
        raise PlanError('zero_optimization.stage is "auto": initialize chooses on the ranks that run; write a number')
    low = precision.compute != "fp32"
    reduction = config.reduction
    together = config.pipeline.schedule == VERTICAL
    policy = ExecutionPolicy(
        prefetch=MAX_PREFETCH,
        reuse=zero.max_reuse_distance > 0,
        accumulate=not together and (config.batch.accumulation > 1 or not config.batch.managed),
        micro_batches=config.batch.accumulation if together else 1,
        overlap_step=zero.overlap_step,
        predivide=float(config.world_size) if reduction.prescale else reduction.predivide_factor,
        mean=reduction.op == "mean",
        clip_norm=config.gradient_clipping,
        on_nonfinite=_on_nonfinite(precision),
        cast_inputs=precision.compute if low else None,
    )
    codes = GATHER_CODES if zero.code_bits == 8 else LOW_GATHER_CODES
    kept = precision.keep_in_fp32_modules
    if kept == "auto":
        kept = keep_fp32
    return Recipe(
        sharding=_sharding(STAGES[zero.stage], config),
        precision=Precision(
            param=precision.compute if low else None,
            wire=precision.communication,
            accumulate=precision.grad_accum if precision.master else precision.grad_accum or precision.compute,
            master=None if precision.master else NO_MASTER,
            moments=precision.compute if precision.low_moments else None,
            keep_fp32=kept,
            matmul=precision.fp8,
        ),
        policy=policy,
        persistence_threshold=zero.param_persistence_threshold,
        persistence_budget=zero.model_persistence_threshold,
        prefetch_numel=zero.prefetch_bucket_size,
        offload=None if zero.offload is None else _offload(zero.offload),
        live_numel=zero.max_live_parameters,
        codes=codes if zero.codes == "all" and not zero.differences else None,
        frozen_codes=None if zero.codes == "none" else codes,
        differences=DIFFERENCE_CODES if zero.differences else None,
        gradient_codes=_gradient_codes(config),
    )


def mesh_of(config: Config) -> Mesh:
    """The ranks as the config divides them: in subgroups where it names their size."""
    return Mesh.data_parallel(config.world_size, config.zero.subgroup)


def _sharding(row: Sharding, config: Config) -> Sharding:
    mesh = mesh_of(config)
    return row.nested(mesh) if config.zero.second_copies else row.on(mesh)


def _gradient_codes(config: Config) -> GradientCodes | None:
    """What codes leave out comes back: of 4 bits always, of the only hop, in 8 bits, where the config says how."""
    zero = config.zero
    if not zero.quantized_gradients:
        return None
    asked = zero.error_beta is not None or zero.error_reset is not None
    twice = zero.subgroup not in (None, config.world_size)
    feedback = Feedback(zero.error_beta or 0.0, zero.error_reset or 0) if asked or twice else None
    return GradientCodes(feedback=feedback)


def _on_nonfinite(precision: PrecisionConfig) -> OnNonFinite:
    if not precision.check_overflow:
        return OnNonFinite.APPLY
    low = precision.compute != "fp32" or precision.autocast is not None
    return OnNonFinite.SKIP if low else OnNonFinite.RAISE


def _offload(offload: OffloadConfig) -> Offload:
    spill = Spill(offload.paths, offload.encrypt, offload.allow_visible) if offload.paths else None
    return Offload(
        offload.ratio,
        offload.param,
        pin_memory=offload.pin_memory,
        tier=Tier.NVME if offload.state_on_disk else Tier.HOST,
        spill=spill,
        param_tier=Tier.NVME if offload.param_on_disk else Tier.HOST,
        host_ratio=offload.host_ratio,
    )
