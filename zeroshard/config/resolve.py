"""From a source to a resolved config: read, flatten, check what may be asked for, validate, derive, freeze.

Every step adds to one list of problems and the list is raised at the end of the step that can't go on without it, so a
user sees all mistakes of a kind at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from zeroshard.config import batch
from zeroshard.config.components import (
    OPTIMIZERS,
    SCHEDULERS,
    UNBUILT_OPTIMIZERS,
    param_advice,
    resolve_type,
)
from zeroshard.config.document import Document, Source, read_document
from zeroshard.config.elastic_config import elastic_triple
from zeroshard.config.entries import Entries, gather_entries
from zeroshard.config.keys import Status, key_table
from zeroshard.config.models import Fp8Section, ObeyedSections, Section
from zeroshard.config.optimizers import ONE_BIT
from zeroshard.config.problems import Problems, dotted
from zeroshard.config.resolved import (
    ActivationConfig,
    BatchConfig,
    CheckpointConfig,
    Config,
    Dtype,
    FrozenMap,
    LeafModules,
    OptimizerConfig,
    PrecisionConfig,
    ReductionConfig,
    SchedulerConfig,
    ZeroConfig,
)
from zeroshard.config.sections import activations, loss_scale, observing, pipeline
from zeroshard.config.statuses import auto_rules, check_statuses, resolve_autos
from zeroshard.config.zero import ZeroRules
from zeroshard.errors import PlanError, UsageError, ZeroShardWarning
from zeroshard.fp8.recipe import Fp8, scaling_of

DEFAULT = "default"
Model = TypeVar("Model", bound=Section)


@dataclass(frozen=True)
class Setting:
    """One line of the resolved table: a key, its value, where that comes from and what is done with it."""

    path: str
    value: Any
    origin: str
    status: Status
    note: str


@dataclass(frozen=True)
class Resolution:
    """A config with its table and the warnings met on the way."""

    config: Config
    settings: tuple[Setting, ...]
    warnings: tuple[str, ...]


def load_config(
    source: Source,
    *,
    world_size: int,
    client_optimizer: bool = False,
    client_scheduler: bool = False,
    overrides: Mapping[str, Any] | None = None,
    same_batch: int = 1,
) -> Config:
    """Resolve a DeepSpeed config.

    `source` is a dict, the path of a JSON file, or JSON text. `world_size` is the number of data-parallel ranks.
    `client_optimizer` and `client_scheduler` say that the script gives its own, which then replaces the config's.
    `overrides` (nested, or keyed by JSON path) are the script's arguments: they fill keys that are absent or `"auto"`;
    a different value written in the config is a contradiction.
    `same_batch` ranks read the same data; `train_batch_size` may count all of them, beside both other sizes.

    Raises `ConfigError` with every problem found, `UsageError` for a world size below 1.
    """
    resolution = resolve(
        source,
        world_size=world_size,
        client_optimizer=client_optimizer,
        client_scheduler=client_scheduler,
        overrides=overrides,
        same_batch=same_batch,
    )
    for message in resolution.warnings:
        warnings.warn(message, ZeroShardWarning, stacklevel=2)
    return resolution.config


def resolve(
    source: Source,
    *,
    world_size: int,
    client_optimizer: bool = False,
    client_scheduler: bool = False,
    overrides: Mapping[str, Any] | None = None,
    same_batch: int = 1,
) -> Resolution:
    """As `load_config`, but with the table of settings, and the warnings as text."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise UsageError(f"world_size is {world_size!r}; it must be a whole number of at least 1")
    problems = Problems()
    document = read_document(source, problems)
    entries = gather_entries(document, overrides, key_table(), problems)
    if client_optimizer:
        entries = _replaced_by_client(entries, "optimizer", problems)
    if client_scheduler:
        entries = _replaced_by_client(entries, "scheduler", problems)
    for section, replaced in (("optimizer", client_optimizer), ("scheduler", client_scheduler)):
        if not replaced:
            _require_type(section, document, entries, problems)
    check_statuses(entries, world_size, problems)
    trains = client_optimizer or "optimizer.type" in entries
    resolver = _Resolver(resolve_autos(entries, problems), auto_rules(entries), world_size, problems, trains=trains)
    resolver.same_batch = same_batch
    config = resolver.config()
    problems.raise_if_any()
    return Resolution(config, resolver.settings(config, entries), tuple(problems.warnings))


