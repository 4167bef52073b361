"""What docs/launching.md shows is there: its script runs, its options exist, and no option is missing from it."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from tests.launch.launcher import ROOT, script, zeroshard
from zeroshard.launch.cli import app

_PAGE = (ROOT / "docs" / "launching.md").read_text()


def _options() -> list[set[str]]:
    """The spellings of each option of `run`."""
    group = typer.main.get_command(app)
    command = group.get_command(typer.Context(group), "run")  # pyright: ignore[reportAttributeAccessIssue]
    return [set(option.opts) for option in command.params if option.param_type_name == "option" and not option.hidden]


def test_the_pages_script_runs_on_two_ranks_that_meet_without_a_port_being_named(tmp_path: Path) -> None:
    block = re.search(r"^```python\n(.*?)^```$", _PAGE, re.DOTALL | re.MULTILINE)
    assert block is not None
    script(tmp_path, block[1], "train.py")
    done = zeroshard(tmp_path, "run", "--nproc", "2", "train.py", env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2 counted 2" for rank in range(2)]


def test_every_option_is_on_the_page_and_every_option_on_the_page_is_there() -> None:
    options = _options()
    every = {word for spellings in options for word in spellings}
    shown = set(re.findall(r"(?<![\w-])--?[a-z][a-z_-]*", _PAGE))
    foreign = {"--lr", "--ntasks-per-node", "--local_rank", "--version", "--help", "-i", "-o"}
    assert shown - foreign - every == set()
    assert [spellings for spellings in options if not spellings & shown and spellings != {"--help"}] == []
