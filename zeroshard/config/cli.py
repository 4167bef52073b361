"""The `zeroshard config` commands."""

import typer

app = typer.Typer(help="Read and explain configuration files.")


@app.callback()
def config() -> None:
    """Read and explain configuration files."""
