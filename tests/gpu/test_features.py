"""What the rest of the tests show on a CPU holds on GPUs: each training gives there what it gives on the CPU.

For every optimizer, precision, tier and call that a config or a script may ask for a small language model is trained
twice, on GPUs, and on CPUs where no GPU is seen. Both draw the same batches; sums come in another order, so results
are close, not equal: equal bits are promised between stages on one device (see test_training.py).

Run by `pytest tests/gpu` on a machine with GPUs; one group of processes runs all cases of a device.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import zeroshard
from tests.gpu.test_training import BACKEND, GPUS
from tests.support.distributed import run_ranks
from tests.support.models import Batch, Transformer
from zeroshard.engine.engine import Engine

pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
STEPS = 4
FOLDER = "the folder of the case"
"""Stands in configs for a folder that is known when a case runs."""
Between = Callable[[Engine, Path], Engine]


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        config: beside BASE; dicts are merged.
        between: what happens after the second step; returns the engine that goes on.
        far: how far losses may be from each other, as a share of them; None skips the comparison of parameters too.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    between: Between | None = None
    far: float = 1e-4


BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def _optimizer(kind: str, stage: int = 3, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}, "zero_optimization": {"stage": stage}}


def _zero(stage: int = 3, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


def _offload(param: bool, ratio: float = 1.0, pin: bool = True) -> dict[str, Any]:
    state = {"device": "cpu", "pin_memory": pin}
    away = {"offload_param": state} if param else {}
    return _zero(offload_optimizer={**state, "ratio": ratio}, **away)


def _offload_to_disk(param: bool, **shares: float) -> dict[str, Any]:
    files = {"device": "nvme", "nvme_path": FOLDER}
    away = {"offload_param": files} if param else {}
    return _zero(offload_optimizer={**files, **shares}, **away)


# What happens amid a training.


def _other_stage(engine: Engine, folder: Path) -> Engine:
    engine.save_checkpoint(str(folder), tag="middle")
    stage = 1 if any(unit.sharded for unit in engine.plan.units) else 3
    engine.destroy()
    engine = _start(_merged(BASE, _zero(stage)))
    engine.load_checkpoint(str(folder), tag="middle")
    return engine


def _in_background(engine: Engine, folder: Path) -> Engine:
    engine.save_checkpoint(str(folder), tag="middle", background=True)
    _step(engine, 9)  # goes on while the files are written, and is undone by the load
    engine.wait_for_checkpoint()
    engine.load_checkpoint(str(folder), tag="middle")
    return engine


def _weights_files(engine: Engine, folder: Path) -> Engine:
    engine.save_16bit_model(str(folder))
    return engine


def _gathered(engine: Engine, folder: Path) -> Engine:
    embedding = engine.module.embedding.weight
    with torch.no_grad(), zeroshard.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        embedding[3] = 0.25
        embedding.mul_(1.5)
    return engine


def _safe(engine: Engine, folder: Path) -> Engine:
    for parameter in engine.module.parameters():
        whole = zeroshard.safe_get_full_fp32_param(parameter)
        assert whole is not None
        zeroshard.safe_set_full_fp32_param(parameter, whole * 0.9)
        moment = zeroshard.safe_get_full_optimizer_state(parameter, "exp_avg")
        assert moment is not None
        zeroshard.safe_set_full_optimizer_state(parameter, moment * 0.5, "exp_avg")
        zeroshard.safe_set_local_fp32_param(parameter, zeroshard.safe_get_local_fp32_param(parameter) + 0.01)
    return engine


def _out_and_in(engine: Engine, folder: Path) -> Engine:
    engine.offload_states()
    engine.reload_states()
    return engine


def _lends_memory(engine: Engine, folder: Path) -> Engine:
    engine.offload_states(include=["optim_states", "hp_params"])
    engine.reload_states()
    return engine


def _evaluates(engine: Engine, folder: Path) -> Engine:
    engine.eval()
    with torch.no_grad():
        _loss(engine, Batch(100, 0, 0))
    engine.train()
    return engine


CASES: dict[str, Case] = {
    **{f"stage {stage}": Case(_zero(stage)) for stage in range(4)},
    **{
        kind: Case(_optimizer(kind, **params))
        for kind, params in {
            "Adam": {"lr": 1e-3, "eps": 1e-6},
            "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
            "Adagrad": {"lr": 1e-2, "eps": 1e-6},
            "RMSprop": {"lr": 1e-4, "eps": 1e-4, "momentum": 0.9, "centered": True},
            "Lamb": {"lr": 1e-3, "eps": 1e-6},
        }.items()
    },
    "Lion": Case(_optimizer("Lion", lr=1e-4), far=1e-3),  # signs of gradients that are nothing but roundings
    "Muon": Case(_optimizer("Muon", lr=1e-3), far=1e-2),  # orthogonalized in bf16
    "Dion": Case(_optimizer("Dion", lr=1e-3), far=1e-2),  # small directions of the momentum turn with its last digits
    "AdamW at stage 1": Case({**_optimizer("AdamW", 1, lr=1e-3, eps=1e-6), "bf16": {"enabled": True}}, far=2e-2),
    **{
        kind: Case({**_optimizer(kind, stage, lr=1e-4, eps=1e-3, **params), "gradient_clipping": 0.0}, far=1e-2)
        for kind, stage, params in (
            ("OneBitAdam", 1, {"freeze_step": 2}),
            ("OneBitLamb", 1, {"freeze_step": 2}),
            ("ZeroOneAdam", 0, {"var_freeze_step": 2}),
        )
    },
    "bf16": Case({"bf16": {"enabled": True}}, far=2e-2),
    "fp16": Case({"fp16": {"enabled": True, "initial_scale_power": 8}}, far=1e-2),
    "fp16 that overflows": Case({"fp16": {"enabled": True, "initial_scale_power": 15, "hysteresis": 1}}, far=1e-2),
    "autocast": Case({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, far=2e-2),
    "float32 gradients of bf16": Case(
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "gradient_accumulation_steps": 2},
        far=2e-2,
    ),
    "sent in float32": Case({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, far=2e-2),
    "accumulation": Case({"gradient_accumulation_steps": 3}),
    "accumulation at stage 1": Case({"gradient_accumulation_steps": 3, **_zero(1)}),
    "no clipping, summed": Case({"gradient_clipping": 0.0, "gradient_allreduce_op": "sum"}),
    "overlap": Case(_zero(overlap_comm=True)),
    "overlap at stage 2": Case(_zero(2, overlap_comm=True)),
    "persistent": Case(_zero(stage3_param_persistence_threshold=10_000)),
    "kept gathered": Case(_zero(stage3_max_reuse_distance=10**9, stage3_max_live_parameters=10**9)),
    "a schedule": Case(
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 6}}}
    ),
    "checkpointed blocks": Case({"activation_checkpointing": {"policy": "full"}}),
    "checkpointed blocks rest on the host": Case(
        {"activation_checkpointing": {"policy": "full", "cpu_checkpointing": True}}
    ),
    "selective checkpointing": Case({"activation_checkpointing": {"policy": "selective"}}),
    "state on the host": Case(_offload(False)),
    "state and parameters on the host": Case(_offload(True)),
    "half of the state on the host": Case(_offload(False, ratio=0.5, pin=False)),
    "state on the host, bf16": Case({**_offload(True), "bf16": {"enabled": True}}, far=2e-2),
    "state on the host, accumulated": Case({**_offload(False), "gradient_accumulation_steps": 2}),
    "state on disk": Case(_offload_to_disk(False)),
    "state and parameters on disk": Case(_offload_to_disk(True)),
    "state and parameters on disk, bf16, accumulated": Case(
        {**_offload_to_disk(True), "bf16": {"enabled": True}, "gradient_accumulation_steps": 2}, far=2e-2
    ),
    "state on the GPU, the host and disk": Case(_offload_to_disk(False, ratio=0.7, cpu_ratio=0.4)),
    "goes on from disk": Case(_offload_to_disk(True), between=_other_stage),
    "state on the host at stage 2": Case(_zero(2, offload_optimizer={"device": "cpu"})),
    "goes on at stage 1": Case(between=_other_stage),
    "goes on from stage 1": Case(_zero(1), between=_other_stage),
    "goes on from the host": Case(_offload(True), between=_other_stage),
    "saved in the background": Case(between=_in_background),
    "saved in the background, state on the host": Case(_offload(True), between=_in_background),
    "one file of weights": Case(between=_weights_files),
    "changed while gathered": Case(between=_gathered),
    "changed while gathered, at stage 2": Case(_zero(2), between=_gathered),
    "changed while gathered, on the host": Case(_offload(True), between=_gathered),
    "changed by safe_set": Case(between=_safe),
    "changed by safe_set, at stage 1": Case(_zero(1), between=_safe),
    "changed by safe_set, on the host": Case(_offload(True), between=_safe),
    "states go and come": Case(between=_out_and_in),
    "some states go and come": Case(_zero(1), between=_lends_memory),
    "an evaluation": Case(between=_evaluates),
}


@dataclass
class Result:
    """What a case gave on rank 0: per micro-batch losses, and all parameters; or why it gave nothing."""

    losses: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    problem: str = ""


Results = dict[str, Result]


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Configs on top of each other; an optimizer replaces the other one whole."""
    merged = dict(one)
    for key, value in other.items():
        inner = key != "optimizer" and isinstance(value, Mapping)
        merged[key] = _merged(merged.get(key, {}), value) if inner else value
    return merged