def _replaced_by_client(entries: Entries, section: str, problems: Problems) -> Entries:
    """Without a section that the script's own object replaces; said aloud, since two answers were given."""
    kept = {path: entry for path, entry in entries.items() if not path.startswith(f"{section}.")}
    if f"{section}.type" in entries:
        origin = entries[f"{section}.type"].origin
        problems.warn(f"{section} ({origin}) has no effect: the script gives its own {section}; remove one of the two")
    return kept


def _require_type(section: str, document: Document, entries: Entries, problems: Problems) -> None:
    """A section with empty parameters leaves no entries behind, but somebody wanted something of it."""
    written = document.root.get(section)
    if not isinstance(written, dict) or "params" not in written:
        return
    if not any(path.startswith((f"{section}.type", f"{section}.params")) for path in entries):
        what = "is missing, but params is there; name the type, or remove the section"
        problems.add(f"{section}.type", document.origin((section, "params")), what)


class _Resolver:
    """Turns entries into the resolved config, keeping the origin of each value."""

    same_batch = 1

    def __init__(
        self, entries: Entries, autos: Mapping[str, str], world_size: int, problems: Problems, *, trains: bool
    ) -> None:
        self._trains = trains
        self._entries = entries
        self._autos = autos
        self._world_size = world_size
        self._problems = problems
        self._origins: dict[str, str] = {}
        self._values: dict[str, Any] = {}

    def config(self) -> Config:
        sections = self._sections()
        batch_config = self._batch(sections)
        saving = sections.checkpoint
        precision = self._precision(sections)
        optimizer = self._component("optimizer", OPTIMIZERS, UNBUILT_OPTIMIZERS)
        scheduler = self._component("scheduler", SCHEDULERS, ())
        self._check_momentum(optimizer)
        clipping = self._clipping(sections, optimizer)
        return Config(
            world_size=self._world_size,
            zero=self._zero(sections),
            precision=precision,
            loss_scale=loss_scale(sections),
            batch=batch_config,
            gradient_clip_value=sections.gradient_clip_value,
            gradient_clipping=clipping,
            reduction=ReductionConfig(
                sections.prescale_gradients, sections.gradient_predivide_factor, sections.gradient_allreduce_op
            ),
            optimizer=None if optimizer is None else OptimizerConfig(*optimizer),
            scheduler=None if scheduler is None else SchedulerConfig(*scheduler),
            checkpoint=CheckpointConfig(
                saving.in_background,
                saving.keep,
                saving.directory,
                saving.tag_validation,
                saving.encryption_key,
                saving.audit,
                saving.memory_steps,
                saving.on_failure,
                saving.remote,
                saving.signing_key,
                saving.signed_by,
            ),
            activations=activations(sections),
            pipeline=pipeline(sections),
            drop_last=sections.dataloader_drop_last,
            steps_per_print=sections.steps_per_print,
            observe=observing(sections),
            allow_untested_optimizer=sections.zero_allow_untested_optimizer,
            log_level=sections.log_level,
            origins=FrozenMap(self._all_origins()),
        )

    def _all_origins(self) -> dict[str, str]:
        given = {path: entry.origin for path, entry in self._entries.items()}
        return {**self._autos, **given, **self._origins}

    def _origin(self, path: str) -> str:
        entry = self._entries.get(path)
        return entry.origin if entry is not None else self._autos.get(path, DEFAULT)

    def _record(self, path: str, value: Any, origin: str | None = None) -> None:
        self._values[path] = value
        self._origins[path] = self._origin(path) if origin is None else origin

    def _sections(self) -> ObeyedSections:
        """The validated sections; where a value is wrong the problem is recorded and its default stands in."""
        nested: dict[str, Any] = {}
        for path, entry in self._entries.items():
            if entry.key.status is Status.OBEYED and not path.startswith(("optimizer.", "scheduler.")):
                *outer, name = path.split(".")
                place = nested
                for part in outer:
                    place = place.setdefault(part, {})
                place[name] = entry.value
        sections = self._validated(ObeyedSections, nested, "")
        self._record_all(sections, "")
        return sections

    def _record_all(self, section: Section, prefix: str) -> None:
        for name, value in section:
            key = type(section).model_fields[name].alias or name  # "async" is a word of Python's
            if isinstance(value, Section):
                self._record_all(value, f"{prefix}{key}.")
            else:
                self._record(prefix + key, value)

    def _validated(self, model: type[Model], values: dict[str, Any], prefix: str) -> Model:
        """A model of the values; wrong ones become problems and are left out, so that the rest is checked too."""
        try:
            return model.model_validate(values)
        except ValidationError as error:
            for detail in error.errors(include_url=False, include_context=False):
                self._report(detail["type"], detail["msg"], detail["loc"], prefix, model)
                _discard(values, detail["loc"])
            missing = [n for n, field in model.model_fields.items() if field.is_required() and n not in values]
            return model.model_validate({**values, **{name: model.placeholder() for name in missing}})

    def _report(
        self, kind: str, message: str, location: tuple[str | int, ...], prefix: str, model: type[BaseModel]
    ) -> None:
        path = dotted((*prefix.split("."), *location) if prefix else location)
        owner = dotted((*prefix.split("."), location[0])) if prefix else dotted(location[:2])
        entry = self._entries.get(path) or self._entries.get(owner) or self._entries.get(dotted(location[:1]))
        origin = entry.origin if entry is not None else ""
        if kind == "extra_forbidden" and issubclass(model, Section):
            message = f"unknown parameter; {param_advice(str(location[-1]), model)}"
        elif kind == "missing":
            section = prefix.partition(".")[0]
            message = f"is missing; {self._values.get(f'{section}.type', section)} needs it"
        self._problems.add(path, origin, message)

    def _zero(self, sections: ObeyedSections) -> ZeroConfig:
        zero = sections.zero_optimization
        rules = ZeroRules(zero, self._problems, self._origin, self._world_size, trains=self._trains)
        subgroup, second_copies = rules.subgroup()
        return ZeroConfig(
            stage=zero.stage,
            subgroup=subgroup,
            second_copies=second_copies,
            codes=rules.codes(),
            code_bits=zero.zero_quantized_weights_bits,
            differences=rules.differences(),
            quantized_gradients=rules.quantized_gradients(),
            error_beta=zero.zeropp_loco_param.err_beta,
            error_reset=zero.zeropp_loco_param.reset_T,
            overlap_step=zero.overlap_step,
            param_persistence_threshold=zero.param_persistence_threshold,
            model_persistence_threshold=zero.model_persistence_threshold,
            prefetch_bucket_size=zero.prefetch_bucket_size,
            max_live_parameters=zero.max_live_parameters,
            max_reuse_distance=zero.max_reuse_distance,
            leaf_modules=LeafModules(**dict(zero.leaf_module)),
            offload=rules.offload(),
            ignore_unused=zero.ignore_unused_parameters,
            check_every_pass=zero.enable_sanity_checks,
            automatic_memory=zero.automatic.device_memory,
            automatic_length=zero.automatic.sequence_length,
        )

    def _refuse(self, path: str, what: str) -> None:
        self._problems.add(path, self._origin(path), what)

    def _batch(self, sections: ObeyedSections) -> BatchConfig:
        numbers = {name: getattr(sections, name) for name in batch.NAMES}
        given = {n: batch.Given(v, self._origin(n)) for n, v in numbers.items() if v is not None}
        if any(name in self._entries and name not in given for name in batch.NAMES):
            return BatchConfig(1, 1, 1)
        if sections.elasticity.enabled:
            result, origins = elastic_triple(sections.elasticity, given, self._world_size, self._problems)
        else:
            result, origins = batch.resolve_batch(given, self._world_size, self._problems, self.same_batch)
        for name, value in zip(batch.NAMES, (result.train, result.micro, result.accumulation), strict=True):
            rule = "auto: " if name in self._autos else ""
            self._record(name, value, f"{rule}{origins[name]}" if name in origins else None)
        return replace(result, managed=sections.managed_gradient_accumulation)

    def _precision(self, sections: ObeyedSections) -> PrecisionConfig:
        bf16, fp16 = sections.bf16.enabled, sections.fp16.enabled
        if bf16 and fp16:
            what = f"is true, and so is fp16.enabled ({self._origin('fp16.enabled')}); switch one of them off"
            self._problems.add("bf16.enabled", self._origin("bf16.enabled"), what)
        compute = "bf16" if bf16 else "fp16" if fp16 else "fp32"
        types = sections.data_types
        if types.param_dtype is not None and types.param_dtype != compute:
            switch = {"bf16": "set bf16.enabled", "fp16": "set fp16.enabled"}.get(
                types.param_dtype, "switch bf16 and fp16 off"
            )
            what = f"is {types.param_dtype}, but the model computes in {compute}; {switch}, or remove the key"
            self._problems.add("data_types.param_dtype", self._origin("data_types.param_dtype"), what)
        low = self._low_master(sections, compute)
        return PrecisionConfig(
            compute=compute,
            communication=sections.communication_data_type,
            grad_accum=types.grad_accum_dtype,
            buffer=types.buffer_dtype,
            keep_in_fp32_modules=types.keep_in_fp32_modules,
            autocast=self._autocast(sections, compute),
            check_overflow=not bf16 or sections.bf16.check_grad_overflow,
            master=not low,
            low_moments=low and sections.bf16.bf16_optimizer_states,
            fp8=self._fp8(sections.fp8, compute),
        )

    def _fp8(self, section: Fp8Section, compute: str) -> Fp8 | None:
        """How linear layers multiply in fp8; reports where they can't."""
        if not section.enabled:
            return None
        if compute == "fp32":
            self._refuse("fp8.enabled", "is true, but the model computes in fp32; set bf16.enabled, or remove the key")
        try:
            scaling = scaling_of(section.recipe)
        except PlanError as error:
            self._refuse("fp8.recipe", str(error))
            return None
        names = None if section.filter == "auto" else section.filter
        return Fp8(scaling, names, section.tokens, section.shards)

    def _low_master(self, sections: ObeyedSections, compute: str) -> bool:
        """Whether 16-bit parameters are updated without master weights; reports where that can't be."""
        bf16, fp16 = sections.bf16, sections.fp16
        asked = {
            "bf16.bf16_master_weights_and_grads": ("bf16", bf16.bf16_master_weights_and_grads),
            "bf16.bf16_optimizer_states": ("bf16", bf16.bf16_optimizer_states),
            "fp16.fp16_master_weights_and_grads": ("fp16", fp16.fp16_master_weights_and_grads),
        }
        for path, (dtype, wanted) in asked.items():
            if wanted and dtype != compute:
                self._refuse(path, f"is true, but {dtype}.enabled is not; switch that on, or remove the key")
        if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
            self._refuse("bf16.bf16_optimizer_states", "is true, which needs bf16_master_weights_and_grads too")
        low = bf16.bf16_master_weights_and_grads if compute == "bf16" else fp16.fp16_master_weights_and_grads
        offload = sections.zero_optimization.offload_optimizer.device
        if low and compute != "fp32" and offload != "none":
            path = f"{compute}.{compute}_master_weights_and_grads"
            self._refuse(path, "is true, which is not built yet with offload_optimizer; leave one of the two out")
        return low and compute != "fp32"

    def _autocast(self, sections: ObeyedSections, compute: str) -> Dtype | None:
        """The dtype of torch.autocast, which replaces the other two ways to compute in 16 bits."""
        autocast, path = sections.torch_autocast, "torch_autocast.enabled"
        if not autocast.enabled:
            return None
        if compute != "fp32":
            what = (
                f"is true, and so is {compute}.enabled ({self._origin(f'{compute}.enabled')}); autocast keeps the "
                "parameters in fp32 and casts per operation: switch one of them off"
            )
            self._problems.add(path, self._origin(path), what)
        if autocast.dtype is None:
            self._record("torch_autocast.dtype", "bf16", f"{self._origin('torch_autocast.dtype')}: bf16")
        return autocast.dtype or "bf16"

    def _component(
        self, section: str, built: Mapping[str, type[Section]], unbuilt: tuple[str, ...]
    ) -> tuple[str, Mapping[str, Any]] | None:
        """Type and parameters of the optimizer or the scheduler; None if there is none or it is refused."""
        prefix = f"{section}.params."
        given = {e.name: e for path, e in self._entries.items() if path.startswith((prefix, f"{section}.params["))}
        chosen = self._entries.get(f"{section}.type")
        if chosen is None:
            if given:
                first = next(iter(given.values()))
                self._problems.add(
                    f"{section}.type", "", f"is missing, but {first.path} ({first.origin}) is given; name the type"
                )
            return None
        name, trouble = resolve_type(chosen.value, built, unbuilt)
        if name is None:
            self._problems.add(chosen.path, chosen.origin, trouble)
            return None
        alias = "" if str(chosen.value).lower() == name.lower() else f", alias {chosen.value}"
        self._record(chosen.path, name, chosen.origin + alias)
        values = {entry.path.removeprefix(prefix): entry.value for entry in given.values()}
        params = self._validated(built[name], values, f"{section}.params")
        for parameter, value in params:
            self._record(prefix + parameter, value)
        return name, FrozenMap(dict(params))

    def _check_momentum(self, optimizer: tuple[str, Mapping[str, Any]] | None) -> None:
        if optimizer is None or not optimizer[1].get("nesterov"):
            return
        if optimizer[1]["momentum"] == 0 or optimizer[1]["dampening"] != 0:
            path = "optimizer.params.nesterov"
            self._problems.add(path, self._origin(path), "needs a momentum above 0 and a dampening of 0")

    def _clipping(self, sections: ObeyedSections, optimizer: tuple[str, Mapping[str, Any]] | None) -> float:
        """The norm to clip to; a 1-bit optimizer can't clip, and needs whole gradients."""
        if optimizer is None or optimizer[0] not in ONE_BIT:
            return sections.gradient_clipping
        name, path, stage = optimizer[0], "gradient_clipping", "zero_optimization.stage"
        if sections.zero_optimization.stage not in (0, 1, "auto"):
            what = (
                f"is {sections.zero_optimization.stage}, but {name} needs the whole gradients on each rank; use 0 or 1"
            )
            self._problems.add(stage, self._origin(stage), what)
        if path not in self._entries:
            self._record(path, 0.0, f"{self._origin(path)}: 0 with {name}, which can't clip")
        elif sections.gradient_clipping:
            what = f"must be 0 with {name}: after its warm-up gradients are never averaged, so their norm is not known"
            self._problems.add(path, self._origin(path), what)
        return 0.0

    def settings(self, config: Config, entries: Entries) -> tuple[Setting, ...]:
        """The table: every obeyed key, and every other key that was given."""
        table = key_table()
        result: list[Setting] = []
        for path, value in self._values.items():
            key = table.keys.get(path) or table.keys[f"{path.rpartition('.')[0]}.*"]
            result.append(Setting(path, value, config.origins[path], key.status, key.note))
        for path, entry in entries.items():
            if path not in self._values:
                origin = self._autos.get(path, entry.origin)
                value = _as_kind(entry.key.kind, entry.key.default if entry.is_auto else entry.value)
                result.append(Setting(path, value, origin, entry.key.status, entry.key.note))
        return tuple(sorted(result, key=lambda setting: setting.path))


def _as_kind(kind: str, value: Any) -> Any:
    return int(value) if kind == "int" and isinstance(value, float) else value


def _discard(values: dict[str, Any], location: tuple[str | int, ...]) -> None:
    """Drop the value that an error is about: a key of a section, or a parameter whole."""
    first, *rest = (str(part) for part in location)
    inner = values.get(first)
    if rest and isinstance(inner, dict):
        inner.pop(rest[0], None)
    else:
        values.pop(first, None)


def activation_section(source: Source) -> ActivationConfig:
    """The section `activation_checkpointing` of a config alone, whatever else it holds.

    Raises:
        ConfigError: a wrong value in it.
    """
    document = read_document(source, Problems()).root
    name = "activation_checkpointing"
    alone = {name: document[name]} if document.get(name) is not None else {}
    batch_key = {"train_micro_batch_size_per_gpu": 1}
    return resolve({**batch_key, **alone}, world_size=1, client_optimizer=True).config.activations
