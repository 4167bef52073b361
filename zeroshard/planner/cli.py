"""`zeroshard plan`: what a model takes on a cluster, which setting to take and why, before anything is rented."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from zeroshard.errors import PlanError
from zeroshard.plan.offload import ENOUGH_THREADS
from zeroshard.plan.offload import Offload as HostState
from zeroshard.plan.plan import HostUpdate
from zeroshard.planner.advice import Situation, advice
from zeroshard.planner.calibration import calibrated, load_calibration
from zeroshard.planner.checkpointing import Checkpointing
from zeroshard.planner.choose import Choice, choose
from zeroshard.planner.chrome import write_trace
from zeroshard.planner.compiled import NOTE as COMPILED_NOTE
from zeroshard.planner.configs import (
    Document,
    Meaning,
    default_document,
    meaning,
    offload_of,
    ratio_of,
    read_document,
    with_batch,
    with_setting,
)
from zeroshard.planner.explain import RATIOS, explain, in_words
from zeroshard.planner.hardware import Cluster, listed_price, parse_cluster
from zeroshard.planner.html import report
from zeroshard.planner.png import write_png
from zeroshard.planner.rows import Row, Setting, make_row, settings
from zeroshard.planner.scale import compare, parse_sizes
from zeroshard.planner.sources import ModelSource, find_source
from zeroshard.planner.tables import as_json, plan_table, scale_table, traffic_text
from zeroshard.planner.tiers import Offload
from zeroshard.planner.workload import Workload

DEFAULT_LENGTH = 4096
WIDE = 1000

app = typer.Typer(help="What a model takes on a cluster.", add_completion=False, pretty_exceptions_enable=False)

Model = Annotated[str | None, typer.Argument(help="config.json, pkg.mod:factory or a cached id.", show_default=False)]


@dataclass
class Request:
    """What the command line asked for, read."""

    source: ModelSource
    cluster: Cluster
    document: Document
    work: Workload
    micro: int
    accumulation: int
    cores: int | None = None
    """Of a node; None where nobody said."""
    compiling: bool = False

    @property
    def update(self) -> HostUpdate | None:
        """Who updates state in host memory, as the engine chooses by a rank's threads; None is the GPU if it can."""
        enough = self.cores is not None and self.cores // self.cluster.per_node >= ENOUGH_THREADS
        return HostUpdate.PROCESSOR if enough else None

    def means(self, setting: Setting) -> Meaning:
        document = with_setting(self.document, setting)
        return meaning(document, self.cluster, keep_fp32=self.source.keep_fp32)

    @property
    def title(self) -> str:
        work = self.work
        micro = f"{self.accumulation} x " if self.accumulation > 1 else ""
        batch = f"{micro}{work.samples} x {work.length}"
        return f"{self.source.name}: {work.numel:,} parameters on {self.cluster.label}, micro-batch {batch}"

    def row(self, setting: Setting, samples: int | None = None) -> Row:
        """The row of a setting; with fewer samples per micro-batch there are more micro-batches."""
        means = self.means(setting)
        work = self.work if samples in (None, self.micro) else replace(self.work, samples=samples or 1)
        count = self.accumulation * self.micro // work.samples
        recipe = means.recipe
        if self.update is not None and setting.offload is not Offload.NONE:
            recipe = replace(recipe, offload=replace(recipe.offload or HostState(), update=self.update))
        return make_row(
            work,
            recipe,
            setting,
            self.cluster,
            micro_batches=count,
            refused=means.refused,
            compiling=self.compiling,
        )

    def mildest(self, row: Row) -> Row:
        """Of offload to the CPU that fits, the row that offloads the least share of the state which is enough."""
        if row.setting.offload is not Offload.CPU or not row.fits:
            return row
        partly = (self.row(replace(row.setting, ratio=ratio)) for ratio in RATIOS)
        return next((made for made in partly if made.fits), row)


