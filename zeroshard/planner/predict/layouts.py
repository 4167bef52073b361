"""Finds all layouts of a cluster: meshes with axes dp_replicate, dp_shard, tp, sp, ep and pp, each with ZeRO's stages.

Every layout trains equally many sequences in a step, so that the times of steps can be compared. Layouts that the
engine would refuse are left out, with the reason. Each of the others has a plan, a trace of one rank's part of the
model, its memory and, if that fits, its time. Axes are ordered as the engine needs them: `tp` innermost, where links
are fastest, `pp` outermost, since it sends least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from zeroshard.errors import PlanError, UsageError
from zeroshard.mesh import EXPERT, REPLICATE, SHARD, STAGES, TENSOR, Mesh, MeshAxis
from zeroshard.pipeline.schedules import Shape, chosen, kind_of
from zeroshard.plan.builder import Recipe, with_peer_copies
from zeroshard.plan.check import peer_problem
from zeroshard.plan.placement import STAGES as STAGES_OF_ZERO
from zeroshard.plan.plan import Plan
from zeroshard.planner.machine.hardware import Cluster
from zeroshard.planner.predict.memory import StepMemory, step_memory
from zeroshard.planner.predict.rows import (
    BILLION,
    SAFE_SHARE,
    Row,
    Setting,
    device_nbytes,
    hours,
    reaches_peers,
    recipe_at,
)
from zeroshard.planner.predict.stages import Pipeline, partition_units, split
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.predict.timeline import steady_time
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.divided import WHOLE, Parts
from zeroshard.planner.trace.workload import Workload

SEQUENCES = "sp"
SCHEDULES: tuple[tuple[str, int, str], ...] = (
    ("1f1b", 1, "loop"),
    ("interleaved_1f1b", 2, "loop"),
    ("interleaved_zero_bubble", 1, "loop"),
    ("interleaved_zero_bubble", 3, "loop"),
    ("zbv_zero_bubble", 2, "v"),
)
"""Schedules that are tried, with the number of model parts (chunks) on each stage and how these are placed."""

NOTES = (
    "Times of divided models are predicted from one rank's kernels and its collectives; none was measured.",
    "Experts are assumed to get equally many tokens; pipeline stages get equally many parameters.",
)


@dataclass(frozen=True)
class Layout:
    """One mesh with one setting.

    Attributes:
        row: the row of one rank; in a pipeline, of a rank of the stage that takes the most memory.
        pipeline: the stages and their times; None without an axis `pp`.
        schedule: name of the pipeline's schedule, with its chunks per stage.
    """

    mesh: Mesh
    row: Row
    pipeline: Pipeline | None = None
    schedule: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.row.time.seconds if self.pipeline is None else self.pipeline.seconds

    @property
    def bubble(self) -> float:
        """The share of the step in which stages wait for each other."""
        if self.pipeline is None:
            return 0.0
        return self.pipeline.time.bubble * self.pipeline.time.seconds / self.pipeline.seconds

    @cached_property
    def sent_seconds(self) -> dict[str, float]:
        """Seconds of a step in which compute waits for the model's own collectives, by axis."""
        own = [self.row.time] if self.pipeline is None else self.pipeline.alone
        times = 1 if self.pipeline is None else self.row.micro_batches
        found: dict[str, float] = {}
        for axis in (TENSOR, SEQUENCES, EXPERT):
            most = max(time.compute.get(f"over {axis}", 0.0) for time in own) * times
            if most:
                found[axis] = most
        return found

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and GPU."""
        readers = self.mesh.data_parallel_size / self.mesh.world_size
        return self.row.tokens * self.row.micro_batches * readers / self.seconds

    @property
    def cost_per_billion(self) -> float | None:
        cluster = self.row.cluster
        if cluster.price is None:
            return None
        return hours(BILLION, cluster.count, self.tokens_per_second) * cluster.count * cluster.price

    @property
    def label(self) -> str:
        return f"{short(self.mesh)}, {self.row.setting.label}"


@dataclass(frozen=True)
class TooLarge:
    """A mesh on which no setting fits, with the setting that takes the least memory."""

    mesh: Mesh
    setting: Setting
    memory: StepMemory

    @property
    def total(self) -> int:
        return device_nbytes(self.memory)


@dataclass(frozen=True)
class Layouts:
    """Layouts that fit, meshes on which no setting fits, and meshes that the engine refuses, by its reason."""

    found: tuple[Layout, ...]
    too_large: tuple[TooLarge, ...]
    refused: dict[str, list[Mesh]]


@dataclass
class Search:
    """Finds the layouts of a workload on a cluster.

    Args:
        whole: the undivided model, with the micro-batch of one data-parallel rank.
        sequences: sequences of one step, over all ranks.
        recipe_of: the recipe of a setting.
        checkpointing: kinds of activation checkpointing, the cheapest first; a later one is tried if an earlier one
            does not fit.
        stages: the ZeRO stages that are tried.
    """

    whole: Workload
    cluster: Cluster
    sequences: int
    recipe_of: Callable[[Setting], Recipe]
    checkpointing: tuple[Checkpointing, ...]
    stages: tuple[int, ...] = tuple(STAGES_OF_ZERO)
    _divided: dict[Parts, Workload | PlanError] = field(default_factory=dict)

    def run(self) -> Layouts:
        """Try every mesh of the cluster."""
        found: list[Layout] = []
        large: list[TooLarge] = []
        refused: dict[str, list[Mesh]] = {}
        for mesh in meshes(self.cluster):
            try:
                made = list(self._of_mesh(mesh))
            except PlanError as error:
                refused.setdefault(str(error), []).append(mesh)
                continue
            fit = [one for one in made if isinstance(one, Layout)]
            found += fit
            if not fit:
                large.append(min((one for one in made if isinstance(one, TooLarge)), key=lambda one: one.total))
        return Layouts(tuple(found), tuple(large), refused)

    def _of_mesh(self, mesh: Mesh) -> Iterator[Layout | TooLarge]:
        work, count = self._workload(mesh), self._micro_batches(mesh)
        make = self._with_pipeline if mesh.size((STAGES,)) > 1 else self._without_pipeline
        copies = mesh.size((REPLICATE,)) > 1
        for stage in self.stages[1:] if copies else self.stages:
            for how in self.checkpointing:
                setting = Setting(stage, Offload.NONE, how)
                recipe = self.recipe_of(setting)
                if copies:
                    recipe = replace(recipe, sharding=replace(recipe.sharding, axes=(SHARD,)))
                made = make(work, mesh, setting, recipe_at(recipe, setting, count), count)
                yield made
                if isinstance(made, Layout) and made.row.total <= SAFE_SHARE * self.cluster.gpu.memory:
                    break

    def _without_pipeline(
        self, work: Workload, mesh: Mesh, setting: Setting, recipe: Recipe, count: int
    ) -> Layout | TooLarge:
        plan, traced = work.plan(recipe, mesh.of_stage(), how=setting.checkpointing)
        if reaches_peers(self.cluster) and recipe.peer_copies is not False and peer_problem(plan) is None:
            plan = with_peer_copies(plan)
        memory = step_memory(plan, traced)
        if device_nbytes(memory) > self.cluster.gpu.memory:
            return TooLarge(mesh, setting, memory)
        time = steady_time(plan, traced, self.cluster, count)
        flops = self._flops(plan, mesh)
        return Layout(mesh, Row(setting, plan, traced, memory, time, self.cluster, count, work.tokens, flops))

    def _workload(self, mesh: Mesh) -> Workload:
        """One rank's part of the model. Raises PlanError if it can't be divided so."""
        parts = Parts(mesh.size((TENSOR,)), mesh.size((SEQUENCES,)), mesh.size((EXPERT,)))
        if parts not in self._divided:
            if parts.sequence > self.whole.length:
                raise PlanError(f"sequences of {self.whole.length} tokens over {parts.sequence} ranks")
            try:
                self._divided[parts] = replace(self.whole, parts=parts) if parts != WHOLE else self.whole
            except PlanError as error:
                self._divided[parts] = error
        made = self._divided[parts]
        if isinstance(made, PlanError):
            raise made
        return made

    def _micro_batches(self, mesh: Mesh) -> int:
        readers, micro = mesh.data_parallel_size, self.whole.samples
        count, rest = divmod(self.sequences, readers * micro)
        if rest:
            raise PlanError(
                f"{self.sequences} sequences a step do not go over {readers} data ranks in micro-batches of {micro}"
            )
        return count

    def _with_pipeline(
        self, work: Workload, mesh: Mesh, setting: Setting, recipe: Recipe, count: int
    ) -> Layout | TooLarge:
        """The layout with the fastest schedule that fits."""
        own, stages = mesh.of_stage(), mesh.size((STAGES,))
        plan, traced = work.plan(recipe, own, how=setting.checkpointing)
        partition_units(work.units, traced, stages)
        flops = self._flops(plan, mesh)
        layouts: list[Layout] = []
        large: list[TooLarge] = []
        for name, chunks, placement in SCHEDULES:
            shape = Shape(stages, chunks, placement, count)
            if not _runs(name, shape, setting, len(work.units) - 1):
                continue
            name = chosen(name, shape)
            made = split(work.units, traced, recipe, own, shape, name)
            worst = max(made.stages, key=lambda stage: stage.memory.peak.total)
            if device_nbytes(worst.memory) > self.cluster.gpu.memory:
                large.append(TooLarge(mesh, setting, worst.memory))
                continue
            pipeline = made.timed(self.cluster, self._send_seconds)
            time = pipeline.alone[made.stages.index(worst)]
            row = Row(setting, worst.plan, worst.traced, worst.memory, time, self.cluster, count, work.tokens, flops)
            layouts.append(Layout(mesh, row, pipeline, name if chunks == 1 else f"{name} x {chunks}"))
        if not layouts:
            return min(large, key=lambda one: one.total)
        return min(layouts, key=lambda layout: layout.seconds)

    def _flops(self, plan: Plan, mesh: Mesh) -> int:
        """Flops of one GPU's share of a micro-batch, without recomputation."""
        return self.whole.trace(plan, Checkpointing.OFF).flops // mesh.size((STAGES, SEQUENCES, TENSOR))

    def _send_seconds(self, nbytes: int) -> float:
        """Seconds to send activations to the next stage, which is on another node if there are several."""
        share, cluster = self.cluster.efficiency, self.cluster
        if cluster.nodes > 1:
            return share.collective_latency + share.network_hop_latency + nbytes / (cluster.nic * share.nic)
        return share.collective_latency + nbytes / (cluster.gpu.link_rate * share.link)


