"""`zeroshard plan` from the outside: tables, JSON, the written config, explanations and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from zeroshard.errors import PlanError
from zeroshard.launch.cli import app
from zeroshard.planner.show import cli as cli
from zeroshard.planner.show.cli import app as plan_app

SMALL = ["--params", "2e8", "--layers", "2", "--hidden", "1024", "--seq", "256"]


def _json(*args: str) -> dict[str, Any]:
    result = CliRunner().invoke(plan_app, [*SMALL, "--json", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_the_command_is_mounted() -> None:
    result = CliRunner().invoke(
        app, ["plan", *SMALL, "--cluster", "2xH100", "--checkpointing", "off"], catch_exceptions=False
    )
    assert "-> " in result.output or "The choice" in result.output


def test_every_row_has_a_reason_and_one_is_chosen() -> None:
    found = _json("--cluster", "8xA100-80GB", "--price", "2")
    rows = found["rows"]
    assert {(row["stage"], row["offload"]) for row in rows} >= {(0, "none"), (3, "none"), (1, "cpu"), (3, "nvme")}
    assert all(row["why"] for row in rows)
    (chosen,) = [row for row in rows if row["chosen"]]
    assert chosen["fits"]
    assert chosen["runs"]
    able = [row["step_seconds"] for row in rows if row["fits"] and row["runs"]]
    assert chosen["step_seconds"] <= 1.011 * min(able)
    hours = chosen["hours_per_1e9_tokens"]
    assert chosen["usd_per_1e9_tokens"] == pytest.approx(hours * 8 * 2)


def test_a_narrow_terminal_loses_whole_columns_and_no_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_width", lambda: 80)
    args = ["tests.planner.zoo:make_tiny", "--seq", "8", "--checkpointing", "off"]
    shown = CliRunner().invoke(plan_app, args, catch_exceptions=False).output
    table, _, rest = shown.partition("GB of 1e9")
    assert all(len(line) <= 80 for line in table.splitlines())
    assert "…" not in shown
    assert {"total", "fits", "step"} <= set(table.splitlines()[1].split())
    assert "Left out, since the window is too narrow: param" in rest


def test_titles_are_no_markup_and_what_a_factory_prints_is_no_answer() -> None:
    args = ["--seq", "8", "--checkpointing", "off"]
    result = CliRunner().invoke(plan_app, ["tests.planner.zoo:m:", *args], catch_exceptions=False)
    assert result.stdout.startswith("tests.planner.zoo:m:: ")  # an emoji to rich
    assert "printed by the factory" in result.stderr
    assert "printed by the factory" not in result.stdout


def test_what_the_engine_refuses_is_shown_and_not_chosen() -> None:
    rows = _json("--cluster", "2xH100")["rows"]
    for row in rows:
        if not row["runs"]:
            assert "not built yet" in row["refused"]
            assert not row["chosen"]


def test_the_written_config_is_one_that_zeroshard_reads(tmp_path: Path) -> None:
    from zeroshard.config import load_config

    written = tmp_path / "ds.json"
    found = _json("--cluster", "8xA100-80GB", "--write", str(written), "--micro-batch", "2", "--accumulation", "4")
    config = load_config(str(written), world_size=8)
    assert config.zero.stage == found["choice"]["stage"]
    assert (config.batch.micro, config.batch.accumulation) == (2, 4)


def test_a_config_keeps_its_batch(tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_text(
        json.dumps({"bf16": {"enabled": True}, "train_batch_size": 256, "gradient_accumulation_steps": 16}),
        encoding="utf-8",
    )
    rows = _json("--cluster", "8xH100", "--config", str(path), "--checkpointing", "off")["rows"]
    tokens = 2 * 256 * 16
    assert rows[0]["tokens_per_second_per_gpu"] * rows[0]["step_seconds"] == pytest.approx(tokens)
    smaller = _json("--cluster", "8xH100", "--config", str(path), "--checkpointing", "off", "--micro-batch", "1")
    assert smaller["rows"][0]["tokens_per_second_per_gpu"] * smaller["rows"][0]["step_seconds"] == pytest.approx(tokens)
    with pytest.raises(ValueError, match="256"):
        _json("--cluster", "3xH100", "--config", str(path))


def test_a_config_of_autos_is_planned_and_written_with_them(tmp_path: Path) -> None:
    path, written = tmp_path / "auto.json", tmp_path / "written.json"
    batch = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    config = {
        **batch,
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": schedule,
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"},
    }
    path.write_text(json.dumps(config), encoding="utf-8")
    found = _json("--cluster", "8xA100", "--config", str(path), "--write", str(written), "--checkpointing", "off")
    plain = _json("--cluster", "8xA100", "--checkpointing", "off")
    assert found["rows"][3]["device_bytes"]["moments"] == plain["rows"][3]["device_bytes"]["moments"]
    kept = json.loads(written.read_text(encoding="utf-8"))
    assert kept["scheduler"] == schedule
    assert kept["train_batch_size"] == "auto"
    assert kept["zero_optimization"]["stage"] == found["choice"]["stage"]


def test_moments_in_few_bits_are_planned_wherever_they_can_rest_and_what_can_not_be_is_said(tmp_path: Path) -> None:
    path = tmp_path / "bits.json"
    optimizer = {"type": "AdamW8bit", "params": {"lr": 1e-4}}
    path.write_text(json.dumps({"bf16": {"enabled": True}, "train_batch_size": 2, "optimizer": optimizer}))
    many = ("--host-cores", "64")  # with which the processor would update float32 moments
    found = _json("--cluster", "2xH100", "--config", str(path), "--checkpointing", "off", *many)
    assert {row["offload"] for row in found["rows"]} == {"none", "cpu", "cpu+param", "nvme"}
    assert {row["updated_by"] for row in found["rows"] if row["offload"] != "none"} == {"streamed"}
    assert any("No rows with offload nvme+param: parameters on disk are updated by" in note for note in found["notes"])


def test_who_updates_offloaded_state_follows_from_the_cores_of_a_gpu() -> None:
    for cores, who in ((16, "streamed"), (24, "processor")):
        rows = _json("--cluster", "2xH100", "--host-cores", str(cores), "--checkpointing", "off")["rows"]
        assert {row["updated_by"] for row in rows if row["offload"] in ("cpu", "cpu+param")} == {who}
        assert all(row["updated_by"] is None for row in rows if row["offload"] == "none")


def test_explain_of_what_fits_says_so_and_what_could_be_freed(tmp_path: Path) -> None:
    path = tmp_path / "fits.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 4}), encoding="utf-8")
    args = ["--params", "1e9", "--layers", "4", "--hidden", "2048", "--seq", "1024", "--cluster", "8xA100-80GB"]
    shown = CliRunner().invoke(plan_app, [*args, "--explain", str(path)], catch_exceptions=False).output
    assert ": fits." in shown
    assert "stay free. The cheapest changes that would free more:" in shown
    assert '"stage": 1' in shown


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage": "auto"}, "chosen at start-up"),
        (
            {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}, "offload_param": {"device": "cpu"}},
            "does not execute it yet",
        ),
    ],
)
def test_explain_says_what_is_not_run_as_written(zero: dict[str, Any], expected: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero}), encoding="utf-8")
    args = ["tests.planner.zoo:make_tiny", "--seq", "8", "--explain", str(path)]
    assert expected in CliRunner().invoke(plan_app, args, catch_exceptions=False).output


def test_explain_names_the_moment_and_cures(tmp_path: Path) -> None:
    path = tmp_path / "oom.json"
    config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 1}}
    path.write_text(json.dumps(config), encoding="utf-8")
    args = ["--params", "1e9", "--layers", "4", "--hidden", "2048", "--seq", "2048", "--checkpointing", "off"]
    shown = CliRunner().invoke(
        plan_app, [*args, "--cluster", "8xRTX4090", "--explain", str(path)], catch_exceptions=False
    )
    assert "does not fit" in shown.output
    assert "backward of the loss" in shown.output
    assert "3. " in shown.output
    assert "micro-batch" in shown.output


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--params", "7e9", "--cluster", "8xH10O-80GB"], "H100-80GB"),
        (["--params", "7e9", "--cluster", "H100"], "COUNTxGPU"),
        (["--params", "7e9", "--cluster", "12xH100"], "whole nodes"),
        (["--params", "7", "--cluster", "8xH100"], "number of parameters"),
        (["--params", "1e9", "--layers", "500", "--hidden", "8192"], "too few"),
        (["--params", "1e9", "--seq", "0"], "1 sequence or more"),
        (["--params", "1e9", "--seq", "20000000"], "10,000,000"),
        (["--params", "1e9", "--micro-batch", "-1"], "--micro-batch -1"),
        (["tests.planner.zoo:make_tiny", "--layers", "3"], "--params"),
        (["--params", "1e9", "--explain", "ds.json", "--write", "x.json"], "leave out --write"),
        (["--params", "1e9", "--scale", "8", "--html", "x.html"], "leave out --html"),
        (["--params", "1e9", "--scale", "12,20"], "--gpus-per-node"),
        (["--params", "1e9", "--config", "."], "--config .: can't be read"),
        (["--params", "1e9", "--explain", "no.json"], "--explain no.json: no such file"),
        (["--params", "1e9", "--calibration", "."], "--calibration .: can't be read"),
        ([*SMALL, "--checkpointing", "off", "--write", "/nowhere/x"], "--write /nowhere/x: can't be written"),
        ([":make_tiny"], "whole name"),
        (["tests.planner.broken:make"], "RuntimeError: broken when imported"),
        ([], "name a model"),
        (["nowhere/config.json"], "no such file"),
        (["tests.planner.zoo:make_nothing"], "make_tiny"),
        (["no.such.module:f"], "no module"),
        (["--params", "1e9", "--checkpointing", "some"], "reentrant"),
    ],
)
def test_mistakes_are_named_with_what_comes_nearest(args: list[str], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        CliRunner().invoke(plan_app, args, catch_exceptions=False, standalone_mode=False)


def test_mistakes_are_plan_errors() -> None:
    assert issubclass(PlanError, ValueError)
