"""Pipelines, experts and divided sequences on GPUs: losses and norms of each step are those on CPUs.

Both devices run the same functions, NCCL on one and gloo on the other; run by `pytest tests/gpu` where there are two
GPUs or more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.gpu.test_training import BACKEND, GPUS
from tests.parallel import test_pipeline_module as pipeline
from tests.parallel import test_ulysses as sequences
from tests.support.distributed import run_ranks
from tests.support.expert_model import build as build_experts
from tests.support.parallel_model import loss_of, tokens
from zeroshard.parallel.sequence_loader import part_of_batch
from zeroshard.parallel.sequence_loss import mean_over_sequence
from zeroshard.pipeline.module import PipelineModule

pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
STEPS = 3
Steps = list[tuple[float, float]]


def _device(rank: int) -> torch.device:
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


def _config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6}},
        **more,
    }


def _experts(rank: int, world: int, stage: int) -> Steps:
    device, found = _device(rank), Steps()
    mesh = init_device_mesh(device.type, (1, world), mesh_dim_names=("dp_shard", "ep"))
    engine, *_ = zeroshard.initialize(model=build_experts(), config=_config(stage), mesh_param=mesh)
    for step in range(STEPS):
        loss = loss_of(engine, tokens(step, rank).to(device))
        engine.backward(loss)
        engine.step()
        found.append((float(loss.detach()), engine.get_global_grad_norm() or 0.0))
    engine.destroy()
    return found


def _sequences(rank: int, world: int, stage: int) -> Steps:
    device, found, case = _device(rank), Steps(), sequences.Case(world, stage, batch=sequences.PACKED)
    config = _config(stage, sequence_parallel_size=world)
    engine, *_ = zeroshard.initialize(model=sequences._model(case), config=config)
    group = sequences.model_group()
    for step in range(STEPS):
        part = part_of_batch(sequences._batch(case, step, 0), group.rank(), world)
        part = {name: value.to(device) for name, value in part.items()}
        loss = mean_over_sequence(engine(**part, labels=part["shift_labels"]).loss, part["shift_labels"], group)
        engine.backward(loss)
        engine.step()
        found.append((float(loss.detach()), engine.get_global_grad_norm() or 0.0))
    engine.destroy()
    return found


def _moved(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    for (ids, mask), labels in batches:
        yield (ids.to(device), mask.to(device)), labels.to(device)


def _pipeline(rank: int, world: int, stage: int) -> Steps:
    device, found = _device(rank), Steps()
    model = PipelineModule(
        pipeline._layers(), num_stages=world, loss_fn=pipeline._loss, seed_layers=True, partition_method="uniform"
    )
    engine, *_ = zeroshard.initialize(model=model, config=pipeline._config(stage))
    batches = _moved(pipeline._data(0), device)
    for _ in range(STEPS):
        found.append((float(engine.train_batch(batches)), engine.get_global_grad_norm() or 0.0))
    engine.destroy()
    return found


WAYS: dict[str, Callable[[int, int, int], Steps]] = {
    "experts": _experts,
    "sequences": _sequences,
    "pipeline": _pipeline,
}


def _every_stage(rank: int, world: int, way: str) -> list[Steps]:
    return [WAYS[way](rank, world, stage) for stage in range(4)]


@pytest.mark.parametrize("way", WAYS)
def test_an_axis_of_a_model_trains_on_gpus_as_on_cpus(way: str) -> None:
    here = run_ranks(2, _every_stage, way, backend=BACKEND, timeout=200)
    there = run_ranks(2, _every_stage, way, env={"CUDA_VISIBLE_DEVICES": ""}, timeout=200)
    for rank in range(2):
        for stage in range(4):
            for found, expected in zip(here[rank][stage], there[rank][stage], strict=True):
                assert found == pytest.approx(expected, rel=2e-3), (way, stage, rank)
