"""`zeroshard config explain` and `check`: for people, for pipes and for machines."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from zeroshard.config.cli import app

GOOD = """{
  "train_batch_size": 16,
  "bf16": {"enabled": true},
  "dump_state": false,
  "zero_optimization": {"stage": 3, "contiguous_gradients": true, "reduce_bucket_size": 5e8}
}
"""
BAD = '{"stage": 3,\n "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}'


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(GOOD)
    return path


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.json"
    path.write_text(BAD)
    return path


def run(*arguments: str | Path, environment: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)


def row(output: str, key: str) -> str:
    (line,) = (line for line in output.splitlines() if line.startswith(f"{key} "))
    return " ".join(line.split())


def test_explain_shows_value_origin_and_status_of_every_setting(good: Path) -> None:
    done = run("explain", good, "--world-size", "2", "--defaults")
    assert done.exit_code == 0
    assert row(done.output, "zero_optimization.stage") == "zero_optimization.stage 3 ds.json line 5 obeyed"
    assert row(done.output, "gradient_clipping") == "gradient_clipping 1.0 default default"
    assert "derived: 16 / (1 accumulation x 2 ranks) obeyed" in row(done.output, "train_micro_batch_size_per_gpu")
    assert "no effect here: gradients always land" in row(done.output, "zero_optimization.contiguous_gradients")
    assert "500000000 ds.json line 5 no effect here" in row(done.output, "zero_optimization.reduce_bucket_size")
    assert "not built yet" in row(done.output, "dump_state")


def test_explain_leaves_defaults_out_and_says_how_many_they_are(good: Path) -> None:
    few, more = (run("explain", good, "-n", "2", *options).output.splitlines() for options in ((), ("--defaults",)))
    assert [line.split()[0] for line in few[2:-1]] == [
        "bf16.enabled",
        "dump_state",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage",
    ]
    assert few[-1] == f"{len(more) - len(few) + 1} settings are at their defaults; --defaults shows them"
    assert {line.split()[-1] for line in more[2:] if line.split()[0] not in "\n".join(few)} == {"default"}


def test_output_that_is_not_a_terminal_has_no_escape_codes_and_no_broken_lines(good: Path) -> None:
    done = run("explain", good, environment={"COLUMNS": "20"})
    assert "\x1b" not in done.output
    assert all(len(line.split()) != 1 and line == line.rstrip() for line in done.output.splitlines())


def test_a_long_value_widens_its_own_line_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    names = [f"package.module.Block{number}" for number in range(20)]
    path.write_text(
        json.dumps({"train_batch_size": 1, "zero_optimization": {"stage": 3, "leaf_module": {"names": names}}})
    )
    lines = run("explain", path, "--defaults").output.splitlines()
    assert [line.split()[0] for line in lines if '"package.module' in line] == ["zero_optimization.leaf_module.names"]
    assert len({line.index("default  ") for line in lines if " null " in line}) == 1, "columns stay"
    assert max(len(line.rpartition("default  ")[0]) for line in lines if " null " in line) < 110


@pytest.mark.parametrize("columns", [80, 160])
def test_explain_fits_the_terminal(good: Path, columns: int) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    words = [sys.executable, "-c", "from zeroshard.config.cli import app; app()", "explain", str(good), "--all"]
    with subprocess.Popen(words, stdout=theirs, env=environment) as running:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # at its end a terminal gives an error
            while data := os.read(ours, 65536):
                shown += data
    os.close(ours)
    assert running.returncode == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown.decode()).splitlines()
    assert max(map(len, lines)) <= columns
    key = "zero_optimization.offload_optimizer.device"
    narrow = [line for line in lines if line.startswith(f"{key} = ")]
    assert len(narrow) == (columns == 80)
    assert any(line.startswith(f"{key} ") for line in lines), "a key is never broken"


def test_three_batch_sizes_say_for_how_many_ranks_a_config_is(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    sizes = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    path.write_text(json.dumps(sizes))
    assert "x 2 ranks (assumed; give --world-size)" in run("check", path).output
    assert "world size 2 (assumed; give --world-size)" in run("explain", path).output
    assert run("check", path, "-n", "2").output.rstrip().endswith("4 x 4 accumulation x 2 ranks")
    for arguments, environment in ((("-n", "4"), {}), ((), {"WORLD_SIZE": "4"})):
        done = run("check", path, *arguments, environment=environment)
        assert done.exit_code == 1
        assert "x 4 ranks = 64" in done.output
        assert "assumed" not in done.output
    path.write_text(json.dumps({**sizes, "train_batch_size": 33}))
    assert "The number of ranks was assumed; --world-size N says it." in run("check", path).output


@pytest.mark.parametrize("command", ["explain", "check", "migrate"])
def test_what_has_no_end_is_not_read_for_ever(tmp_path: Path, command: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, said in ((pipe, "the text ends where a value is expected"), (Path("/dev/zero"), "has more than 16 MiB")):
        done = run(command, path)
        assert done.exit_code == 1
        assert said in done.output


def test_a_file_of_another_kind_is_refused_with_a_list_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({f"key {number}": number for number in range(20000)}))
    done = run("check", path)
    assert done.exit_code == 1
    lines = done.output.splitlines()
    assert len(lines) == 52
    assert "more problems, which are told when these are mended" in lines[-1]


def test_explain_for_machines_is_json(good: Path) -> None:
    done = run("explain", good, "--world-size", "2", "--json")
    table = json.loads(done.output)
    settings = {setting["key"]: setting for setting in table["settings"]}
    assert table["world_size"] == 2
    assert settings["zero_optimization.stage"] == {
        "key": "zero_optimization.stage",
        "value": 3,
        "origin": "ds.json line 5",
        "status": "obeyed",
        "note": settings["zero_optimization.stage"]["note"],
    }


def test_the_world_size_is_the_launchers_or_an_assumption_that_is_said(good: Path) -> None:
    assert "world size 1 (assumed; give --world-size)" in run("explain", good, environment={"WORLD_SIZE": ""}).output
    assert "world size 4\n" in run("explain", good, environment={"WORLD_SIZE": "4"}).output


@pytest.mark.parametrize("command", ["explain", "check"])
def test_a_bad_config_leaves_with_status_1_and_every_problem(command: str, bad: Path) -> None:
    done = run(command, bad)
    assert done.exit_code == 1
    assert done.stdout == ""
    assert "stage (bad.json line 1): unknown key" in done.stderr
    assert "zero_optimization.offload_optimizer.device (bad.json line 2)" in done.stderr
    as_json = run(command, bad, "--json")
    assert as_json.exit_code == 1
    assert len(json.loads(as_json.stdout)["problems"]) == 3


def test_check_says_what_the_config_amounts_to(good: Path) -> None:
    done = run("check", good, "--world-size", "2")
    assert done.exit_code == 0
    assert done.stdout == "ds.json is valid: ZeRO stage 3, bf16, batch 16 = 8 x 1 accumulation x 2 ranks\n"


def test_values_for_auto_are_given_with_set(tmp_path: Path) -> None:
    path = tmp_path / "auto.json"
    path.write_text('{"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}')
    assert run("check", path).exit_code == 1
    done = run("check", path, "--set", "train_micro_batch_size_per_gpu=4", "--set", "bf16.enabled=true")
    assert done.exit_code == 0
    assert run("check", path, "--set", "nonsense").exit_code == 2


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    done = run("check", tmp_path / "none.json")
    assert done.exit_code == 1
    assert "can't be read: No such file" in done.stderr


def test_deprecated_keys_are_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text('{"train_batch_size": 1, "zero_optimization": {"cpu_offload": false}}')
    for command in ("explain", "check"):
        done = run(command, path)
        assert done.exit_code == 0
        assert "warning: zero_optimization.cpu_offload (old.json line 1) is deprecated" in done.output


def test_all_shows_every_key(good: Path) -> None:
    few, every = run("explain", good).output, run("explain", good, "--all").output
    assert len(every.splitlines()) > len(few.splitlines()) + 300
    assert row(every, "zero_optimization.cpu_offload").endswith(
        "deprecated; write zero_optimization.offload_optimizer.device"
    )
    assert (
        row(every, "aio.queue_depth")
        == "aio.queue_depth 8 default no effect here: 32 requests are with the disk at once"
    )
    keys = [setting["key"] for setting in json.loads(run("explain", good, "--all", "--json").output)["settings"]]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


def test_a_pipe_gets_whole_lines_at_80_columns(good: Path) -> None:
    command = [sys.executable, "-m", "zeroshard", "config", "explain", str(good), "--all"]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert max(len(line) for line in done.stdout.splitlines()) > 200
    assert "no effect here: gradients always land in one contiguous slot per unit" in done.stdout
