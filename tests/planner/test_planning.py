"""Rules and arithmetic of the planner, without a model: collectives, advice, scale, estimates, explanations."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from torch import nn

from tests.planner.settings import BF16
from tests.support.distributed import run_ranks
from zeroshard.errors import PlanError
from zeroshard.mesh import Mesh
from zeroshard.plan.placement import Tier
from zeroshard.planner.choose.advice import Situation, advice
from zeroshard.planner.choose.choice import choose
from zeroshard.planner.choose.configs import offload_of, read_config, with_setting
from zeroshard.planner.machine.hardware import Cluster, find_gpu, gpus, parse_cluster
from zeroshard.planner.predict.collectives import Ranks, collective_seconds
from zeroshard.planner.predict.estimates import (
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
)
from zeroshard.planner.predict.links import link_traffic
from zeroshard.planner.predict.rows import Row, Setting, make_row, settings
from zeroshard.planner.predict.scale import bubble, compare, parse_sizes
from zeroshard.planner.predict.tiers import TABLE, Offload
from zeroshard.planner.show.chrome import write_trace
from zeroshard.planner.show.html import report
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.sources import factory_source, sized_source
from zeroshard.planner.trace.workload import Workload

MIB = 2**20


@cache
def _work(samples: int = 1) -> Workload:
    return Workload(sized_source(3e8, 4, 1024), samples, 512)


def _row(cluster: Cluster, stage: int = 3, offload: Offload = Offload.NONE, samples: int = 1, micro: int = 1) -> Row:
    setting = Setting(stage, offload, Checkpointing.OFF)
    return make_row(_work(samples), BF16, setting, cluster, micro_batches=micro)


# Measured bus rates of all-gathers on two H100s, GB/s.
@pytest.mark.parametrize(("mib", "rate"), [(1, 11), (32, 165), (128, 223), (512, 252)])
def test_collectives_take_what_was_measured(mib: int, rate: float) -> None:
    seconds = collective_seconds(parse_cluster("2xH100"), "all-gather", mib * MIB, Ranks(2, 2))
    assert mib * MIB / 2 / seconds / 1e9 == pytest.approx(rate, rel=0.1)


def test_a_ring_over_many_nodes_is_bound_by_its_hops_and_two_levels_are_not() -> None:
    cluster = parse_cluster("16384xH100")
    flat = collective_seconds(cluster, "all-gather", 8 * MIB, Ranks(16384, 8))
    levels = collective_seconds(cluster, "all-gather", 8 * MIB, Ranks(16384, 8), two_levels=True)
    assert flat > 16384 * cluster.efficiency.hop_latency
    assert levels < flat / 5


def test_every_profile_has_a_source_and_is_found_by_its_names() -> None:
    assert {"A100-40GB", "A100-80GB", "H100-80GB", "H200-141GB", "B200-180GB", "L40S-48GB"} <= {g.name for g in gpus()}
    assert all(gpu.source and gpu.hbm and gpu.memory for gpu in gpus())
    assert find_gpu("NVIDIA h100").name == "H100-80GB"
    assert find_gpu("rtx 4090").name == "RTX4090-24GB"
    assert find_gpu("A100").bf16_flops == 312e12
    assert find_gpu("H100").bf16_flops == 989e12


def test_a_stage_that_buys_nothing_and_a_card_without_bf16_are_mentioned() -> None:
    row = _row(parse_cluster("1xV100"), stage=3)
    said = " ".join(advice(Situation(row, [row], 512, 256)))
    assert "saves nothing" in said
    assert "no bf16" in said
    assert "longer than the 256" in said


def test_small_batches_on_large_clusters_are_mentioned() -> None:
    few, many = _row(parse_cluster("64xA100")), _row(parse_cluster("64xA100"), micro=64)
    assert "million tokens" in " ".join(advice(Situation(few, [few], 512, None)))
    assert "million tokens" not in " ".join(advice(Situation(many, [many], 512, None)))


def test_offload_that_is_not_needed_is_mentioned() -> None:
    cluster = parse_cluster("8xA100")
    plain, down = _row(cluster), _row(cluster, offload=Offload.CPU)
    assert "fits without it" in " ".join(advice(Situation(down, [plain, down], 512, None)))


def test_a_row_that_fits_with_room_is_preferred_to_one_that_barely_fits() -> None:
    cluster = parse_cluster("8xA100")
    rows = [_row(cluster, 1), _row(cluster, 3)]
    larger = max(row.total for row in rows)
    barely = replace(cluster, gpu=replace(cluster.gpu, memory=int(larger * 1.01)))
    rows = [replace(row, cluster=barely) for row in rows]
    choice = choose(rows)
    assert choice.row is rows[1]
    assert "to spare" in choice.reasons[rows[0].setting]


def test_a_row_that_is_a_little_faster_is_not_said_to_be_as_fast() -> None:
    cluster = parse_cluster("8xA100")
    best, other = _row(cluster, 3), _row(cluster, 1)
    other = replace(other, time=replace(other.time, seconds=best.time.seconds * 0.995))
    choice = choose([best, other])
    assert choice.row is best
    assert choice.reasons[other.setting].startswith("0.5% faster by the plan, too little to count, and")


def test_offload_moves_state_and_takes_time() -> None:
    cluster = parse_cluster("8xA100")
    rows = {offload: _row(cluster, offload=offload) for offload in TABLE}
    assert rows[Offload.CPU].memory.tiers.device.keys() == {"parameters"}
    assert not rows[Offload.CPU_PARAM].memory.tiers.device
    assert rows[Offload.NVME].disk > 0
    assert rows[Offload.NVME].memory.tiers.device.keys() == {"parameters"}
    times = [rows[offload].time.seconds for offload in TABLE]
    assert times == sorted(times)
    assert link_traffic(rows[Offload.NONE])["PCIe"] == 0
    assert link_traffic(rows[Offload.CPU_PARAM])["PCIe"] > link_traffic(rows[Offload.CPU])["PCIe"] > 0


def test_rows_count_state_and_parameters_where_they_are_and_a_config_says_so() -> None:
    cluster = parse_cluster("8xA100")
    for offload in set(Offload) - {Offload.NONE}:
        row = _row(cluster, offload=offload)
        tiers = row.memory.tiers
        of = {Tier.DEVICE: tiers.device, Tier.HOST: tiers.host, Tier.NVME: tiers.nvme}
        for tier, found in of.items():
            assert ("parameters" in found) == (tier is offload.parameters), (offload, tier)
            assert ("moments" in found) == (tier is offload.states), (offload, tier)
        on_disk = Tier.NVME in (offload.states, offload.parameters)
        assert (link_traffic(row)["disk"] > 0) == on_disk
        assert ("window" in tiers.host) == on_disk
        reads = [span for span in row.time.spans if span.stream == "disk"]
        assert bool(reads) == (offload.parameters is Tier.NVME)
        document = with_setting({}, row.setting)
        assert offload_of(document) is offload
        recipe = read_config({"train_batch_size": 8, **document}, cluster).recipe
        assert recipe.offload is not None
        assert (recipe.offload.tier, recipe.offload.param) == (offload.states, offload.parameters is not Tier.DEVICE)
        assert (recipe.offload.param_tier is Tier.NVME) == (offload.parameters is Tier.NVME)


def test_a_slower_disk_makes_steps_with_parameters_there_longer() -> None:
    fast, slow = parse_cluster("8xA100", disk_gbs=50.0), parse_cluster("8xA100", disk_gbs=0.5)
    times = [_row(cluster, offload=Offload.CPU_NVME_PARAM).time.seconds for cluster in (fast, slow)]
    assert times[1] > times[0]


def test_more_micro_batches_take_as_much_longer_and_an_accumulator() -> None:
    cluster = parse_cluster("8xA100")
    one, four = _row(cluster), _row(cluster, micro=4)
    assert 3 < four.time.seconds / one.time.seconds < 4.2
    assert four.memory.tiers.device["gradients"] == 2 * sum(
        group.layout.shard_numel * 2 for _, group in four.plan.groups()
    )


def test_the_pipeline_bubble_of_the_published_case() -> None:
    assert bubble(8, 16) == pytest.approx(7 / 23)


def test_ways_to_use_a_large_cluster_are_compared() -> None:
    ways = compare(_work(), BF16, parse_cluster("8xH100"), parse_sizes("8,512"), Checkpointing.OFF)
    assert {way.name for way in ways if way.gpus == 512} >= {"ZeRO-3", "HSDP", "hpZ", "ZeRO-1 + tensor + pipeline"}
    by_name = {way.name: way for way in ways if way.gpus == 512}
    assert by_name["hpZ"].memory > by_name["ZeRO-3"].memory
    assert by_name["HSDP"].memory > by_name["ZeRO-3"].memory
    assert by_name["hpZ"].seconds <= by_name["ZeRO-3"].seconds
    assert not by_name["ZeRO-1 + tensor + pipeline"].executed
    for nic, gains in ((1e9, True), (1e13, False)):  # codes pay on slow links, and the table says where they do not
        ways = compare(_work(), BF16, replace(parse_cluster("8xH100"), nic=nic), [64], Checkpointing.OFF)
        by_name = {way.name: way for way in ways}
        codes, plain = by_name["hpZ, qwZ, qgZ"], by_name["hpZ"]
        assert (codes.seconds < plain.seconds) == gains
        assert ("slower with codes here" in codes.remark) != gains
    with pytest.raises(PlanError, match="numbers of GPUs"):
        parse_sizes("8,many")


def test_deepspeeds_estimators_answer_from_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    rows = estimate_zero3_model_states_mem_needs_all_cold(7e9, 131e6, num_gpus_per_node=8)
    plain = next(row for row in rows if row.offload is Offload.NONE)
    assert 7e9 * 14 / 8 < plain.per_gpu < 7e9 * 14 / 8 + 8 * 131e6 * 2
    down = next(row for row in rows if row.offload is Offload.CPU_PARAM)
    assert down.per_host == pytest.approx(7e9 * 14, rel=0.01)  # 2 of the parameter, 2 of its master, 8, 2
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    assert len(estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=2)) == 2
    assert "per host" in capsys.readouterr().out


def test_the_page_needs_no_network_and_names_every_configuration(tmp_path: Path) -> None:
    cluster = parse_cluster("8xA100")
    rows = [make_row(_work(), BF16, setting, cluster) for setting in settings(checkpointing=(Checkpointing.OFF,))]
    page = report(rows, choose(rows), "a <title>", ["a note & more"])
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page
    assert "a &lt;title&gt;" in page
    assert all(row.setting.label in page for row in rows)
    write_trace(tmp_path / "trace.json", rows[-1].time, "a step")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from zeroshard.planner.show.png import write_png

    rows = [_row(parse_cluster("8xA100"))]
    write_png(tmp_path / "plan.png", rows, choose(rows), "a plan")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def _trained_plan(rank: int, world_size: int) -> str:
    import torch

    import zeroshard
    from tests.planner.zoo import WIDTH, Tiny

    model = Tiny()
    _, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), plan=BF16)
    for _ in range(2):
        model(torch.randn(2, WIDTH)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = zeroshard.plan_of(model).to_json()
    zeroshard.close(model)
    return plan


def test_the_plan_is_the_very_one_that_the_engine_trains_by() -> None:
    """So its bytes are what a process holds, to the byte (tests/engine/test_bytes.py)."""
    work = Workload(factory_source("tests.planner.zoo:make_tiny"), 2, 1)
    planned, _ = work.plan(BF16, Mesh.data_parallel(2), Checkpointing.OFF)
    assert run_ranks(2, _trained_plan) == [planned.to_json()] * 2