def _runs(name: str, shape: Shape, setting: Setting, layers: int) -> bool:
    """Whether a schedule is tried: the engine runs it, and the model has a layer for each chunk."""
    if kind_of(name).splits and (setting.stage == 3 or setting.checkpointing is not Checkpointing.OFF):
        return False
    if layers < shape.stages * shape.chunks:
        return False
    try:
        chosen(name, shape)
    except UsageError:
        return False
    return True


def short(mesh: Mesh) -> str:
    """The axes of a mesh that have several ranks, in words."""
    several = [f"{axis.name} {axis.size}" for axis in mesh.axes if axis.size > 1]
    return " x ".join(several) or "1 GPU"


def meshes(cluster: Cluster) -> Iterator[Mesh]:
    """Every mesh of the cluster's GPUs: sizes divide their number, and `tp` stays within a node.

    Data-parallel ranks shard over all of them or, on several nodes, within each node with replicas between (HSDP).
    """
    count = cluster.count
    for stages in _divisors(count):
        for tensor in _divisors(count // stages):
            if tensor > cluster.per_node or cluster.per_node % tensor:
                continue
            for sequence in _divisors(count // stages // tensor):
                for experts in _divisors(count // stages // tensor // sequence):
                    data = count // stages // tensor // sequence // experts
                    within = cluster.per_node // (tensor * sequence * experts)
                    shards = {data, within} if 1 < within < data and data % within == 0 else {data}
                    for shard in sorted(shards, reverse=True):
                        yield _mesh(stages, data // shard, shard, sequence, experts, tensor)


def _mesh(stages: int, replicate: int, shard: int, sequence: int, experts: int, tensor: int) -> Mesh:
    sizes = {
        STAGES: stages,
        REPLICATE: replicate,
        SHARD: shard,
        SEQUENCES: sequence,
        EXPERT: experts,
        TENSOR: tensor,
    }
    return Mesh(tuple(MeshAxis(name, size) for name, size in sizes.items()))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
