"""The log of collectives: calls and bytes per kind and axes are those of the plan, at every stage."""

from __future__ import annotations

import gc
from contextlib import redirect_stdout
from dataclasses import fields
from io import StringIO
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.support.distributed import run_ranks
from tests.test_initialize import CONFIG, loss_of, start, train
from zeroshard.engine.core.handle import handle_of
from zeroshard.errors import UsageError
from zeroshard.mesh import Mesh, MeshAxis
from zeroshard.observe.comms import CommsLog, Counts, since
from zeroshard.observe.memory import by_kind
from zeroshard.plan.memory import StateBytes

WHOLE = {"stage3_param_persistence_threshold": 0}
CASES: list[dict[str, Any]] = [
    *({"zero_optimization": {"stage": stage, **WHOLE}} for stage in range(4)),
    {"zero_optimization": {"stage": 3, **WHOLE}, "gradient_accumulation_steps": 3},
    {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "communication_data_type": "fp32"},
    {"zero_optimization": {"stage": 3, **WHOLE, "zero_quantized_weights": True}},
    {"zero_optimization": {"stage": 3, **WHOLE}, "optimizer": {"type": "Muon", "params": {"lr": 1e-3}}},
    {"zero_optimization": {"stage": 3, **WHOLE}, "optimizer": {"type": "Dion", "params": {"lr": 1e-3}}},
]


def _log_of(engine: Any) -> CommsLog:
    (log,) = (listener for listener in engine._observer._listeners if isinstance(listener, CommsLog))
    return log


def _train(engine: Any, rank: int, steps: int, first: int = 0) -> None:
    """Steps, and all that they sent given to the process groups."""
    for step in range(first, first + steps):
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(loss_of(engine, step, micro, rank))
            engine.step()
    zeroshard.drain(engine.module)


def _two_steps(engine: Any, rank: int) -> Counts:
    """What two steps sent after two others."""
    log = _log_of(engine)
    _train(engine, rank, 2)
    before = log.totals()
    _train(engine, rank, 2, first=2)
    return since(before, log.totals())


def _twice(counts: Counts) -> Counts:
    return {kind: (2 * calls, 2 * nbytes) for kind, (calls, nbytes) in counts.items()}


def _counted(rank: int, world: int) -> list[int]:
    totals = []
    for case in CASES:
        engine, _ = start({**CONFIG, **case, "comms_logger": {"enabled": True}})
        found = _two_steps(engine, rank)
        assert found == _twice(_log_of(engine).planned()) != {}, case
        assert all(axes == ("dp_shard",) for _, axes in found), case
        totals.append(sum(nbytes for _, nbytes in found.values()))
        engine.destroy()
    return totals


def test_the_bytes_of_a_step_are_those_of_the_plan_at_every_stage() -> None:
    first, second = run_ranks(2, _counted)
    assert first == second


def _hybrid(rank: int, world: int) -> None:
    mesh = Mesh((MeshAxis("dp_replicate", 2), MeshAxis("dp_shard", 2)))
    sharded = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=mesh.names)
    config = {**CONFIG, "zero_optimization": {"stage": 3, **WHOLE}, "comms_logger": {"enabled": True}}
    engine, _ = start(config, mesh_param=sharded)
    found = _two_steps(engine, rank)
    assert found == _twice(_log_of(engine).planned())
    assert {("all-gather", ("dp_shard",)), ("all-reduce", ("dp_replicate",))} < found.keys()
    assert ("all-reduce", mesh.names) in found, "the statistics of all ranks"
    engine.destroy()


def _second_copies(rank: int, world: int) -> None:
    zero = {"stage": 3, **WHOLE, "zero_hpz_partition_size": 2}
    for more in ({}, {"zero_quantized_weights": True}):
        config = {**CONFIG, "zero_optimization": {**zero, **more}, "comms_logger": {"enabled": True}}
        engine, _ = start(config)
        found = _two_steps(engine, rank)
        assert found == _twice(_log_of(engine).planned()), more
        gathered = {axes for kind, axes in found if kind == "all-gather"}
        assert gathered == {("dp_replicate",), ("dp_shard",)}, "between the subgroups once, and within them"
        engine.destroy()


def test_gathers_of_second_copies_are_told_apart() -> None:
    run_ranks(4, _second_copies)


def test_a_collective_is_counted_with_the_axes_over_which_it_runs() -> None:
    run_ranks(4, _hybrid)


def _printed(rank: int, world: int) -> str:
    with redirect_stdout(StringIO()) as told:
        _summary()
    return told.getvalue()


def _summary() -> None:
    gc.collect()  # of the engines that other tests left
    with pytest.raises(UsageError, match=r'log_summary: nothing was counted; set "comms_logger"'):
        zeroshard.log_summary()
    asked = {"enabled": True, "prof_all": False, "prof_ops": ["all_gather_into_tensor"], "verbose": True}
    engine, _ = start({**CONFIG, "zero_optimization": {"stage": 3, **WHOLE}, "comms_logger": asked})
    _train(engine, dist.get_rank(), 3)
    with pytest.raises(UsageError, match="counted, not timed"):
        zeroshard.log_summary(show_straggler=True)
    heading, row = zeroshard.log_summary().splitlines()
    assert heading.split()[:4] == ["collective", "over", "calls", "bytes"]
    kind, over, calls, nbytes, _, planned = row.split()
    assert (kind, over) == ("all-gather", "dp_shard")
    assert [int(planned)] == [nbytes for _, nbytes in _log_of(engine).planned().values()]
    sent = handle_of(engine.module).comm.sent.totals()["all-gather"]
    assert (int(calls), int(nbytes)) == sent
    engine.destroy()


def test_the_summary_tells_of_the_kinds_that_are_asked_for_on_rank_0() -> None:
    told, silent = run_ranks(2, _printed)
    assert "collective  over" in told
    assert "step 3: all-gather over dp_shard: " in told
    assert "reduce-scatter" not in told
    assert silent == ""


def test_the_plans_memory_is_told_by_kind_in_every_tier() -> None:
    numbers = {field.name: number for number, field in enumerate(fields(StateBytes), 1)}
    told = by_kind(StateBytes(**numbers))
    moment = {"no_sync", "step", "at_rest"}  # taken for a moment, or a few bytes
    assert sorted(told.values()) == sorted(number for name, number in numbers.items() if name not in moment)


def test_the_memory_in_use_is_printed_with_what_the_plan_put_there(capsys: pytest.CaptureFixture[str]) -> None:
    engine, _ = start({**CONFIG, "memory_breakdown": True, "steps_per_print": 2})
    train(engine, 3)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "memory" in line)
    assert line.startswith("step 2: memory: process ")
    assert "the plan's, in MiB: parameters 0.0, gradients 0.0, " in line
    engine.destroy()
