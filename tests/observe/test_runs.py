"""A run leaves a line of JSON per step, and explain, report and top say of it what is so and nothing else."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.test_initialize import CONFIG, loss_of, start, train
from zeroshard.errors import ConfigError, UsageError, ZeroShardWarning
from zeroshard.launch.cli import app
from zeroshard.observe.metrics.files import RankSamples, Sample, claim, write_samples
from zeroshard.observe.record import StepRecord
from zeroshard.observe.runs.bill import bill, read_prediction
from zeroshard.observe.runs.components import parts_of
from zeroshard.observe.runs.explain import explain
from zeroshard.observe.runs.log import Run, read_run
from zeroshard.observe.runs.report import report
from zeroshard.observe.runs.top import table_of

SECONDS = {"forward": 0.3, "backward": 0.6, "step": 0.05}
STEP = StepRecord(
    step=1,
    samples=8,
    batch=8,
    tokens=None,
    loss=2.0,
    norm=1.0,
    applied=True,
    skipped=0,
    rates=[0.1],
    scale=None,
    seconds=SECONDS,
    whole=1.0,
    ended=0.0,
)


def steady(steps: int = 100, **changed: StepRecord) -> Run:
    """A run of equal steps, but for those that are given as s12=record."""
    found = [changed.get(f"s{number}", STEP) for number in range(1, steps + 1)]
    numbered = tuple(replace(step, step=number, samples=8 * number) for number, step in enumerate(found, 1))
    return Run(2, {"all-gather over dp_shard": 96}, {"parameters": 10}, numbered, ())


def slower(part: str, seconds: float) -> StepRecord:
    """A step in which one part takes so much longer."""
    assert STEP.whole is not None
    more = {**SECONDS, part: SECONDS[part] + seconds} if part in SECONDS else SECONDS
    return replace(STEP, seconds=more, whole=STEP.whole + seconds)


def test_each_step_leaves_a_line_and_a_run_that_goes_on_adds_its_own(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run.jsonl"
    config = {
        **CONFIG,
        "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
        "run_log": {"path": str(path)},
    }
    engine, _ = start(config)
    train(engine, 2)
    engine.save_checkpoint(tmp_path)
    engine.backward(loss_of(engine, 2) * math.inf)
    engine.step()
    engine.destroy()
    engine, _ = start(config)
    engine.load_checkpoint(tmp_path)
    train(engine, 2, first=2)
    engine.destroy()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines if "step" in line] == [1, 2, 3, 3, 4]
    assert [line["disk"] for line in lines if "disk" in line] == ["save", "load"]
    assert [line["loss"] for line in lines if not line.get("applied", True)] == ["inf"]
    run = read_run(path)
    assert [step.step for step in run.steps] == [1, 2, 3, 4]
    assert all(step.applied and math.isfinite(step.loss or math.nan) for step in run.steps), "step 3 was made again"
    assert [step.samples for step in run.steps] == [4, 8, 12, 16]
    assert (run.ranks, len(run.saves), run.memory["parameters"] > 0) == (1, 1, True)
    path.write_text(path.read_text() + '{"step": 5, "sam')
    assert len(read_run(path).steps) == 4, "torn by a kill"


def test_a_run_goes_on_behind_a_line_that_was_torn(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    config = {**CONFIG, "run_log": {"path": str(path)}}
    for torn in ('{"step": 9, "sam', "", '{"zeroshard_ru'):
        path.unlink(missing_ok=True)
        for first in (0, 2):
            engine, _ = start(config)
            train(engine, 2, first=first)
            engine.destroy()
            written = path.read_text()
            path.write_text(written + torn)
        assert len(read_run(path).steps) == 2, "both have made steps 1 and 2"
        assert "\n\n" not in written
        begins = [line for line in path.read_text().splitlines() if line.startswith('{"zeroshard_run"')]
        assert len(begins) == 2


def test_a_disk_that_is_full_ends_the_log_and_not_the_training(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = start({**CONFIG, "run_log": {"path": "/dev/full"}})
    train(engine, 3)
    engine.destroy()
    assert [one.message for one in caplog.records if "run_log" in one.message] == [
        "run_log.path: /dev/full gets no more lines: [Errno 28] No space left on device"
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("whole", "long"),
        ("whole", "nan"),
        ("seconds", {"forward": None}),
        ("waits", {"forward": None}),
        ("loss", []),
        ("device_waits", {"forward": 1.0}),
        ("rates", 0.1),
        ("skipped", None),
        ("samples", 2.5),
        ("applied", 1),
    ],
)
def test_a_line_with_values_that_no_run_writes_is_named(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "run.jsonl"
    line = {**vars(STEP), "tokens": 3}
    path.write_text(json.dumps(line) + "\n" + json.dumps({**line, "step": 2, name: value}) + "\n")
    with pytest.raises(UsageError, match=rf"run\.jsonl, line 2 is no line of a run's log: {name} can't be "):
        read_run(path)
    short = {key: kept for key, kept in line.items() if key != name}
    path.write_text(json.dumps(short) + "\n")
    if name in ("seconds", "waits", "device_waits", "rates"):
        run = read_run(path)
        assert list(explain(run))
        assert report(run, "run")
    else:
        with pytest.raises(UsageError, match=f"line 1 is no line of a run's log: {name} is missing"):
            read_run(path)


@pytest.mark.parametrize(
    "begin", [{"ranks": None}, {"ranks": 0}, {"sent": {"all-gather": "many"}}, {"memory": 3}, {"disk": "save"}]
)
def test_a_line_that_begins_with_values_that_no_run_writes_is_named(tmp_path: Path, begin: dict[str, object]) -> None:
    path = tmp_path / "run.jsonl"
    head = begin if "disk" in begin else {"zeroshard_run": 1, **begin}
    path.write_text(json.dumps(head) + "\n" + json.dumps(vars(STEP)) + "\n")
    with pytest.raises(UsageError, match="line 1 is no line of a run's log"):
        read_run(path)


def test_steps_that_took_no_time_are_no_times() -> None:
    none = replace(STEP, seconds={}, whole=0.0)
    assert not [line for line in explain(steady(3, s1=none, s2=none, s3=none)) if "%" in line]


def test_a_log_that_another_engine_writes_to_is_told(tmp_path: Path) -> None:
    config = {**CONFIG, "run_log": {"path": str(tmp_path / "run.jsonl")}}
    first, _ = start(config)
    with pytest.warns(ZeroShardWarning, match=r"run_log\.path: .*another engine writes to it, too"):
        second, _ = start(config)
    first.destroy()
    second.destroy()
    third, _ = start(config)  # no warning, which would be an error here
    third.destroy()


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for text, words in (("", "no step is in it"), ("[1]\n", "line 1 is no line"), ("x\n{}\n", "line 1 is no line")):
        path.write_text(text)
        with pytest.raises(UsageError, match=words):
            read_run(path)
    with pytest.raises(UsageError, match="can't be read as the log of a run"):
        read_run(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"run_log\.path: .* can't be written: "):
        start({**CONFIG, "run_log": {"path": str(tmp_path)}})


def test_the_parts_of_a_step_sum_up_to_it() -> None:
    assert sum(parts_of(STEP).values()) == pytest.approx(1.0)
    lines = list(explain(steady()))
    shares = [float(found[1]) for line in lines if (found := re.search(r"([\d.]+)%$", line))]
    assert sum(shares) == pytest.approx(100.0, abs=0.3)
    assert "a step takes 1000.00 ms (mean without the first one):" in lines
    assert "the plan sends 96 bytes in a step: all-gather over dp_shard" in lines


def test_a_steady_run_is_told_of_no_fault() -> None:
    text = "\n".join(explain(steady()))
    assert not re.search("slow|usual|not applied|inf|checkpoints", text)


@pytest.mark.parametrize("part", ["forward", "backward", "step", "between"])
def test_a_slow_step_is_put_down_to_the_part_that_grew(part: str) -> None:
    lines = list(explain(steady(s17=slower(part, 2.0), s40=slower(part, 5.0))))
    place = lines.index("2 steps took more than 1.5 times the usual 1000.00 ms:")
    assert re.fullmatch(rf"  2 by {part} \(.+\): steps 17, 40", lines[place + 1])


@pytest.mark.parametrize("part", ["backward", "between"])
def test_a_run_that_becomes_slower_says_by_which_part(part: str) -> None:
    late = {f"s{number}": slower(part, 0.2) for number in range(80, 101)}
    (line,) = (line for line in explain(steady(**late)) if "tenth" in line)
    assert line.startswith(f"the last tenth is 20% slower than the first, most of it {part} (")


def test_what_is_odd_is_told_with_its_first_step() -> None:
    odd = {
        "s30": replace(STEP, applied=False, loss=math.nan, norm=math.inf, skipped=1),
        "s31": replace(STEP, norm=50.0),
    }
    text = "\n".join(explain(replace(steady(**odd), saves=(2.0, 4.0))))
    assert "1 steps were not applied, the first is 30" in text
    assert "1 losses were inf or NaN, the first in step 30" in text
    assert "1 gradient norms were above 10 times the usual 1, the first in step 31" in text
    assert "2 checkpoints were saved, each kept training for 3000.00 ms" in text


def test_the_bill_beside_the_plans_prediction_adds_up_to_the_gap(tmp_path: Path) -> None:
    arguments = ["plan", "--params", "2e8", "--layers", "2", "--hidden", "1024", "--seq", "256", "--cluster", "2xH100"]
    told = CliRunner().invoke(app, [*arguments, "--checkpointing", "off", "--json"], catch_exceptions=False).output
    path = tmp_path / "plan.json"
    path.write_text(told)
    for stage, row in ((None, next(r for r in json.loads(told)["rows"] if r["chosen"])), (3, None)):
        predicted = read_prediction(path, stage)
        assert row is None or predicted.whole == pytest.approx(row["step_seconds"])
        assert min(predicted.passes, predicted.optimizer) > 0
        waited = replace(STEP, waits={"forward": {"all-gather": 0.04}, "backward": {"reduce-scatter": 0.02, "gc": 0.1}})
        unknown = replace(steady(), device="cuda")
        for run, waiting in ((steady(), "0.00"), (replace(unknown, steps=(waited,)), None), (unknown, None)):
            *_, between, whole = lines = list(bill(run, predicted))[2:]
            gaps = [float(line.split()[-2]) for line in lines]
            assert sum(gaps[:-1]) == pytest.approx(gaps[-1], abs=0.05)
            assert [line.split()[1] for line in lines if "waiting" in line] == ([waiting] if waiting else [])
        timed = replace(unknown, steps=(replace(waited, device_waits=waited.waits, waits={}),))
        assert [line.split()[1] for line in bill(timed, predicted) if line.startswith("  waiting")] == ["60.00"]
        assert whole.split()[:2] == ["step", "1000.00"]
        assert between.split()[1:7:2] == ["50.00", "0.00", "+50.00"]
    with pytest.raises(UsageError, match="no row of stage 7"):
        read_prediction(path, 7)
    path.write_text("{}")
    with pytest.raises(UsageError, match="not what zeroshard plan --json prints"):
        read_prediction(path, None)


def test_the_report_is_one_page_that_shows_a_spike_of_one_step_in_a_long_run() -> None:
    page = report(steady(3000, s1234=replace(STEP, norm=77.0)), "<run>")
    assert "&lt;run&gt;" in page
    assert not re.search(r"<script|https?://", page)
    assert page.count("<figure>") == 6, "there is no loss scale, and nothing is drawn of it"
    assert ">77</text>" in page
    assert all(len(points.split()) <= 300 for points in re.findall(r"polyline points='([^']+)'", page))
    assert "nan" not in report(steady(s5=replace(STEP, loss=math.nan)), "run")


def test_top_shows_each_rank_of_the_node(tmp_path: Path) -> None:
    samples = (
        Sample("zeroshard_steps_total", {}, 12.0),
        Sample("zeroshard_loss", {}, 2.25),
        Sample("zeroshard_memory_bytes", {"kind": "process"}, 2.0**31),
        Sample("zeroshard_last_step_timestamp_seconds", {}, 1000.0),
    )
    write_samples(claim(tmp_path)[0], RankSamples("job", 5, samples))
    console = Console(width=140, record=True)
    console.print(table_of(tmp_path, now=1042.0))
    (row,) = (line for line in console.export_text().splitlines() if " job " in line)
    assert re.sub(r"\s*│\s*", "|", row).strip("|") == "job|5|12|-|2.25|-|-|-|2.00 GiB|42 s ago"


def test_the_commands_read_the_log(tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, list(arguments))

    path = tmp_path / "run.jsonl"
    engine, _ = start({**CONFIG, "run_log": {"path": str(path)}})
    train(engine, 3)
    engine.destroy()
    assert "3 steps on 1 ranks, 12 samples" in run("explain", str(path)).output
    page = tmp_path / "page.html"
    assert run("report", str(path), "-o", str(page)).exit_code == 0
    assert "<figure>" in page.read_text()
    assert "zeroshard on this node" in run("top", "--once", "--directory", str(tmp_path / "metrics")).output
    assert isinstance(run("explain", str(tmp_path / "none")).exception, UsageError)
