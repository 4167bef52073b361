"""The scripts of the migration pages run, and the pages show what is in them."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest

from tests.support.distributed import run_ranks

ROOT = Path(__file__).parents[2]
PEERS = ("ddp", "fsdp2", "deepspeed")


def _run(rank: int, world: int) -> dict[str, str]:
    printed = {}
    for peer in PEERS:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path(str(ROOT / "examples" / f"migrate_from_{peer}.py"), run_name="__main__")
        printed[peer] = out.getvalue()
    return printed


def test_the_scripts_train_as_before_the_move() -> None:
    printed = run_ranks(2, _run)[0]
    assert re.fullmatch(r"largest difference after 5 steps: 0\n", printed["ddp"]), "bit for bit on two ranks"
    assert printed["fsdp2"].startswith("largest difference after 5 steps: ")
    assert re.match(r"loss \d\.\d+ -> 0\.\d+ in \d+ steps", printed["deepspeed"])


@pytest.mark.parametrize("peer", PEERS)
def test_the_page_names_its_script_and_shows_its_lines(peer: str) -> None:
    page = (ROOT / "docs" / f"migrate-from-{peer}.md").read_text()
    script = (ROOT / "examples" / f"migrate_from_{peer}.py").read_text()
    assert f"zeroshard run --nproc 2 examples/migrate_from_{peer}.py" in page
    diffs = re.findall(r"^```diff\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    shown = re.findall(r"^\+ ?(.*)$", "\n".join(diffs), re.MULTILINE)
    assert shown
    lines = {line.strip().partition("  # was")[0] for line in script.splitlines()}
    assert [line for line in shown if line.strip() not in lines] == []
