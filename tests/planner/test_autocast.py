"""A trace under autocast keeps what torch.autocast keeps, and multiplies in its dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from zeroshard.planner.choose.configs import read_config
from zeroshard.planner.machine.hardware import parse_cluster
from zeroshard.planner.trace.kernels import KernelKind
from zeroshard.planner.trace.ledger import Purpose
from zeroshard.planner.trace.model_trace import Phase, trace
from zeroshard.sharding.units import find_units


def _model() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3))
    )


def _kept() -> int:
    """Bytes that autograd keeps under torch's autocast of the CPU, parameters left out."""
    model, found = _model(), dict[int, int]()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: list[torch.Tensor] = []  # so that no address comes twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.detach())  # with its graph, which holds this function, it would never be freed
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = torch.randn(64, 256, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", dtype=torch.bfloat16):
        model(batch)
    return sum(found.values())


def test_a_trace_keeps_what_autocast_keeps_and_multiplies_in_its_dtype() -> None:
    model = _model().to("meta")
    batch = torch.empty(64, 256, device="meta")
    traced = trace(
        model,
        find_units(model),
        (batch,),
        {},
        loss=lambda output: output.float().square().mean(),
        tokens=1,
        autocast=torch.bfloat16,
    )
    end = [segment for segment in traced.segments if segment.phase is Phase.FORWARD][-1].end
    assert end[Purpose.ACTIVATIONS] == pytest.approx(_kept(), rel=0.01)
    products = [k for s in traced.segments for k in s.kernels if k.kind is KernelKind.GEMM]
    assert {kernel.dtype for kernel in products} == {torch.bfloat16}


def test_a_config_says_which_dtype() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "torch_autocast": {"enabled": True, "dtype": "bf16"}}
    assert read_config(config, parse_cluster("1xH100")).autocast == "bfloat16"
    assert read_config({"train_micro_batch_size_per_gpu": 1}, parse_cluster("1xH100")).autocast is None
