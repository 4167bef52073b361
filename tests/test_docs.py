"""What the pages show runs: the README's examples and table, the blocks of the guides, the decisions' evidence."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import runpy
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.distributed import run_ranks
from tests.support.forked import start

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md", ROOT / "CONTRIBUTING.md"]


def blocks(page: Path, language: str = "python") -> list[str]:
    """The fenced blocks of a language ("" for none)."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for found, text in fenced if found == language]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
RUN_A_SCRIPT = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def run(*words: str) -> str:
    """The output of a command as `start` takes it, in a checkout; that it imports torch would be most of its time."""
    program = start(words, ROOT, ENVIRONMENT)
    out, err = program.communicate(timeout=240)
    assert program.returncode == 0, out + err
    return out


def launched(script: str, tmp_path: Path) -> str:
    """The output of a script under `zeroshard run`, as a user starts it."""
    path = tmp_path / "train.py"
    path.write_text(script)
    return run("run", "--nproc", "2", str(path))


def on_two_ranks(script: str, tmp_path: Path) -> str:
    """The output of a script on two ranks; without the launcher, whose start costs more than what most pages run."""
    path = tmp_path / "train.py"
    path.write_text(script)
    # The store of the group that the script makes is here, as an agent's would be: no port can be lost to others.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    met = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return "".join(run_ranks(2, _script, str(path), timeout=240, env=met))


def _script(rank: int, world_size: int, path: str) -> str:
    _leave(world_size)
    printed, status = io.StringIO(), None
    try:
        os.chdir(Path(path).parent)  # what the script leaves behind goes with its folder
        with contextlib.redirect_stdout(printed):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        status = end.code
    assert not status, printed.getvalue()
    return printed.getvalue()


def _leave(world_size: int) -> None:
    """Leave the process group when all have joined: one that leaves earlier breaks the connections of the others."""
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    if store.add("leaving", 1) == world_size:
        store.set("all leaving", "")
    store.wait(["all leaving"])
    dist.destroy_process_group()


def without_docstring(text: str) -> str:
    first = ast.parse(text).body[0]
    assert first.end_lineno is not None
    return "\n".join(text.splitlines()[first.end_lineno :]).strip()


def test_the_two_commands_stand_at_the_top() -> None:
    title, sentence, commands, *_ = README.read_text().split("\n\n")
    assert title == "# zeroshard"
    assert sentence.startswith("zeroshard trains")
    assert sentence.count(".") == 1
    fence, demo, test, _ = commands.splitlines()
    assert fence == "```"
    assert demo.startswith("make demo")
    assert test.startswith("make test")


@pytest.mark.parametrize(("place", "name", "most_lines"), [(0, "engine", 15), (1, "native", 12)])
def test_the_readmes_example_is_the_file_in_examples_and_is_short(place: int, name: str, most_lines: int) -> None:
    block = blocks(README)[place]
    assert block.strip() == without_docstring((ROOT / "examples" / f"readme_{name}.py").read_text())
    assert len([line for line in block.splitlines() if line.strip()]) <= most_lines


@pytest.mark.parametrize("place", [0, 1])
def test_the_readmes_example_runs_on_two_ranks_that_agree(place: int, tmp_path: Path) -> None:
    output = launched if place == 0 else on_two_ranks
    norms = re.findall(r"gradient norm ([\d.]+)", output(blocks(README)[place], tmp_path))
    assert len(norms) == 2
    assert norms[0] == norms[1]


def test_the_readmes_memory_table_is_what_the_command_prints() -> None:
    printed = run("-c", RUN_A_SCRIPT, "examples/memory_7b.py")
    shown = next(block for block in blocks(README, "") if block.startswith("stage"))
    assert printed.startswith(shown)


def test_the_readmes_claims_are_measured(tmp_path: Path) -> None:
    printed = on_two_ranks((ROOT / "examples" / "check_claims.py").read_text(), tmp_path)
    rows = [line.split() for line in printed.splitlines()[2:]]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert len({row[1] for row in rows}) == 1, "stages differ"
    assert all(row[2] == row[3] and row[4] == row[5] for row in rows), "the plan is not what was measured"


@pytest.mark.parametrize("page", ["native", "engine", "optimizers", "offload", "elastic"])
def test_the_guides_blocks_are_a_script_that_runs(page: str, tmp_path: Path) -> None:
    on_two_ranks("\n".join(blocks(ROOT / "docs" / f"{page}.md")), tmp_path)


def test_the_guides_show_every_public_function() -> None:
    import zeroshard

    text = "\n".join(
        block
        for page in ("native", "engine", "optimizers", "offload", "elastic")
        for block in blocks(ROOT / "docs" / f"{page}.md")
    )
    missing = [name for name in zeroshard.__all__ if f"zeroshard.{name}" not in text]
    assert not missing


@pytest.mark.parametrize(
    ("page", "ranks"),
    [
        ("0002-completeness-by-creation-order", 1),
        ("0003-slots-and-static-addresses", 1),
        ("0005-cursor-over-flat-lists", 2),
        ("0007-gradient-stand-in", 1),
    ],
)
def test_the_evidence_of_a_decision_holds(page: str, ranks: int, tmp_path: Path) -> None:
    (block,) = blocks(ROOT / "docs" / "decisions" / f"{page}.md")
    if ranks == 2:
        norms = re.findall(r"gradient norm ([\d.]+)", on_two_ranks(block, tmp_path))
        assert len(norms) == 2
        assert norms[0] == norms[1]
        return
    expected = re.search(r"print\(.*\)  # (.*)", block)
    assert expected is not None
    path = tmp_path / "evidence.py"
    path.write_text(block)
    assert run("-c", RUN_A_SCRIPT, str(path)).strip() == expected[1].partition(": ")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target
