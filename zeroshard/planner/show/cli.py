"""`zeroshard plan`: predicts what a model takes on a cluster, and says which setting to choose and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from zeroshard.errors import PlanError
from zeroshard.plan.offload import ENOUGH_THREADS
from zeroshard.plan.offload import Offload as HostState
from zeroshard.plan.policy import HostUpdate
from zeroshard.planner.choose.advice import Situation, advice
from zeroshard.planner.choose.choice import Choice, choose
from zeroshard.planner.choose.configs import (
    Document,
    ReadConfig,
    default_document,
    offload_of,
    ratio_of,
    read_config,
    read_document,
    stage_is_auto,
    with_batch,
    with_setting,
)
from zeroshard.planner.choose.explain import RATIOS, explain, in_words
from zeroshard.planner.choose.layout_choice import choose_layout
from zeroshard.planner.files import writing
from zeroshard.planner.machine.calibration import calibrated, load_calibration
from zeroshard.planner.machine.hardware import Cluster, listed_price, parse_cluster
from zeroshard.planner.predict.layouts import NOTES as LAYOUT_NOTES
from zeroshard.planner.predict.layouts import Search
from zeroshard.planner.predict.rows import Row, Setting, make_row, settings
from zeroshard.planner.predict.scale import compare, parse_sizes
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.show.chrome import write_trace
from zeroshard.planner.show.html import report
from zeroshard.planner.show.layouts import layout_table, layouts_json
from zeroshard.planner.show.png import write_png
from zeroshard.planner.show.tables import as_json, plan_table, scale_table, traffic_text
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.compiled import NOTE as COMPILED_NOTE
from zeroshard.planner.trace.sources import ModelSource, find_source, with_adapter
from zeroshard.planner.trace.workload import Workload

DEFAULT_LENGTH = 4096
WIDE = 1000
Answer = str | list[RenderableType]

app = typer.Typer(help="What a model takes on a cluster.", add_completion=False, pretty_exceptions_enable=False)

Model = Annotated[str | None, typer.Argument(help="config.json, pkg.mod:factory or a cached id.", show_default=False)]


@dataclass
class Request:
    """The options of the command line, read and checked."""

    source: ModelSource
    cluster: Cluster
    document: Document
    work: Workload
    micro: int
    accumulation: int
    cores: int | None = None
    """Processor cores of a node; None if not given."""
    compiling: bool = False

    @property
    def update(self) -> HostUpdate | None:
        """How state in host memory is updated, by a rank's threads as in the engine; None for the GPU, if it can."""
        enough = self.cores is not None and self.cores // self.cluster.per_node >= ENOUGH_THREADS
        return HostUpdate.PROCESSOR if enough else None

    def read(self, setting: Setting) -> ReadConfig:
        """The config of a setting, as the planner reads it."""
        document = with_setting(self.document, setting)
        return read_config(document, self.cluster, keep_fp32=self.source.keep_fp32)

    @property
    def counted(self) -> str:
        return f"{self.source.name}: {self.work.numel:,} parameters"

    @property
    def title(self) -> str:
        work = self.work
        micro = f"{self.accumulation} x " if self.accumulation > 1 else ""
        batch = f"{micro}{work.samples}" + (f" x {work.length}" if self.source.tokens else "")
        return f"{self.counted} on {self.cluster.label}, micro-batch {batch}"

    def row(self, setting: Setting, samples: int | None = None) -> Row:
        """The row of a setting; with fewer samples per micro-batch there are more micro-batches per step."""
        read = self.read(setting)
        work = self.work if samples in (None, self.micro) else replace(self.work, samples=samples or 1)
        count = self.accumulation * self.micro // work.samples
        recipe = read.recipe
        # The processor has no kernel for moments in few bits, as the engine knows too.
        if self.update is not None and setting.offload is not Offload.NONE and recipe.blocks is None:
            recipe = replace(recipe, offload=replace(recipe.offload or HostState(), update=self.update))
        return make_row(
            work,
            recipe,
            setting,
            self.cluster,
            micro_batches=count,
            refused=read.refused,
            shard=read.shard,
            compiling=self.compiling,
        )

    def least_offloaded(self, row: Row) -> Row:
        """The same row or, for offload cpu that fits, the row with the least share of offloaded state that fits."""
        if row.setting.offload is not Offload.CPU or not row.fits:
            return row
        partly = (self.row(replace(row.setting, ratio=ratio)) for ratio in RATIOS)
        return next((made for made in partly if made.fits), row)


