"""DeepSpeed's PipelineModule: scripts with its names train as one process does, under each of torch's schedules."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.errors import ConfigError, PlanError, UsageError, ZeroShardError
from zeroshard.pipeline.layers import LayerSpec, TiedLayerSpec
from zeroshard.pipeline.module import PipelineModule
from zeroshard.pipeline.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

WHOLE_MATRIX = os.environ.get("ZEROSHARD_ALL_MESHES") == "1"
WIDTH, MICRO = 16, 4
State = dict[str, torch.Tensor]
Batch = tuple[Any, Any]


class Block(nn.Module):
    """Hands on what it computed, and beside it what it was given second as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, mask = inputs
        return x + self.down(F.gelu(self.up(self.norm(x)))) * mask.unsqueeze(-1).to(x.dtype), mask


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return F.embedding(inputs[0], self.weight), inputs[1].float()


def _head(module: Embedding, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.linear(inputs[0], module.weight)


def _loss(output: torch.Tensor, labels: dict[str, torch.Tensor] | torch.Tensor) -> torch.Tensor:
    assert isinstance(labels, torch.Tensor)
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def _layers() -> list[Any]:
    blocks = [LayerSpec(Block) for _ in range(6)]
    return [
        TiedLayerSpec("embedding", Embedding),
        *blocks,
        TiedLayerSpec("embedding", Embedding, forward_fn=_head, tied_weight_attr="weight"),
    ]


def _data(seed: int, length: int = 8) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(0, WIDTH, (2, length + 1), generator=generator)
        yield (tokens[:, :-1], torch.ones(2, length, dtype=torch.int64)), tokens[:, 1:]


def _config(stage: int, **others: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **others,
    }


def _trained(rank: int, world: int, stages: int, cases: list[tuple[int, int, str]]) -> list[tuple[list[float], State]]:
    """By case (stage of ZeRO, chunks, schedule): losses and norms of three steps and an evaluation, and parameters."""
    found: list[tuple[list[float], State]] = []
    for stage, chunks, schedule in cases:
        bubbles = "zero_bubble" not in schedule
        model = PipelineModule(
            _layers(),
            num_stages=stages,
            loss_fn=_loss,
            seed_layers=True,
            partition_method="uniform",
            chunks=chunks,
            placement="v" if schedule == "zbv_zero_bubble" else "loop",
        )
        interval = stage % 2 if bubbles else 0
        config = _config(stage, pipeline={"schedule": schedule, "activation_checkpoint_interval": interval})
        engine, _, _, _ = zeroshard.initialize(model=model, config=config)
        place = engine.grid.get_data_parallel_id()
        data, told = _data(place), list[float]()
        for step in range(3):
            told.append(float(engine.train_batch(data)))
            told.append(engine.get_global_grad_norm() or 0.0)
            if step == 1:
                told.append(float(engine.eval_batch(_data(100 + place), num_micro_batches=2)))
                told.append(float(engine.eval_batch(_data(100 + place, length=5), num_micro_batches=2)))
        assert (engine.global_steps, engine.micro_steps) == (3, 3 * MICRO)
        found.append((told, {name: value.clone() for name, value in zeroshard.full_state_dict(engine.module).items()}))
        engine.destroy()
    if stages == 2 and world == 4:
        model = PipelineModule(_layers(), num_stages=2, loss_fn=_loss)
        with pytest.raises(UsageError, match=r"at ZeRO stage 3: gradients of weights come when unit '\S+' is not"):
            zeroshard.initialize(model=model, config=_config(3, pipeline={"schedule": "interleaved_zero_bubble"}))
    return found


def _assert_alike(stages: int, data: int, cases: list[tuple[int, int, str]]) -> None:
    ((wanted, parameters),) = run_ranks(data, _trained, 1, [(0, 1, "auto")])[0]
    found = run_ranks(stages * data, _trained, stages, cases, timeout=300)
    for number, case in enumerate(cases):
        held: State = {}
        for told, state in (rank[number] for rank in found):
            assert told == pytest.approx(wanted, abs=1e-6, rel=1e-6), f"{stages} x {data}, {case}"
            held |= state
        assert held.keys() == parameters.keys()
        for name, value in parameters.items():
            difference = float((held[name] - value).abs().max())
            assert difference < 1e-6, f"{stages} x {data}, {case}: {name} differs by {difference}"


def test_every_schedule_trains_as_one_stage_does() -> None:
    _assert_alike(2, 2, [(1, 1, "auto"), (3, 2, "auto")])
    _assert_alike(2, 1, [(2, 1, "interleaved_zero_bubble"), (1, 2, "zbv_zero_bubble")])


SPECS = [
    {"patterns": [r".*up\.weight"], "partition_type": "column"},
    {"patterns": [r".*down\.weight"], "partition_type": "row"},
]


def _beside_tensors(rank: int, world: int) -> list[tuple[list[float], State]]:
    found: list[tuple[list[float], State]] = []
    for stage, tensor in ((3, True), (2, False)):
        model = PipelineModule(
            _layers(),
            topology=PipeModelDataParallelTopology(2, 2, 1) if tensor else PipeDataParallelTopology(2, 2),
            loss_fn=_loss,
            seed_layers=True,
            partition_method="uniform",
        )
        divided = {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": SPECS}}} if tensor else {}
        engine, _, _, _ = zeroshard.initialize(model=model, config=_config(stage, **divided))
        data, told = _data(0), list[float]()
        for _ in range(3):
            told += [float(engine.train_batch(data)), engine.get_global_grad_norm() or 0.0]
        found.append((told, dict(zeroshard.full_state_dict(engine.module))))
        engine.destroy()
    return found


def test_layers_of_a_pipeline_are_divided_over_tensors_too() -> None:
    for (told, state), (wanted, parameters) in run_ranks(4, _beside_tensors):
        assert told == pytest.approx(wanted, abs=1e-6, rel=1e-6)  # both data ranks read the same
        assert state.keys() == parameters.keys()
        for name, value in parameters.items():
            assert float((state[name] - value).abs().max()) < 1e-6, name


def _shared_by_stages(rank: int, world: int) -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    said = r"layers 0 \(stage 0\) and 2 \(stage 1\) share parameter 'weight'.* TiedLayerSpec\(key"
    with pytest.raises(UsageError, match=said):
        PipelineModule([first, nn.Tanh(), last], num_stages=2, partition_method="uniform")


def test_a_parameter_that_modules_on_two_stages_share_is_refused() -> None:
    run_ranks(2, _shared_by_stages)


class _Holder(nn.Module):
    """Holds all layers, and a number."""

    def __init__(self, first: nn.Linear) -> None:
        super().__init__()
        self.first, self.scale = first, 2.0

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.first.weight)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class _Argument(nn.Module):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = other


def _with(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


def _captured_by_functions(rank: int, world: int) -> None:
    first = nn.Linear(4, 4)
    holder = _Holder(first)
    refused: list[Any] = [
        lambda x: F.linear(x, first.weight),
        lambda x: first(x),
        lambda x, used=first: used(x),
        lambda x: holder.first(x),
        lambda x: holder.project(x),
        holder.project,
        partial(_with, first.weight),
        LayerSpec(_Argument, first),
        TiedLayerSpec("tied", nn.Linear, 4, 4, forward_fn=lambda module, x: module(first(x))),
    ]
    for last in refused:
        with pytest.raises(UsageError, match=r"layers 0 \(stage 0\) and 1 \(stage 1\) share parameter"):
            PipelineModule([first, last], num_stages=2, partition_method="uniform")
    for last in (lambda x: x * holder.scale, holder.scaled, lambda x: x * first.in_features, torch.tanh):
        PipelineModule([first, last], num_stages=2, partition_method="uniform")
    first.requires_grad_(False)
    PipelineModule([first, refused[0]], num_stages=2, partition_method="uniform")


def test_a_parameter_that_a_function_on_another_stage_has_captured_is_refused() -> None:
    run_ranks(2, _captured_by_functions)


def _single_micro_batches(rank: int, world: int, stages: int) -> list[float]:
    told: list[float] = []
    for schedule in ("auto", "1f1b"):
        model = PipelineModule(
            _layers(), num_stages=stages, loss_fn=_loss, seed_layers=True, partition_method="uniform"
        )
        config = _config(1, gradient_accumulation_steps=1, pipeline={"schedule": schedule})
        engine, _, _, _ = zeroshard.initialize(model=model, config=config)
        data = _data(0)
        for _ in range(2):
            told += [float(engine.train_batch(data)), engine.get_global_grad_norm() or 0.0]
        engine.destroy()
    return told


def test_a_step_of_fewer_micro_batches_than_stages_trains_as_one_stage_does() -> None:
    (wanted,) = run_ranks(1, _single_micro_batches, 1)
    for told in run_ranks(2, _single_micro_batches, 2):
        assert told == pytest.approx(wanted, abs=1e-6, rel=1e-6)


@pytest.mark.skipif(not WHOLE_MATRIX, reason="set ZEROSHARD_ALL_MESHES=1")
@pytest.mark.parametrize(("stages", "data"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_every_schedule_at_every_stage(stages: int, data: int) -> None:
    kinds = [(1, "1f1b"), (1, "gpipe"), (2, "interleaved_1f1b"), (2, "looped_bfs")]
    split = [(1, "interleaved_zero_bubble"), (2, "interleaved_zero_bubble"), (2, "zbv_zero_bubble")]
    _assert_alike(stages, data, [(stage, *kind) for stage in range(4) for kind in kinds])
    _assert_alike(stages, data, [(stage, *kind) for stage in range(3) for kind in split])


def _own_layers(rank: int, world: int) -> None:
    model = PipelineModule(_layers(), num_stages=2, partition_method="type:Block", seed_layers=True)
    names = [name for name, _ in model.named_parameters()]
    assert len(model.forward_funcs) == 4
    assert any(name.startswith(f"{1 if rank == 0 else 6}.") for name in names)
    assert not any(name.startswith(f"{6 if rank == 0 else 1}.") for name in names)
    assert model.mpu().get_pipe_parallel_rank() == rank
    assert model.mpu().is_last_stage is (rank == 1)
    assert model.mpu().stage_to_global(1 - rank) == 1 - rank
    v = PipelineModule([nn.Linear(2, 2) for _ in range(4)], num_stages=2, chunks=2, placement="v")
    assert v.own == ([0, 3] if rank == 0 else [1, 2])
    _refuses()


def _refuses() -> None:
    specs = [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]
    with pytest.raises(UsageError, match=r"num_stages=3 does not divide the 2 ranks"):
        PipelineModule(specs, num_stages=3)
    with pytest.raises(UsageError, match=r"1 layers for 2 stages: each needs at least one"):
        PipelineModule(specs[:1], num_stages=2)
    with pytest.raises(UsageError, match=r"4 layers for 2 stages of 3 chunks each"):
        PipelineModule(specs, num_stages=2, chunks=3)
    with pytest.raises(UsageError, match=r"num_stages=1, but the topology \(pipe 2 x data 1\) has 2"):
        PipelineModule(specs, num_stages=1, topology=PipeDataParallelTopology(2, 1))
    with pytest.raises(UsageError, match=r"layer 1 is a int; a LayerSpec, a module or a function"):
        PipelineModule([specs[0], 3], num_stages=2)
    tensor = PipelineModule(specs, topology=PipeModelDataParallelTopology(1, 2, 1))
    with pytest.raises(PlanError, match=r"axis 'tp' has 2 ranks, but nothing uses it"):
        zeroshard.initialize(model=tensor, config=_config(1))
    model = PipelineModule(specs, topology=ProcessTopology(["pipe", "data"], [2, 1]), loss_fn=_loss)
    for section, message in (
        ({"schedule": "interleaved_1f1b"}, "runs several chunks per stage, and this PipelineModule has 1; build it"),
        ({"schedule": "zbv_zero_bubble"}, r"runs two chunks per stage, .* chunks=2\), or use 'gpipe' or '1f1b'"),
        (
            {"schedule": "interleaved_zero_bubble", "activation_checkpoint_interval": 1},
            "blocks would be computed again for inputs and for weights",
        ),
        ({"stages": 4}, r"pipeline.stages is 4, but the PipelineModule was built with 2 stages"),
        ({"partition": "uniform"}, r"pipeline.partition is 'uniform', but .* partition_method='parameters'"),
        ({"seed_layers": True}, r"pipeline.seed_layers is true, but the PipelineModule has built"),
    ):
        with pytest.raises((UsageError, ConfigError), match=message):
            zeroshard.initialize(model=model, config=_config(1, pipeline=section))
    with pytest.raises(PlanError, match=r"autotp_size is 2, but the mesh \(pp 2 .*\) has 1 ranks of 'tp'"):
        zeroshard.initialize(model=model, config=_config(1, tensor_parallel={"autotp_size": 2}))
    with pytest.raises(ConfigError, match=r'stage "auto" is not built for pipelines'):
        zeroshard.initialize(model=model, config=_config(1, zero_optimization={"stage": "auto"}))
    v = PipelineModule(specs, num_stages=2, chunks=2, placement="v")
    with pytest.raises(UsageError, match=r"'looped_bfs' runs chunks placed as 'loop', .* use 'zbv_zero_bubble'"):
        zeroshard.initialize(model=v, config=_config(1, pipeline={"schedule": "looped_bfs"}))
    with pytest.raises(ConfigError, match=r"flops_profiler.enabled: FLOPs of pipelines"):
        zeroshard.initialize(model=model, config=_config(1, flops_profiler={"enabled": True}))
    empty = PipelineModule([*specs[:2], nn.ReLU(), nn.ReLU()], num_stages=2, partition_method="uniform")
    with pytest.raises(UsageError, match=r"stage 1 of 2 \(layers \[2, 3\]\) has no trained parameters"):
        zeroshard.initialize(model=empty, config=_config(1))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp_shard"))
    with pytest.raises(UsageError, match=r"has pipeline stages; build the model as a PipelineModule"):
        zeroshard.initialize(model=nn.Linear(2, 2), config=_config(1), mesh_param=mesh)
    several = PipelineModule(specs, num_stages=2, chunks=2)
    with pytest.raises(UsageError, match=r"5 micro-batches .* don't divide into 2 rounds; use a multiple of 2"):
        zeroshard.initialize(model=several, config=_config(1, gradient_accumulation_steps=5))
    engine, _, _, _ = zeroshard.initialize(model=model, config=_config(1, pipeline={"stages": 2}))
    with pytest.raises(UsageError, match=r"engine.backward\(\): .* call train_batch"):
        engine.backward(torch.zeros(()))
    with pytest.raises(UsageError, match=r"the data iterator ended after 1 of the 4 micro-batches"):
        engine.train_batch(iter([(torch.zeros(1, 4), torch.zeros(1))]))
    engine.destroy()


def test_a_stage_has_its_own_layers_and_what_can_not_be_is_refused() -> None:
    run_ranks(2, _own_layers)


def _goes_on(rank: int, world: int, folder: str, stages: int, stage: int, chunks: int, load: bool) -> list[float]:
    """Two steps and a checkpoint, or that checkpoint; then losses, and what the run counted."""
    model = PipelineModule(_layers(), num_stages=stages, loss_fn=_loss, seed_layers=True, chunks=chunks)
    config = _config(stage, fp16={"enabled": True, "initial_scale_power": 19, "hysteresis": 1})
    engine, _, _, _ = zeroshard.initialize(model=model, config=config)
    data = _data(0)
    if load:
        engine.load_checkpoint(folder)
    else:
        engine.train_batch(data)
        engine.train_batch(data)
        engine.save_checkpoint(folder)
    data = _data(50)
    told = [float(engine.train_batch(data)) for _ in range(4)]
    told += [engine.loss_scale, engine.global_steps, engine.micro_steps, engine.skipped_steps]
    engine.destroy()
    return told


def test_a_checkpoint_goes_on_in_other_stages_with_the_loss_scale_and_skipped_steps_of_all(tmp_path: Path) -> None:
    wanted, other = run_ranks(2, _goes_on, str(tmp_path), 2, 1, 1, False)
    assert wanted == other
    assert wanted[-1] > 2  # steps skipped on all stages, for a loss scale that one of them could not hold
    assert wanted[4] < 2**19
    for case in ((2, 3, 2), (1, 2, 1)):
        for told in run_ranks(case[0], _goes_on, str(tmp_path), *case, True):
            assert told == pytest.approx(wanted, abs=2e-3), case


def _leaves(rank: int, world: int) -> None:
    model = PipelineModule([LayerSpec(nn.Linear, 4, 4) for _ in range(2)], num_stages=2, loss_fn=F.mse_loss)
    engine, _, _, _ = zeroshard.initialize(model=model, config=_config(1))
    data = iter([(torch.ones(2, 4), torch.zeros(2, 4))] * 2 * MICRO)
    engine.train_batch(data)
    if rank == 0:
        os._exit(0)
    with pytest.raises(ZeroShardError, match=r"rank 0 died .* waited for micro-batches of train_batch"):
        engine.train_batch(data)


def test_a_stage_that_is_gone_is_named_by_the_others() -> None:
    with pytest.raises(AssertionError, match=r"rank 0 failed first:\ndied without a report: exit code 0$"):
        run_ranks(2, _leaves)


def _calls(rank: int, world: int) -> None:
    model = PipelineModule([LayerSpec(nn.Linear, 4, 4) for _ in range(2)], num_stages=2, loss_fn=F.mse_loss)
    engine, _, _, _ = zeroshard.initialize(model=model, config=_config(1))
    data = iter([(torch.ones(2, 4), torch.zeros(2, 4))] * 3 * MICRO)
    engine.train_batch(data)
    engine.eval_batch(data)
    (engine.train_batch if rank else engine.eval_batch)(data)


@pytest.mark.skipif(not WHOLE_MATRIX, reason="set ZEROSHARD_ALL_MESHES=1")
def test_ranks_that_call_different_things_are_ended() -> None:
    # Stuck in a receive of torch, which no exception reaches, they print the DivergenceError that names both calls.
    with pytest.raises(AssertionError, match="exit code 70"):
        run_ranks(2, _calls)


def _shapes(rank: int, world: int) -> None:
    """Steps of other shapes, where the module allows it; elsewhere the first stage, which sees them, refuses."""
    for dynamic in (True, False):
        model = PipelineModule(
            _layers(), num_stages=2, loss_fn=_loss, dynamic_shape=dynamic, partition_method="uniform", seed_layers=True
        )
        engine, _, _, _ = zeroshard.initialize(model=model, config=_config(1))
        engine.train_batch(_data(0))
        if dynamic:
            engine.train_batch(_data(1, length=4))
            engine.train_batch(_data(2))
            engine.destroy()
            continue
        if rank == 0:
            with pytest.raises(UsageError, match=r"micro-batches of a step have the shapes .*2, 8.* and .*2, 4"):
                engine.train_batch(_data(3, length=4))


def test_shapes_may_change_between_steps_where_the_module_says_so() -> None:
    run_ranks(2, _shapes)


class Tokens(torch.utils.data.Dataset[Batch]):
    """Samples for a script that gives `training_data`."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Batch:
        tokens = torch.randint(0, WIDTH, (9,), generator=torch.Generator().manual_seed(index))
        return (tokens[:-1], torch.ones(8)), tokens[1:]


def _script(rank: int, world: int) -> list[float]:
    """What a script for DeepSpeed says, word for word."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    deepspeed.init_distributed()
    net = PipelineModule(
        layers=[
            TiedLayerSpec("embedding", Embedding),
            *[LayerSpec(Block) for _ in range(6)],
            lambda x: x,
            TiedLayerSpec("embedding", Embedding, forward_fn=_head),
        ],
        loss_fn=_loss,
        topology=PipeDataParallelTopology(num_pp=world, num_dp=1),
        partition_method="parameters",
        activation_checkpoint_interval=1,
        seed_layers=True,
    )
    engine, _, _, _ = deepspeed.initialize(
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=Tokens(),
        config=_config(1, pipeline={"stages": "auto", "partition": "best"}),
    )
    assert isinstance(engine, deepspeed.PipelineEngine)
    assert engine.is_first_stage() is (engine.grid.get_stage_id() == 0)
    assert engine.is_last_stage() is (engine.mpu.get_pipe_parallel_rank() == world - 1)
    losses = [float(engine.train_batch()) for _ in range(3)]
    engine.set_dataiterator(_data(7))
    losses.append(float(engine.train_batch()))
    losses.append(float(engine.eval_batch(_data(8))))
    engine.destroy()
    return losses


def test_a_script_for_deepspeed_trains_unchanged_as_in_one_process() -> None:
    (wanted,) = run_ranks(1, _script)
    for found in run_ranks(2, _script):
        assert found == pytest.approx(wanted, abs=1e-6, rel=1e-6)
