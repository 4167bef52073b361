"""The rows of the scaling benchmark, and what it makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import compare, scaling
from benchmarks.report import Outcome, add_ratios


def _rows(*argv: str) -> list[str]:
    args = scaling.parse([*argv, "--gpus", "1", "2", "4"])
    return scaling.requests_of(args)


def test_every_size_is_measured_beside_the_floor_of_one_gpu_the_most_gpus_first() -> None:
    rows = _rows("--sizes", "1b", "--engines", "zeroshard3", "zeroshard2", "fsdp2", "deepspeed3")
    eager, compiled = rows[: rows.index("floor --size 1b --compile --nproc 1")], rows[-7:]
    assert eager == [
        "floor --size 1b --nproc 1",
        *(f"zeroshard3 --size 1b --plan --nproc {count}" for count in (4, 2, 1)),
        *(f"zeroshard2 --size 1b --plan --nproc {count}" for count in (4, 2)),
        *(f"{engine} --size 1b --nproc {count}" for engine in ("fsdp2", "deepspeed3") for count in (4, 2, 1)),
    ]
    assert [row.split()[0] for row in compiled] == ["floor", *["zeroshard3"] * 3, *["fsdp2"] * 3]
    assert scaling.rows_of("1b", [2, 2], ["fsdp2"]) == scaling.rows_of("1b", [2], ["fsdp2"])


def test_what_one_gpu_cannot_hold_is_not_asked_of_it() -> None:
    rows = _rows("--sizes", "13b")
    assert {row.split()[0] for row in rows} == {"floor", "zeroshard3", "fsdp2", "deepspeed3"}
    assert [row for row in rows if row.endswith("--nproc 1")] == rows[:1]
    assert all("--checkpointing" in row for row in rows)
    assert not any("--compile" in row for row in rows)


def test_a_row_says_what_it_keeps_of_the_floor_and_what_was_predicted() -> None:
    setting: dict[str, Any] = {
        "size": "1b",
        "batch": 4,
        "length": 2048,
        "accumulation": 1,
        "checkpointing": False,
        "compiled": False,
        "tuned": False,
        "graph": False,
        "mfu": 0.5,
        "allocated_gib": 20.0,
        "reserved_gib": 21.0,
    }
    floor = Outcome("floor", {**setting, "engine": "floor", "world": 1, "step_s": 0.10, "tokens_s": 81920})
    planned = {"step_s": 0.107, "allocated_gib": 19.5}
    row = {**setting, "engine": "zeroshard3", "world": 4, "step_s": 0.125, "tokens_s": 65536, "planned": planned}
    ours, missing = Outcome("zeroshard3", row), Outcome("fsdp2 --size 1b", error="left out")
    add_ratios([floor, ours, missing], compare.SETTING)
    cells = dict(zip(range(len(scaling.COLUMNS)), scaling.cells(ours), strict=True))
    assert [cells[column] for column in (2, 4, 5, 6, 9)] == ["4", "0.1070", "65536", "80.0%", "19.50"]
    text = scaling.markdown(
        [floor, ours, missing], {"commit": "c", "card": "x", "torch": "t", "date": "d", "command": "e"}
    )
    assert "| fsdp2 | --size 1b | left out |" in text


def test_gpus_are_the_powers_of_two_that_there_are() -> None:
    assert [scaling.powers(count) for count in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2], [1, 2, 4, 8]]


def test_cards_that_are_not_here_are_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    args = scaling.parse(["--predict", "H200-141GB", "--sizes", "1b", "--gpus", "1", "8"])
    assert scaling.predict(args) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    eager = {(row[0].strip("| "), int(row[2])): row for row in rows if row[1].endswith("eager")}
    assert set(eager) == {("floor", 1), ("zeroshard3", 8), ("zeroshard3", 1), ("zeroshard2", 8), ("zeroshard1", 8)}
    assert float(eager["zeroshard3", 8][6].rstrip(" |")) < float(eager["zeroshard3", 1][6].rstrip(" |")), "GiB"
    assert scaling.predict(scaling.parse(["--predict", "nothing"])) == 2