@app.command()
def plan(
    model: Model = None,
    cluster: Annotated[str, typer.Option(help="COUNTxGPU, such as 8xA100-80GB.")] = "8xH100-80GB",
    params: Annotated[float | None, typer.Option(help="A decoder of so many parameters instead of MODEL.")] = None,
    layers: Annotated[int | None, typer.Option(help="With --params.")] = None,
    hidden: Annotated[int | None, typer.Option(help="With --params.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens in a sequence (4096, or what the model takes).")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences per GPU and micro-batch (config's, or 1).")] = None,
    accumulation: Annotated[int | None, typer.Option(help="Micro-batches per step (config's, or 1).")] = None,
    config: Annotated[Path | None, typer.Option(help="A DeepSpeed JSON to plan with.")] = None,
    checkpointing: Annotated[str, typer.Option(help="Activation checkpointing: off, on, both, reentrant.")] = "both",
    explain_: Annotated[Path | None, typer.Option("--explain", help="Why this config needs what it needs.")] = None,
    scale: Annotated[str | None, typer.Option(help="Compare ways to use 8,64,512,... GPUs on paper.")] = None,
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
    source = find_source(model, params=params, layers=layers, hidden=hidden)
    where = parse_cluster(cluster, per_node=gpus_per_node, host_memory_gb=host_memory, disk_gbs=disk)
    where = replace(where, price=_price(price, where))
    if calibration is not None:
        where = calibrated(where, load_calibration(calibration))
    if host_cores is not None and host_cores < 1:
        raise PlanError(f"--host-cores {host_cores}: cores of a node, 1 or more")
    request = _request(source, where, explain_ or config, seq, micro_batch, accumulation)
    request = replace(request, cores=host_cores, compiling=compiled)
    if explain_ is not None:
        _explain(request, _ways(checkpointing)[0], json_)
        return
    if scale is not None:
        _scale(request, parse_sizes(scale), _ways(checkpointing)[-1], json_)
        return
    rows, impossible = _rows(request, _ways(checkpointing))
    choice = choose(rows)
    advised = _advice(request, rows, choice)
    estimated = [COMPILED_NOTE] if compiled else []
    notes = [*rows[0].traced.notes, *estimated, *impossible, *_assumptions(where, host_cores)]
    if json_:
        typer.echo(json.dumps(as_json(rows, choice, notes, advised), indent=1))
    else:
        _print(request, rows, choice, advised, notes)
    _outputs(request, rows, choice, [*advised, *notes], write=write, html=html, png=png, trace=trace)


def _rows(request: Request, ways: tuple[Checkpointing, ...]) -> tuple[list[Row], list[str]]:
    """The table, and why there are no rows of an offload that the optimizer can't have."""
    rows: list[Row] = []
    impossible: list[str] = []
    for setting in settings(checkpointing=ways):
        try:
            rows.append(request.mildest(request.row(setting)))
        except PlanError as error:
            if setting.offload is Offload.NONE:
                raise
            impossible.append(f"No rows with offload: {str(error).removeprefix('offload: ')}.")
    return rows, list(dict.fromkeys(impossible))


def _request(
    source: ModelSource,
    cluster: Cluster,
    config: Path | None,
    seq: int | None,
    micro: int | None,
    accumulation: int | None,
) -> Request:
    document = default_document(cluster.gpu) if config is None else read_document(config)
    document = with_batch(document, micro, accumulation)
    means = meaning(document, cluster, keep_fp32=source.keep_fp32)
    length = seq if seq is not None else min(DEFAULT_LENGTH, source.positions or DEFAULT_LENGTH)
    work = Workload(source, means.micro, length, means.autocast)
    return Request(source, cluster, document, work, means.micro, means.accumulation)


def _ways(text: str) -> tuple[Checkpointing, ...]:
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


def _explain(request: Request, how: Checkpointing, as_json_: bool) -> None:
    means = meaning(request.document, request.cluster, keep_fp32=request.source.keep_fp32)
    setting = Setting(means.setting_stage, offload_of(request.document), how, ratio_of(request.document))
    explanation = explain(setting, request.micro, request.row)
    lines = in_words(explanation)
    if as_json_:
        changes = [
            {"change": c.what, "slower": c.slower, "device_bytes": c.row.total, "runs": c.row.runs}
            for c in explanation.changes
        ]
        row = explanation.row
        content = {
            "fits": row.fits,
            "device_bytes": row.total,
            "moment": row.memory.peak.label,
            "largest": dict(explanation.largest),
            "changes": changes,
        }
        typer.echo(json.dumps(content, indent=1))
        return
    typer.echo("\n".join(lines))


def _scale(request: Request, sizes: list[int], how: Checkpointing, as_json_: bool) -> None:
    ways = compare(request.work, request.means(Setting(3, Offload.NONE, how)).recipe, request.cluster, sizes, how)
    if as_json_:
        typer.echo(json.dumps([asdict(way) for way in ways], indent=1))
        return
    _echo([scale_table(ways, f"{request.title.partition(' on ')[0]}, checkpointing {how.value}")])


def _advice(request: Request, rows: list[Row], choice: Choice) -> list[str]:
    row = choice.row or min(rows, key=lambda candidate: candidate.total)
    return advice(Situation(row, rows, request.work.length, request.source.positions))


def _assumptions(cluster: Cluster, cores: int | None) -> list[str]:
    gpu = cluster.gpu
    notes = [f"{gpu.name}: {gpu.source}."]
    if cores is None:
        notes.append(
            f"Offloaded state is taken to be updated by the GPU; with {ENOUGH_THREADS} cores a GPU or more the "
            "processor does it: give --host-cores."
        )
    if not gpu.name.startswith("H100"):
        notes.append(
            f"Times on {gpu.name} are not measured: its published peaks times the shares that an H100 reaches."
        )
    if cluster.count > 2:
        notes.append("Collectives of more than two GPUs are not measured: rates of two, and the hops of a ring.")
    return notes


def _print(request: Request, rows: list[Row], choice: Choice, advised: list[str], notes: list[str]) -> None:
    parts: list[RenderableType] = [plan_table(rows, choice, request.title)]
    if choice.row is not None:
        parts.append(Text(traffic_text(choice.row)))
    else:
        parts.append(Text("Nothing that this version executes fits; --explain says what would help.", style="bold red"))
    parts += [Text(f"advice: {sentence}", style="yellow") for sentence in advised]
    parts += [Text(f"note: {note}", style="dim") for note in notes]
    _echo(parts)


def _echo(parts: list[RenderableType]) -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    typer.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _outputs(
    request: Request,
    rows: list[Row],
    choice: Choice,
    notes: list[str],
    *,
    write: Path | None,
    html: Path | None,
    png: Path | None,
    trace: Path | None,
) -> None:
    if choice.row is None and (write is not None or trace is not None):
        raise PlanError("--write, --trace: nothing that this version executes fits, so there is no choice to write")
    if write is not None and choice.row is not None:
        document: dict[str, Any] = with_setting(request.document, choice.row.setting)
        write.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if trace is not None and choice.row is not None:
        write_trace(trace, choice.row.time, f"{request.title}, {choice.row.setting.label}")
    if html is not None:
        html.write_text(report(rows, choice, request.title, notes), encoding="utf-8")
    if png is not None:
        write_png(png, rows, choice, request.title)


def main(args: list[str]) -> None:
    """Run with these arguments, as `zeroshard plan` does."""
    app(args, prog_name="zeroshard plan")