@dataclass
class _Table:
    """The rows of a request, the choice, advice and notes."""

    request: Request
    rows: list[Row]
    choice: Choice
    advised: list[str]
    notes: list[str]

    def json(self) -> str:
        return json.dumps(as_json(self.rows, self.choice, self.notes, self.advised), indent=1)

    def parts(self) -> list[RenderableType]:
        parts: list[RenderableType] = [plan_table(self.rows, self.choice, self.request.title, _width())]
        if self.choice.row is not None:
            parts.append(Text(traffic_text(self.choice.row)))
        else:
            none = "Nothing that this version executes fits; --explain says what would help."
            parts.append(Text(none, style="bold red"))
        parts += [Text(f"advice: {sentence}", style="yellow") for sentence in self.advised]
        parts += [Text(f"note: {note}", style="dim") for note in self.notes]
        return parts


@app.command()
def plan(
    model: Model = None,
    cluster: Annotated[str, typer.Option(help="COUNTxGPU, such as 8xA100-80GB.")] = "8xH100-80GB",
    params: Annotated[float | None, typer.Option(help="A decoder of so many parameters instead of MODEL.")] = None,
    layers: Annotated[int | None, typer.Option(help="With --params.")] = None,
    hidden: Annotated[int | None, typer.Option(help="With --params.")] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="peft's adapter_config.json: train that, on a frozen base (in 4 bits too).")
    ] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens in a sequence (4096, or what the model takes).")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences per GPU and micro-batch (config's, or 1).")] = None,
    accumulation: Annotated[int | None, typer.Option(help="Micro-batches per step (config's, or 1).")] = None,
    config: Annotated[Path | None, typer.Option(help="A DeepSpeed JSON to plan with.")] = None,
    checkpointing: Annotated[str, typer.Option(help="Activation checkpointing: off, on, both, reentrant.")] = "both",
    explain_: Annotated[Path | None, typer.Option("--explain", help="Explain the memory of this config.")] = None,
    scale: Annotated[str | None, typer.Option(help="Predict strategies for 8,64,512,... GPUs.")] = None,
    meshes: Annotated[bool, typer.Option("--meshes", help="All layouts: data, tp, sp, ep and pp.")] = False,
    global_batch: Annotated[int | None, typer.Option(help="With --meshes: sequences of one step.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs in a node (8, or all of fewer).")] = None,
    host_memory: Annotated[float, typer.Option(help="Host memory of a node, GB.")] = 1000.0,
    host_cores: Annotated[
        int | None, typer.Option(help="Cores of a node: who updates state in host memory (GPUs, if not given).")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compiled", help="Estimate with every block compiled.")] = False,
    disk: Annotated[float, typer.Option(help="What a node's disks read or write, GB/s.")] = 2.0,
    price: Annotated[float | None, typer.Option(help="USD per GPU and hour (data/prices.tsv, where listed).")] = None,
    calibration: Annotated[Path | None, typer.Option(help="What zeroshard doctor measured.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
    write: Annotated[Path | None, typer.Option(help="Write the choice's DeepSpeed JSON here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report that needs no network.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the memory chart (needs matplotlib).")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the choice's timeline as a Chrome trace.")] = None,
) -> None:
    """Print what MODEL takes on CLUSTER at every stage, with and without offload and checkpointing."""
    files = {"--write": write, "--html": html, "--png": png, "--trace": trace}
    _refuse_beside("--explain", explain_, {"--scale": scale, "--config": config, **files})
    _refuse_beside("--scale", scale, files)
    _refuse_beside("--meshes", meshes or None, {"--explain": explain_, "--scale": scale, **files})
    if global_batch is not None and not meshes:
        raise PlanError("--global-batch is for --meshes; beside it a config's train_batch_size says the same")
    where = parse_cluster(cluster, per_node=gpus_per_node, host_memory_gb=host_memory, disk_gbs=disk)
    where = replace(where, price=_price(price, where))
    if calibration is not None:
        where = calibrated(where, load_calibration(calibration))
    _refuse_less_than_one({"--host-cores": host_cores, "--micro-batch": micro_batch, "--accumulation": accumulation})
    _refuse_less_than_one({"--global-batch": global_batch})
    document = read_document(explain_, "--explain") if explain_ else read_document(config) if config else None
    with redirect_stdout(sys.stderr):  # for what the model's own code prints
        source = find_source(model, params=params, layers=layers, hidden=hidden)
        source = source if adapter is None else with_adapter(source, adapter)
        request = _request(source, where, document, seq, micro_batch, accumulation)
        request = replace(request, cores=host_cores, compiling=compiled)
        if explain_ is not None:
            answer = _explain(request, _checkpointing_of(checkpointing)[0], json_)
        elif meshes:
            answer = _layouts(request, _checkpointing_of(checkpointing), global_batch, json_)
        elif scale is not None:
            answer = _scale(request, parse_sizes(scale), _checkpointing_of(checkpointing)[-1], json_)
        else:
            answer = _table(request, _checkpointing_of(checkpointing))
    if not isinstance(answer, _Table):
        _echo(answer)
        return
    _echo(answer.json() if json_ else answer.parts())
    _outputs(answer, write=write, html=html, png=png, trace=trace)


def _refuse_beside(option: str, given: object, others: Mapping[str, object]) -> None:
    """Refuse options that would have no effect beside `option`, which has an output of its own."""
    beside = [name for name, value in others.items() if value is not None]
    if given is not None and beside:
        raise PlanError(f"{option} has an output of its own: leave out {', '.join(beside)}")


def _refuse_less_than_one(given: Mapping[str, int | None]) -> None:
    for option, value in given.items():
        if value is not None and value < 1:
            raise PlanError(f"{option} {value}: must be a whole number of at least 1")


def _table(request: Request, kinds: tuple[Checkpointing, ...]) -> _Table:
    rows, impossible = _rows(request, kinds)
    choice = choose(rows)
    estimated = [COMPILED_NOTE] if request.compiling else []
    notes = [*request.source.notes, *rows[0].traced.notes, *estimated, *impossible]
    notes += _assumptions(request.cluster, request.cores)
    return _Table(request, rows, choice, _advice(request, rows, choice), notes)


def _rows(request: Request, kinds: tuple[Checkpointing, ...]) -> tuple[list[Row], list[str]]:
    """The rows, and why those of an offload are missing that the optimizer can't have."""
    rows: list[Row] = []
    impossible: list[str] = []
    for setting in settings(checkpointing=kinds):
        try:
            rows.append(request.least_offloaded(request.row(setting)))
        except PlanError as error:
            if setting.offload is Offload.NONE:
                raise
            impossible.append(f"No rows with offload {setting.offload.value}: {str(error).removeprefix('offload: ')}.")
    return rows, list(dict.fromkeys(impossible))


def _request(
    source: ModelSource,
    cluster: Cluster,
    document: Document | None,
    seq: int | None,
    micro: int | None,
    accumulation: int | None,
) -> Request:
    document = default_document(cluster.gpu) if document is None else document
    document = with_batch(document, micro, accumulation)
    read = read_config(document, cluster, keep_fp32=source.keep_fp32)
    length = seq if seq is not None else min(DEFAULT_LENGTH, source.positions or DEFAULT_LENGTH)
    work = Workload(source, read.micro, length, read.autocast)
    return Request(source, cluster, document, work, read.micro, read.accumulation)


def _checkpointing_of(text: str) -> tuple[Checkpointing, ...]:
    if text == "both":
        return (Checkpointing.OFF, Checkpointing.ON)
    names = [how.value for how in Checkpointing]
    if text not in names:
        raise PlanError(f"--checkpointing {text}: it is one of {', '.join(names)}, both")
    return (Checkpointing(text),)


def _price(given: float | None, cluster: Cluster) -> float | None:
    if given is not None and not 0 <= given < 10_000:
        raise PlanError(f"--price {given:g}: USD per GPU and hour")
    return given if given is not None else listed_price(cluster.gpu)


def _explain(request: Request, how: Checkpointing, as_json_: bool) -> Answer:
    read = read_config(request.document, request.cluster, keep_fp32=request.source.keep_fp32)
    setting = Setting(read.stage, offload_of(request.document), how, ratio_of(request.document))
    explanation = explain(setting, request.micro, request.row)
    if as_json_:
        changes = [
            {"change": c.what, "slower": c.slower, "device_bytes": c.row.total, "runs": c.row.runs}
            for c in explanation.changes
        ]
        row = explanation.row
        content = {
            "fits": row.fits,
            "runs": row.runs,
            "refused": row.refused or None,
            "stage": setting.stage,
            "device_bytes": row.total,
            "moment": row.memory.peak.label,
            "largest": dict(explanation.largest),
            "changes": changes,
        }
        return json.dumps(content, indent=1)
    lines = in_words(explanation)
    if stage_is_auto(request.document):
        lines.insert(0, '"stage": "auto" is chosen at start-up; explained as stage 3, which takes the least memory.')
    return "\n".join([*lines, *(f"note: {note}" for note in request.source.notes)])


def _scale(request: Request, sizes: list[int], how: Checkpointing, as_json_: bool) -> Answer:
    strategies = compare(request.work, request.read(Setting(3, Offload.NONE, how)).recipe, request.cluster, sizes, how)
    if as_json_:
        return json.dumps([asdict(one) for one in strategies], indent=1)
    return [scale_table(strategies, f"{request.counted}, checkpointing {how.value}")]


def _layouts(request: Request, kinds: tuple[Checkpointing, ...], sequences: int | None, as_json_: bool) -> Answer:
    cluster, work = request.cluster, request.work
    if sequences is None:
        sequences = cluster.count * request.micro * request.accumulation
    found = Search(work, cluster, sequences, lambda setting: request.read(setting).recipe, kinds).run()
    choice = choose_layout(found)
    notes = [*request.source.notes, *LAYOUT_NOTES, *_assumptions(cluster, ENOUGH_THREADS)]
    if as_json_:
        return json.dumps(layouts_json(found, choice, notes), indent=1)
    of_length = f" x {work.length}" if request.source.tokens else ""
    title = f"{request.counted} on {cluster.label}, {sequences}{of_length} a step, micro-batches of {work.samples}"
    return [layout_table(found, choice, title), *(Text(f"note: {note}", style="dim") for note in notes)]


def _advice(request: Request, rows: list[Row], choice: Choice) -> list[str]:
    row = choice.row or min(rows, key=lambda candidate: candidate.total)
    return advice(Situation(row, rows, request.work.length, request.source.positions))


def _assumptions(cluster: Cluster, cores: int | None) -> list[str]:
    gpu = cluster.gpu
    notes = [f"{gpu.name}: {gpu.source}."]
    if cores is None:
        notes.append(
            f"State in host memory is assumed to be updated by the GPU; with {ENOUGH_THREADS} cores a GPU or more the "
            "processor updates it: give --host-cores."
        )
    if not gpu.name.startswith("H100"):
        notes.append(
            f"Times on {gpu.name} are not measured: they are computed from its published peaks and an H100's shares."
        )
    if cluster.count > 2:
        notes.append(
            "Collectives of more than two GPUs are not measured: they are computed from the rates of two GPUs."
        )
    return notes


def _echo(answer: Answer) -> None:
    """Print text, or tables as wide as the terminal; lines to a pipe are not broken."""
    if isinstance(answer, str):
        typer.echo(answer)
        return
    console = Console(width=_width(), highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        for part in answer:
            console.print(part)
    typer.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _width() -> int:
    return Console().width if sys.stdout.isatty() else WIDE


def _outputs(table: _Table, *, write: Path | None, html: Path | None, png: Path | None, trace: Path | None) -> None:
    row, title = table.choice.row, table.request.title
    if row is None and (write is not None or trace is not None):
        raise PlanError("--write, --trace: nothing that this version executes fits, so there is no choice to write")
    if write is not None and row is not None:
        document: dict[str, Any] = with_setting(table.request.document, row.setting)
        with writing("--write", write):
            write.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if trace is not None and row is not None:
        with writing("--trace", trace):
            write_trace(trace, row.time, f"{title}, {row.setting.label}")
    if html is not None:
        with writing("--html", html):
            page = report(table.rows, table.choice, title, [*table.advised, *table.notes])
            html.write_text(page, encoding="utf-8")
    if png is not None:
        with writing("--png", png):
            write_png(png, table.rows, table.choice, title)


def main(args: list[str]) -> None:
    """Run with these arguments, as `zeroshard plan` does."""
    app(args, prog_name="zeroshard plan")