def _start(config: Mapping[str, Any]) -> Engine:
    torch.manual_seed(0)
    model = Transformer(tied=True)
    engine, *_ = zeroshard.initialize(model=model, config=json.loads(json.dumps(config)))
    return engine


def _loss(engine: Engine, batch: Batch) -> torch.Tensor:
    tokens = batch.tokens().to(engine.device)
    logits = engine(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def _step(engine: Engine, step: int) -> list[float]:
    losses: list[float] = []
    rank = torch.distributed.get_rank()
    for micro in range(engine.gradient_accumulation_steps()):
        loss = _loss(engine, Batch(step, micro, rank))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def _train(case: Case, folder: Path) -> Result:
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(json.dumps(_merged(BASE, case.config)).replace(FOLDER, str(folder)))
    engine, losses = _start(config), []
    for step in range(STEPS):
        if step == 2 and case.between is not None:
            engine = case.between(engine, folder)
        losses += _step(engine, step)
    whole = {name: value.float().cpu() for name, value in zeroshard.iterate_full_parameters(engine.module)}
    engine.destroy()
    return Result(losses, whole)


def _train_from(rank: int, world: int, directory: str, start: int) -> Results:
    """The cases from number `start` on, up to the first that fails: ranks may be in different places after it."""
    results: Results = {}
    for number, (name, case) in enumerate(CASES.items()):
        if number < start:
            continue
        try:
            results[name] = _train(case, Path(directory) / str(number))
        except Exception:
            results[name] = Result(problem=traceback.format_exc())
            break
    return results


def _train_all(world: int, directory: Path, **options: Any) -> Results:
    """All cases by name, on rank 0; new processes go on behind a case that failed."""
    results: Results = {}
    while len(results) < len(CASES):
        results |= run_ranks(world, _train_from, str(directory), len(results), timeout=400, **options)[0]
    return results


@pytest.fixture(scope="module", params=sorted({1, GPUS}))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Results]:
    """All cases by name, trained on GPUs and on CPUs."""
    here = _train_all(request.param, tmp_path_factory.mktemp("gpu"), backend=BACKEND)
    return here, _train_all(request.param, tmp_path_factory.mktemp("cpu"), env={"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize("name", CASES)
def test_a_gpu_trains_as_the_cpu_does(name: str, trained: tuple[Results, Results]) -> None:
    here, there = (results[name] for results in trained)
    assert not here.problem, here.problem
    assert not there.problem, f"on the CPU: {there.problem}"
    far = CASES[name].far
    assert here.losses == pytest.approx(there.losses, rel=far)
    assert len(set(here.losses)) > 1
    assert set(here.parameters) == set(there.parameters)
    for parameter, value in there.parameters.items():
        distance = float((here.parameters[parameter] - value).norm())
        assert distance <= 10 * far * float(value.norm()) + 1e-6, f"{parameter}: {distance}"
