"""Pipeline stages whose sequences are divided over ranks, through DeepSpeed's names, train as one process does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.one_process import State, Step, alone
from tests.support.parallel_model import BATCH, CLIP, HEADS, LENGTH, VOCABULARY, WIDTH, Attention, Mlp, tokens
from zeroshard.errors import PlanError, UsageError
from zeroshard.pipeline.layers import LayerSpec
from zeroshard.pipeline.module import PipelineModule
from zeroshard.pipeline.topology import ProcessTopology

WHOLE_MATRIX = os.environ.get("ZEROSHARD_ALL_MESHES") == "1"
MICRO = 4
Case = tuple[int, str]
"""Stage of ZeRO, and the pipeline's schedule."""


class Core(nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Causal attention of (samples, tokens, heads, width)."""
        heads = [part.transpose(1, 2) for part in (query, key, value)]
        return F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True).transpose(1, 2)


class Block(nn.Module):
    """Exchanges around its attention where the process has divided its sequences, as scripts ask."""

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.sequence.layer import DistributedAttention
        from deepspeed.utils import groups

        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(), Mlp()
        self.core: nn.Module = Core()
        if groups._get_sequence_parallel_world_size() > 1:
            self.core = DistributedAttention(self.core, groups._get_sequence_parallel_group(), 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed, own = self.norm(x), self.attention
        parts = [part(normed).unflatten(-1, (HEADS, -1)) for part in (own.q, own.k, own.v)]
        x = x + own.o(self.core(*parts).flatten(2))
        return x + self.mlp(x)


def _module(topology: ProcessTopology) -> PipelineModule:
    layers = [
        LayerSpec(nn.Embedding, VOCABULARY, WIDTH),
        *[LayerSpec(Block) for _ in range(2)],
        LayerSpec(nn.Linear, WIDTH, VOCABULARY, bias=False),
    ]
    return PipelineModule(layers, topology=topology, loss_fn=_loss, seed_layers=True, partition_method="uniform")


def _loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def _batch(step: int, reader: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch = tokens(step * MICRO + micro, reader)
    return batch[:, :-1], batch[:, 1:]


def _in_one_process(readers: int) -> tuple[list[Step], State]:
    def losses(model: nn.Module, step: int) -> Iterator[torch.Tensor]:
        for micro in range(MICRO):
            batches = [_batch(step, reader, micro) for reader in range(readers)]
            yield torch.stack([_loss(model(inputs), labels) for inputs, labels in batches]).mean() / MICRO

    return alone(_module(ProcessTopology(["pipe", "data"], [1, 1])), losses)


def _config(case: Case) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": case[0], "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "pipeline": {"schedule": case[1]},
        "sequence_parallel_size": 2,
    }


def _trains(rank: int, world: int, sizes: list[int], cases: list[Case], wanted: tuple[list[Step], State]) -> None:
    topology = ProcessTopology(["pipe", "data", "sequence"], sizes)
    for case in cases:
        engine, *_ = zeroshard.initialize(model=_module(topology), config=_config(case))
        grid = engine.grid
        assert engine.train_batch_size() == BATCH * MICRO * grid.get_data_parallel_world_size()
        each = LENGTH // grid.get_sequence_parallel_world_size()
        begin = grid.get_sequence_parallel_rank() * each
        engine.set_batch_fn(lambda pair, begin=begin, each=each: [one[:, begin : begin + each] for one in pair])
        for step, (loss, norm) in enumerate(wanted[0]):
            batches = [_batch(step, grid.get_data_parallel_id(), micro) for micro in range(MICRO)]
            assert abs(float(engine.train_batch(iter(batches))) - loss) < 1e-6, (case, step)
            assert abs((engine.get_global_grad_norm() or 0.0) - norm) < 1e-6 * max(1.0, norm), (case, step)
        state = zeroshard.full_state_dict(engine.module)
        assert state or rank % (world // sizes[0])  # a stage's first rank has all of it
        for name, value in state.items():
            assert float((value - wanted[1][name]).abs().max()) < 1e-6, (case, name)
        engine.destroy()
    if world == 4:
        _refuses(topology)


def _refuses(topology: ProcessTopology) -> None:
    config = _config((1, "1f1b"))
    engine, *_ = zeroshard.initialize(model=_module(topology), config=config)
    if engine.is_first_stage():
        with pytest.raises(UsageError, match=r"all 2 ranks of a sequence were given the same 8 tokens"):
            engine.train_batch(iter([_batch(0, 0, micro) for micro in range(MICRO)]))
    engine.destroy()
    without = _module(ProcessTopology(["pipe", "data"], [2, 2]))
    with pytest.raises(PlanError, match=r"built for pp 2 x .*: say PipelineModule\(layers, topology=ProcessTopology\("):
        zeroshard.initialize(model=without, config=config)
    with pytest.raises(UsageError, match="a PipelineParallelGrid was given, and the model is a Linear"):
        zeroshard.initialize(model=nn.Linear(2, 2), config=config, mpu=without.mpu())


def test_stages_of_divided_sequences_train_as_one_process_does_and_whole_ones_are_refused() -> None:
    cases = [(3, "1f1b"), (2, "interleaved_zero_bubble")]
    run_ranks(4, _trains, [2, 1, 2], cases, _in_one_process(1))


@pytest.mark.skipif(not WHOLE_MATRIX, reason="set ZEROSHARD_ALL_MESHES=1")
def test_they_do_so_with_several_data_ranks_at_every_stage() -> None:
    cases = [(stage, "1f1b") for stage in range(4)]
    run_ranks(8, _trains, [2, 2, 2], cases, _in_one_process(2), timeout=300)
