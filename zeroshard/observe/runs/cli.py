"""The commands `zeroshard explain`, `zeroshard report` and `zeroshard top`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from zeroshard.errors import UsageError
from zeroshard.observe.metrics.files import open_directory
from zeroshard.observe.runs.bill import bill, read_prediction
from zeroshard.observe.runs.explain import explain as explained
from zeroshard.observe.runs.log import read_ranks
from zeroshard.observe.runs.report import report as reported
from zeroshard.observe.runs.top import table_of

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
RunFile = Annotated[Path, typer.Argument(help="The file of run_log.path.")]


@app.command()
def explain(
    run: RunFile,
    plan: Annotated[Path | None, typer.Option(help="What zeroshard plan --json printed, to compare with.")] = None,
    stage: Annotated[int | None, typer.Option(help="Compare with this stage and not with the plan's choice.")] = None,
) -> None:
    """Say where the time of a run went, what was slow and what was odd."""
    if stage is not None and plan is None:
        raise UsageError("--stage names a row of --plan; give that too")
    predicted = None if plan is None else read_prediction(plan, stage)
    ranks = read_ranks(run)
    for line in (*explained(ranks[0], ranks), *(() if predicted is None else bill(ranks[0], predicted))):
        print(line)


@app.command()
def report(
    run: RunFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
) -> None:
    """Write one HTML page with the curves of a run."""
    ranks = read_ranks(run)
    page = reported(ranks[0], run.name, ranks)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {output} can't be written: {error.strerror}") from error
    print(output)


@app.command()
def top(
    directory: Annotated[str | None, typer.Option(help="metrics.directory of the config.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the table once.")] = False,
    seconds: Annotated[float, typer.Option(help="Between two looks.", min=0.1)] = 1.0,
) -> None:
    """Show the ranks of this node; metrics.enabled in their config leaves the numbers."""
    folder = open_directory(directory)
    console = Console()
    if once:
        console.print(table_of(folder))
        return
    with Live(table_of(folder), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(seconds)
            live.update(table_of(folder), refresh=True)
