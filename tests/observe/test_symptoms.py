"""Each symptom of the troubleshooting page has tests that provoke it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HINTS, FAULTS, FINDINGS = "launch/test_hints.py", "observe/test_faults.py", "observe/test_findings.py"
PROVOKED = {
    "out of memory while the model is built": (HINTS, "test_a_full_gpu_is_told_with_its_figures_and_the_place"),
    "out of memory in a step": (HINTS, "test_a_full_gpu_is_told_with_its_figures_and_the_place"),
    "out of memory in a save": (HINTS, "test_a_full_gpu_is_told_with_its_figures_and_the_place"),
    "memory is reserved and not used": (HINTS, "test_fragmentation_is_told_from_memory_that_is_full"),
    "a rank is killed": (FAULTS, "lost"),
    "the loss is NaN": (FAULTS, "nan"),
    "every step overflows in float16": (FAULTS, "overflow"),
    "the norm or the loss has a spike": (FAULTS, "spike"),
    "the loss is worse after a resume": (FAULTS, "resume"),
    "one rank is slow": (FAULTS, "tokens"),
    "waiting for data": (FAULTS, "loader"),
    "state on disk is slow": (FAULTS, "disk"),
    "the bandwidth between ranks is low": (FINDINGS, "test_what_slows_down_all_ranks_names_none_of_them"),
    "the optimizer's step on the host is slow": (
        "optim/test_host_kernel.py",
        "test_without_the_library_the_twin_runs_and_a_warning_says_why",
    ),
    "slower than planned": (
        "observe/test_runs.py",
        "test_the_bill_beside_the_plans_prediction_adds_up_to_the_gap",
    ),
    "saves take long": (FAULTS, "saving"),
    "host memory grows": (FAULTS, "leak"),
    "a run hangs": ("comm/test_watchdog.py", "test_a_block_skipped_on_one_rank_ends_within_ten_seconds"),
    "an export runs out of memory": (
        "checkpoint/test_export.py",
        "test_export_and_import_need_memory_for_two_of_the_largest_tensors",
    ),
    "transformers can't load a checkpoint": (
        "checkpoint/test_export.py",
        "test_transformers_loads_an_export_and_ties_it_again",
    ),
    "slow for no reason in the program": (
        "planner/test_surroundings.py",
        "test_variables_that_slow_a_run_are_named_with_what_they_do",
    ),
}


def test_each_symptom_of_the_page_is_provoked_by_a_test() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.partition("## Symptoms")[2].partition("\n## ")[0]
    symptoms = [row[1] for row in re.finditer(r"^\| ([^|]+) \|", table, re.MULTILINE)]
    assert symptoms[1:] == list(PROVOKED), "the first one is the head of the table"
    for file, name in PROVOKED.values():
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert (f"def {name}(" if name.startswith("test_") else f'small("{name}"') in text, f"{file} has no {name}"
