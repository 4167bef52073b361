"""What the operation log promises: the same digest for the same sequence, everywhere, and exact totals."""

from __future__ import annotations

import json
import subprocess
import sys
import timeit

from zeroshard.comm.divergence import behind, explain, explain_digests, find_divergence, name_ranks
from zeroshard.comm.oplog import RING_SIZE, LogTail, Operation, OperationLog


def _log(*units: str, kind: str = "all-gather", nbytes: int = 64) -> OperationLog:
    log = OperationLog()
    for unit in units:
        log.record(kind, unit, nbytes)
    return log


def test_digest_is_the_same_in_another_process_with_other_hash_salt() -> None:
    code = (
        "from zeroshard.comm.oplog import OperationLog\nlog = OperationLog()\n"
        "for unit in 'ab': log.record('all-gather', unit, 64)\nprint(log.digest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert digests == {f"{_log('a', 'b').digest()}\n"}


def test_digest_tells_order_kind_unit_and_size_apart() -> None:
    logs = [
        _log("a", "b"),
        _log("b", "a"),
        _log("a"),
        _log("a", "b", kind="reduce-scatter"),
        _log("a", "b", nbytes=65),
        _log("a", "a"),
    ]
    assert len({log.digest() for log in logs}) == len(logs)
    assert all(0 <= log.digest() < 1 << 63 for log in logs)


def test_tail_keeps_the_last_operations_and_their_numbers() -> None:
    log = _log(*(str(i) for i in range(1, RING_SIZE + 101)))
    tail = log.tail()
    assert (tail.count, tail.first) == (RING_SIZE + 100, 101)
    assert [operation.unit for operation in tail.operations] == [str(i) for i in range(101, RING_SIZE + 101)]
    assert [operation.unit for operation in log.tail(2).operations] == [str(RING_SIZE + 99), str(RING_SIZE + 100)]
    assert _log().tail().operations == ()


def test_tail_survives_json() -> None:
    tail = _log("a", "b", "a").tail()
    assert LogTail.from_json(json.loads(json.dumps(tail.to_json()))) == tail


def test_totals_count_calls_and_bytes_per_kind() -> None:
    log = _log("a", "b", "a", nbytes=10)
    log.record("all-reduce", "norm", 8)
    digest = log.digest()
    assert log.totals() == {"all-gather": (3, 30), "all-reduce": (1, 8)}
    log.reset_totals()
    assert log.totals() == {}
    assert (log.digest(), log.count) == (digest, 4)
    log.record("all-gather", "a", 10)
    assert log.totals() == {"all-gather": (1, 10)}


def test_recording_is_cheap() -> None:
    log = _log("a")
    seconds = min(timeit.repeat(lambda: log.record("all-gather", "a", 64), number=10_000, repeat=7)) / 10_000
    assert seconds < 5e-6  # 0.5 us on an idle core; the margin is for a busy machine


def test_a_shorter_log_is_behind_and_not_divergent() -> None:
    tails = {0: _log("a", "b", "c").tail(), 1: _log("a", "b").tail(), 2: _log().tail()}
    assert find_divergence(tails) is None
    assert behind(tails) == {1: Operation("all-gather", "b", 64), 2: None}


def test_explanation_names_operation_units_and_ranks() -> None:
    tails = {0: _log("a", "b").tail(), 1: _log("a", "c", "b").tail(), 2: _log("a", "b", "d").tail()}
    found = find_divergence(tails)
    assert found is not None
    assert explain(found).startswith(
        "ranks 0, 2 issued all-gather of unit b as operation 2 where rank 1 issued all-gather of unit c."
    )


def test_explanation_of_equal_units_names_the_sizes() -> None:
    found = find_divergence({0: _log("a", nbytes=4).tail(), 1: _log("a", nbytes=8).tail()})
    assert found is not None
    assert "unit a (4 bytes) as operation 1 where rank 1 issued all-gather of unit a (8 bytes)" in explain(found)


def test_digests_of_different_lengths_are_explained() -> None:
    text = explain_digests({0: _log("a", "b").tail(), 1: _log("a").tail()})
    assert text.startswith("rank 1 issued fewer collectives than the others in the same step: rank 1 stopped at")


def test_ranks_are_named_as_ranges() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 0, 1, 2]) == "ranks 0-2, 5"
